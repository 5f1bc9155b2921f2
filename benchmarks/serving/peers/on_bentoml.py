"""BentoML with one worker process per core; the image is the root input, so the body is the JPEG file.

Adaptive batching is not used: it supports lists only, and the wrapper service of its documentation for single
inputs returns status 500 under load.
"""

import os
from typing import Annotated, Any

import bentoml
import numpy as np
import work
from bentoml.validators import ContentType
from PIL.Image import Image


@bentoml.service(workers=os.cpu_count() or 1, traffic={"timeout": 60})
class Bench:
    def __init__(self) -> None:
        if work.task() == "images":
            self.classifier = work.Classifier(threads=1)

    @bentoml.api(route="/images")
    def images(self, image: Annotated[Image, ContentType("image/jpeg")], /) -> dict[str, Any]:
        return self.classifier.classify_image(image)

    @bentoml.api(route="/logits")
    def logits(self, logits: np.ndarray) -> np.ndarray:  # BentoML reads the annotation
        return work.softmax(logits)
