"""Make a set with the features of an ONNX network, for the methods that read them: `fc`, `ta`.

    python -m benchmarks.paper.features IMAGES MODEL.onnx OUT [--size 32]

IMAGES has a folder per class, in the order of the classes. The features are what the last layer of the
network (Gemm) reads; their product with its weight must be the logits. Half of the images, at random, go to
`OUT/val.npz` and half to `OUT/test.npz`. The network's preprocessing is that of the CIFAR-10 models: RGB,
x / 255, mean .485 .456 .406, standard deviation .229 .224 .225.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from PIL import Image

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
BATCH = 250


def opened(path: Path) -> tuple[onnxruntime.InferenceSession, list[str], list[np.ndarray]]:
    """Open a network with its features as an output; give the outputs' names, the weight and the bias."""
    model = onnx.load(path)
    last = model.graph.node[-1]
    if last.op_type != "Gemm" or len(last.input) != 3:
        raise SystemExit(f"the last node of {path} is not a linear layer with a bias, but {last.op_type}")
    features, *names = last.input
    model.graph.output.append(onnx.helper.make_tensor_value_info(features, onnx.TensorProto.FLOAT, None))
    values = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    weight, bias = (values[name] for name in names)
    transposed = any(one.name == "transB" and one.i for one in last.attribute)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session, [last.output[0], features], [weight if transposed else weight.T, bias]


def main() -> None:
    """Run the network and write both sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=32)
    options = parser.parse_args()
    session, names, (weight, bias) = opened(options.model)
    classes = sorted(folder for folder in options.images.iterdir() if folder.is_dir())
    files = [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]
    results: list[list[np.ndarray]] = []
    for begin in range(0, len(files), BATCH):
        images = []
        for path, _ in files[begin : begin + BATCH]:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB").resize((options.size, options.size)))
            images.append(((pixels / 255.0 - MEAN) / DEVIATION).transpose(2, 0, 1))
        results.append(
            session.run(names, {session.get_inputs()[0].name: np.stack(images).astype(np.float32)})
        )
    logits, features = (np.concatenate(parts) for parts in zip(*results, strict=True))
    assert np.abs(features @ weight.T + bias - logits).max() < 1e-3 * np.abs(logits).max()  # noqa: S101
    labels = np.array([label for _, label in files])
    order = np.random.default_rng(0).permutation(len(labels))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("val", "test"), np.array_split(order, 2), strict=True):
        np.savez(
            options.out / f"{name}.npz",
            logits=logits[rows],
            features=features[rows],
            labels=labels[rows],
            head_weight=weight,
            head_bias=bias,
        )
    accuracy = (logits.argmax(axis=1) == labels).mean()
    print(f"{len(labels)} images, {len(classes)} classes, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
