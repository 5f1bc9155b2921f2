"""The computation of all other servers: JPEG to top 5, and 1000 logits to softmax.

It runs in their environments and therefore imports nothing of this project. Images are decoded at the
smallest scale that JPEG allows, as in the service under test, so that servers are compared and not decoders.
"""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import onnxruntime
import orjson
from PIL import Image

RESIZE, CROP = 256, 224
# Whether weights in 8 bits are converted once, not in every pass.
EXPANDED = os.environ.get("BENCH_EXPANDED") == "1"
Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def port() -> int:
    return int(os.environ["BENCH_PORT"])


def task() -> str:
    """Return which of the two is measured: `images` or `logits`."""
    return os.environ["BENCH_TASK"]


def prepare(image: Image.Image) -> Array:
    """Turn an opened image into (3, 224, 224): short side to 256, centre crop, x / 127.5 - 1."""
    image.draft("RGB", (RESIZE, RESIZE))
    image = image.convert("RGB")
    scale = RESIZE / min(image.size)
    width, height = (max(CROP, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - CROP) // 2, (height - CROP) // 2
    pixels = np.asarray(image.crop((left, top, left + CROP, top + CROP)), dtype=np.float32)
    return np.ascontiguousarray((pixels / 127.5 - 1).transpose(2, 0, 1))


class Classifier:
    """The ONNX model behind one onnxruntime session.

    Parameters
    ----------
    threads
        Threads of the session. Spinning is disabled, because it is slow in a server.
    session
        An open session to use instead.
    """

    def __init__(self, threads: int, *, session: Any = None) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if EXPANDED:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = session or onnxruntime.InferenceSession(
            os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"]
        )
        self._input = self._session.get_inputs()[0].name

    def logits(self, batch: Array) -> Array:
        """Run (N, 3, 224, 224) → (N, 1000)."""
        result: Array = self._session.run(None, {self._input: batch})[0]
        return result

    def classify(self, body: bytes) -> dict[str, Any]:
        """Answer one encoded image with its five most probable classes."""
        return self.classify_image(Image.open(io.BytesIO(body)))

    def classify_image(self, image: Image.Image) -> dict[str, Any]:
        """Answer an image that is opened but not decoded."""
        return top_five(self.logits(prepare(image)[None])[0])


def softmax(logits: Array) -> Array:
    shifted = np.asarray(logits, dtype=np.float64)
    shifted = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def top_five(logits: Array) -> dict[str, Any]:
    probabilities = softmax(logits)
    best = np.argpartition(probabilities, -5)[-5:]
    best = best[np.argsort(-probabilities[best])]
    return {"top": [{"index": int(i), "probability": float(probabilities[i])} for i in best]}


def softmax_json(body: bytes) -> bytes:
    """Answer `{"logits": [[1000 numbers]]}` with `{"probabilities": [[1000 numbers]]}`."""
    logits = np.array(orjson.loads(body)["logits"], dtype=np.float64)
    return orjson.dumps({"probabilities": softmax(logits)}, option=orjson.OPT_SERIALIZE_NUMPY)
