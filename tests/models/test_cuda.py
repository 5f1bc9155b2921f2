"""What only a GPU can show: graphs replay what was recorded, in the precision that was asked for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from boxcal.models.loading.specifications import load_backbone
from tests.models.files import samples, write_onnx

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_recorded_passes_answer_like_the_cpu(precision: str) -> None:
    on_gpu = load_backbone("digits", device="cuda", precision=precision)
    on_cpu = load_backbone("digits", device="cpu")
    on_gpu.warm_up([1, 4, 16])
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 4, 11, 16, 40, 2):
        batch = torch.randint(0, 17, (count, 1, 8, 8), generator=generator).float()
        got, expected = on_gpu(batch), torch.as_tensor(on_cpu(batch))
        assert got.device.type == "cpu"
        assert got.dtype == torch.float32
        tolerance = 1e-3 if precision == "float32" else 0.06
        torch.testing.assert_close(got.softmax(1), expected.softmax(1), atol=tolerance, rtol=0)


def test_an_onnx_file_runs_on_cuda(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    on_gpu, on_cpu = (load_backbone(f"onnx:{path}", device=device) for device in ("cuda", "cpu"))
    assert on_gpu.device.startswith("cuda")
    np.testing.assert_allclose(on_gpu(samples(9)), on_cpu(samples(9)), atol=1e-3, rtol=1e-3)
