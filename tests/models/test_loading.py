"""Loading: files of weights, right and wrong, refused by name; what calibrators read besides logits."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

from boxcal.models import BackboneError, UnusableInput
from boxcal.models.backends.backbone import OpenBackbone
from boxcal.models.backends.digits import load_digits
from boxcal.models.backends.torchvision_models import build, classes_of, preprocessing_of
from boxcal.models.loading.specifications import load_backbone


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(7)
    return build("squeezenet1_1", num_classes=6).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, network: torch.nn.Module) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.save(network.state_dict(), folder / "six.pth")
    save_file(network.state_dict(), folder / "six.safetensors")
    (folder / "six.txt").write_text("\n".join(["ant", "bee", "cat", "dog", "eel", "fox"]) + "\n")
    return folder


def squeezenet(weights: str | Path, **options: Any) -> Any:
    return load_backbone("torchvision:squeezenet1_1", weights=str(weights), device="cpu", **options)


@pytest.mark.parametrize("file", ["six.pth", "six.safetensors"])
def test_a_local_file_gives_the_networks_own_logits(
    file: str, folder: Path, network: torch.nn.Module
) -> None:
    backbone = squeezenet(folder / file)
    batch = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(backbone(batch), network(batch))
    assert backbone.labels == ("0", "1", "2", "3", "4", "5")
    assert backbone.input_shape == (3, 224, 224)


def test_the_fingerprint_is_of_the_weights_and_not_of_the_file(
    folder: Path, network: torch.nn.Module
) -> None:
    one, two = (squeezenet(folder / file).fingerprint for file in ("six.pth", "six.safetensors"))
    assert one == two
    changed = {key: value.clone() for key, value in network.state_dict().items()}
    changed["classifier.1.bias"][0] += 1e-3
    save_file(changed, folder / "changed.safetensors")
    assert squeezenet(folder / "changed.safetensors").fingerprint != one


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a\nb\nc\n", r"has 3 labels, but the model has 10 classes"),
        ("a\n\nc\nd\ne\nf\ng\nh\ni\nj\n", r"label 2 is empty"),
        ("b\nb\nb (2)\nd\ne\nf\ng\nh\ni\nj\n", r"the label 'b \(2\)' repeats"),
    ],
)
def test_wrong_labels_are_refused(lines: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text(lines)
    with pytest.raises(BackboneError, match=message):
        load_backbone("digits", labels=file)
    with pytest.raises(BackboneError, match=r"absent\.txt cannot be read"):
        load_backbone("digits", labels=tmp_path / "absent.txt")


def test_repeated_names_are_numbered(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("crane\nb\nc\nd\ncrane\nf\ng\nh\ncrane\nj\n")
    labels = load_backbone("digits", labels=file, device="cpu").labels
    assert (labels[0], labels[4], labels[8]) == ("crane", "crane (2)", "crane (3)")


def test_random_weights_only_by_name_and_always_the_same() -> None:
    with pytest.raises(BackboneError, match=r"needs weights.*IMAGENET1K_V1.*'random'"):
        load_backbone("torchvision:squeezenet1_1")
    before = torch.random.get_rng_state()
    one = squeezenet("random")
    assert torch.equal(before, torch.random.get_rng_state())
    two = squeezenet("random")
    assert one.fingerprint == two.fingerprint
    assert one.num_classes == 1000
    assert one.labels[0] == "tench"
    assert len(set(one.labels)) == 1000


class Surprise:
    """What a pickle must not be allowed to build."""

    def __init__(self) -> None:
        self.value = 1


def test_damaged_weights_are_refused_by_name(folder: Path, network: torch.nn.Module) -> None:
    state: OrderedDict[str, Any] = OrderedDict(network.state_dict())
    saved = {
        "misses": (OrderedDict([*state.items()][:1] + [*state.items()][2:]), r"misses features\.0\.bias"),
        "extra": (state | {"extra": torch.zeros(1)}, "has unknown extra"),
        "shape": (
            state | {"features.0.weight": torch.zeros(64, 3, 5, 5)},
            r"features\.0\.weight has shape \(64, 3, 5, 5\), expected \(64, 3, 3, 3\)",
        ),
        "pickle": ({"model": Surprise()}, "more than tensors"),
        "list": ([1, 2, 3], "no state_dict"),
    }
    written = {
        "truncated.pth": ((folder / "six.pth").read_bytes()[:10000], "readable PyTorch file|damaged"),
        "text.pth": (b"these are no weights", "damaged|readable PyTorch"),
        "text.safetensors": (b"these are no weights", "not a readable safetensors file"),
        "empty.safetensors": (b"", "not a readable safetensors file"),
        "weights.npz": (b"PK", r"not '\.npz'"),
    }
    messages = {"absent.pth": r"absent\.pth does not exist"}
    for name, (content, message) in saved.items():
        torch.save(content, folder / f"{name}.pth")
        messages[f"{name}.pth"] = message
    for name, (data, message) in written.items():
        (folder / name).write_bytes(data)
        messages[name] = message
    for name, message in messages.items():
        with pytest.raises(BackboneError, match=message) as caught:
            squeezenet(folder / name)
        assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "digit"}, "Unknown model 'digit'"),
        ({"spec": "torchvision:"}, "Unknown model 'torchvision:'"),
        ({"spec": "nets/m.onnx"}, r"Unknown model 'nets/m\.onnx'.* Did you mean 'onnx:nets/m\.onnx'\?$"),
        ({"spec": "m.pt2"}, r"Did you mean 'pt2:m\.pt2'\?$"),
        ({"spec": "m.pth"}, r" m\.pth is not read as a model: export it as ONNX"),
        ({"spec": "torchvision:vit_b_17"}, "'vit_b_17'.*Did you mean one of vit_b_16"),
        ({"spec": "torchvision:raft_large"}, "no classification model 'raft_large'"),
        ({"spec": "torchvision:vit_b_16", "weights": "V3"}, "no weights 'V3'.*IMAGENET1K_V1"),
        ({"spec": "digits", "weights": "random"}, "brings its own"),
        ({"spec": "digits", "device": "tpu"}, "Unknown device 'tpu'"),
        ({"spec": "digits", "device": "meta"}, "Unknown device 'meta'"),
        ({"spec": "digits", "precision": "float8"}, "Unknown precision 'float8'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        load_backbone(**options)


def test_a_folder_without_its_kind_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BackboneError, match=rf"Did you mean 'transformers:{tmp_path}'\?$"):
        load_backbone(str(tmp_path))


def test_other_files_of_torch_are_no_program(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(BackboneError, match=r"is more than tensors; .* as torch\.export\.save writes them\."):
        load_backbone(f"pt2:{path}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(BackboneError, match="'cuda' was asked for"):
        load_backbone("digits", device="cuda")


def test_a_batch_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reads inputs of shape \(1, 8, 8\), got \(3, 8, 8\)"):
        load_backbone("digits", device="cpu")(np.zeros((2, 3, 8, 8), np.float32))


def test_every_published_weight_has_a_preprocessing() -> None:
    for name in torchvision.models.list_models(module=torchvision.models):
        for entry in torchvision.models.get_model_weights(name):
            side = entry.transforms().crop_size[0]
            assert preprocessing_of(entry).input_shape == (3, side, side)


@pytest.mark.long
def test_every_model_has_a_layer_that_tells_its_classes() -> None:
    for name in torchvision.models.list_models(module=torchvision.models):
        try:
            with torch.device("meta"):
                network = build(name, num_classes=17)
        except NotImplementedError:  # regnets compute their widths with tensors
            network = build(name, num_classes=17)
        assert classes_of(network) == 17


@pytest.mark.parametrize("size", [(500, 375), (333, 500), (256, 256), (100, 900), (900, 100), (224, 224)])
@pytest.mark.parametrize("model", ["vit_b_16", "resnet50", "swin_v2_t", "convnext_tiny", "efficientnet_b0"])
def test_preprocessing_is_torchvisions_own(model: str, size: tuple[int, int]) -> None:
    """Up to rounding: pillow may take the two axes in the other order where only the crop is resized."""
    entry = torchvision.models.get_model_weights(model).DEFAULT
    noise = np.random.default_rng(3).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    preprocessing = preprocessing_of(entry)
    ours, theirs = preprocessing(image), entry.transforms()(image).numpy()
    assert ours.shape == theirs.shape
    level = 1 / 255 / min(preprocessing.std)
    assert np.abs(ours - theirs).max() < 3.01 * level
    assert np.mean(np.abs(ours - theirs)) < 0.3 * level


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_stays_close(precision: str) -> None:
    inputs = torch.arange(64.0).reshape(1, 1, 8, 8) % 17
    full = torch.as_tensor(load_backbone("digits", device="cpu")(inputs))
    low = load_backbone("digits", device="cpu", precision=precision)(inputs)
    assert low.dtype == torch.float32
    assert not torch.equal(low, full)
    torch.testing.assert_close(low.softmax(1), full.softmax(1), atol=0.05, rtol=0)


# The ways torchvision ends a network: `fc`, `classifier`, `head`; digits has `heads`, as ViT-B/16.
LINEAR = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "digits"]
LARGE = [
    "swin_t",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "maxvit_t",
    "googlenet",
    "inception_v3",
]


def opened(name: str, folder: Path) -> OpenBackbone:
    if name == "digits":
        return load_digits(labels=None, device="cpu", precision="float32")
    torch.manual_seed(0)
    save_file(build(name, num_classes=7).state_dict(), folder / f"{name}.safetensors")
    backbone = load_backbone(f"torchvision:{name}", weights=str(folder / f"{name}.safetensors"), device="cpu")
    assert isinstance(backbone, OpenBackbone)
    return backbone


@pytest.mark.parametrize("name", [*LINEAR, *(pytest.param(name, marks=pytest.mark.long) for name in LARGE)])
def test_the_head_of_the_features_is_the_logits(name: str, tmp_path: Path) -> None:
    backbone = opened(name, tmp_path)
    batch = torch.randn(2, *backbone.input_shape, generator=torch.Generator().manual_seed(1))
    assert backbone.head is not None
    weight, bias = backbone.head
    features = backbone.features(batch)
    assert features.shape == (2, weight.shape[1])
    torch.testing.assert_close(features @ weight.T + bias, backbone(batch), atol=1e-4, rtol=1e-4)


def test_a_convolution_is_no_linear_head(tmp_path: Path) -> None:
    backbone = opened("squeezenet1_1", tmp_path)
    assert backbone.head is None
    with pytest.raises(UnusableInput, match="no linear head"):
        backbone.features(torch.zeros(1, 3, 224, 224))


def test_digits_can_be_differentiated_in_its_inputs() -> None:
    digits = load_backbone("digits", device="cpu")
    assert isinstance(digits, OpenBackbone)
    batch = torch.full((3, 1, 8, 8), 5.0, requires_grad=True)
    logits = digits.differentiable(batch)
    np.testing.assert_allclose(logits.detach(), digits(batch.detach()), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(logits[:, 3].sum(), batch)
    step = torch.zeros_like(gradient)
    step[0, 0, 4, 4] = 1e-2
    ahead, behind = (digits(batch.detach() + sign * step)[0, 3] for sign in (1, -1))
    assert ((ahead - behind) / 2e-2).item() == pytest.approx(gradient[0, 0, 4, 4].item(), rel=0.02, abs=1e-3)
