"""Train the `digits` backbone: `python -m tools.train_digits [--check]` writes its files.

It is trained long, with neither weight decay nor augmentation nor a look at the validation split: it ends
overconfident, as such networks do, which is what there is to calibrate. One thread and a fixed seed make
the run reproducible to the last bit with one release of torch on one kind of processor; elsewhere the sums
round differently and the weights drift apart. `--check` trains anew and says which of the two it found.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from boxcal.models.backends.digits import WEIGHTS, DigitsTransformer
from boxcal.models.backends.onnx_backbone import DIGITS as GRAPH
from boxcal.models.backends.onnx_backbone import FEATURES
from boxcal.models.digits_data import Digits, load_digits_split
from boxcal.models.inputs.images import DIGIT_SIDE

SEED = 0
EPOCHS = 150
BATCH_SIZE = 32
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 200
DECAYED_AT = 0.6  # of all steps: the learning rate has then fallen along a cosine to its floor
FLOOR = 0.3


def learning_rate(step: int, steps: int) -> float:
    """Rise linearly, fall along a cosine, then stay low until the training loss is all but zero."""
    decay = 0.5 * (1 + math.cos(math.pi * min(1.0, step / (DECAYED_AT * steps))))
    return LEARNING_RATE * min(1.0, step / WARM_UP_STEPS) * max(FLOOR, decay)


def train(digits: Digits) -> DigitsTransformer:
    """Minimise the cross-entropy on `digits` by Adam; the same weights every time."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    network = DigitsTransformer()
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    inputs, labels = torch.from_numpy(digits.levels), torch.from_numpy(digits.labels)
    steps = EPOCHS * math.ceil(len(digits) / BATCH_SIZE)
    step = 0
    for epoch in range(EPOCHS):
        for batch in torch.split(torch.randperm(len(digits)), BATCH_SIZE):
            step += 1
            optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
            loss = functional.cross_entropy(network(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        print(f"\repoch {epoch + 1}/{EPOCHS}, loss {loss.item():.5f}", end="", file=sys.stderr)
    print(file=sys.stderr)
    network.eval()
    return network


def describe(network: DigitsTransformer, name: str, digits: Digits) -> str:
    """Accuracy, mean confidence and negative log-likelihood in one line."""
    with torch.inference_mode():
        logits = network(torch.from_numpy(digits.levels))
    labels = torch.from_numpy(digits.labels)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    confidence = logits.softmax(1).amax(1).double().mean().item()
    nll = functional.cross_entropy(logits, labels).item()
    return f"{name:>10}: accuracy {accuracy:.4f}, mean confidence {confidence:.4f}, NLL {nll:.4f}"


def compare(network: DigitsTransformer) -> bool:
    """Say how far the new weights are from the committed ones; True where every bit agrees."""
    committed = load_file(WEIGHTS)
    apart = max(float((committed[key] - value).abs().max()) for key, value in network.state_dict().items())
    if apart == 0:
        print(f"{WEIGHTS.name} reproduced to the last bit")
    else:
        print(f"{WEIGHTS.name} not reproduced: weights differ by up to {apart:.3g}")
    return apart == 0


class WithFeatures(nn.Module):
    """A network that returns also what its head reads."""

    def __init__(self, network: DigitsTransformer) -> None:
        super().__init__()
        self.heads, self.body = network.heads, copy.deepcopy(network)
        self.body.heads = nn.Sequential()

    def forward(self, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, 10) and features (N, D) of levels (N, 1, 8, 8)."""
        features = self.body(levels)
        return self.heads(features), features


def export(network: DigitsTransformer) -> None:
    """Write the network as an ONNX graph, for services without torch."""
    inputs = torch.zeros(2, 1, DIGIT_SIDE, DIGIT_SIDE)
    torch.onnx.export(
        WithFeatures(network).eval(),
        (inputs,),
        str(GRAPH),
        dynamo=False,
        input_names=["levels"],
        output_names=["logits", FEATURES],
        dynamic_axes={name: {0: "n"} for name in ("levels", "logits", FEATURES)},
    )
    print(f"wrote {GRAPH} ({GRAPH.stat().st_size:,} bytes)")


def main() -> int:
    """Train, then write the weights or compare them with the committed ones."""
    parser = argparse.ArgumentParser(description="Train the digits backbone.")
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed weights; write nothing"
    )
    check = parser.parse_args().check
    split = load_digits_split()
    network = train(split.train)
    for name in ("train", "validation", "test"):
        print(describe(network, name, getattr(split, name)))
    if check:
        return 0 if compare(network) else 1
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, WEIGHTS)
    print(f"wrote {WEIGHTS} ({WEIGHTS.stat().st_size:,} bytes)")
    export(network)
    return 0


if __name__ == "__main__":
    sys.exit(main())
