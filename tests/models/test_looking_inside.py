"""What calibrators read besides logits: features, the head, and gradients in the inputs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from boxcal.models.backends.backbone import OpenBackbone
from boxcal.models.backends.torchvision_models import build
from boxcal.models.errors import UnusableInput
from boxcal.models.loading.specifications import load_backbone

# The ways torchvision ends a network: `fc`, `classifier`, `head`; digits has `heads`, as ViT-B/16.
LINEAR = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "digits"]
LARGER = [
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
        digits = load_backbone("digits", device="cpu")
        assert isinstance(digits, OpenBackbone)
        return digits
    torch.manual_seed(0)
    save_file(build(name, num_classes=7).state_dict(), folder / f"{name}.safetensors")
    backbone = load_backbone(f"torchvision:{name}", weights=str(folder / f"{name}.safetensors"), device="cpu")
    assert isinstance(backbone, OpenBackbone)
    return backbone


@pytest.mark.parametrize("name", [*LINEAR, *(pytest.param(name, marks=pytest.mark.long) for name in LARGER)])
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
    torch.testing.assert_close(logits.detach(), digits(batch.detach()))
    (gradient,) = torch.autograd.grad(logits[:, 3].sum(), batch)
    step = torch.zeros_like(gradient)
    step[0, 0, 4, 4] = 1e-2
    ahead, behind = (digits(batch.detach() + sign * step)[0, 3] for sign in (1, -1))
    assert ((ahead - behind) / 2e-2).item() == pytest.approx(gradient[0, 0, 4, 4].item(), rel=0.02, abs=1e-3)
