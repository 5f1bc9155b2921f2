"""LitServe with one inference worker per core, as its documentation recommends for CPU-bound work.

Batching is disabled: on a CPU a batch takes as long as its samples one by one, and waiting adds latency.
"""

import os
from typing import Annotated, Any

import litserve
import work
from fastapi import Body, Response

RawBody = Annotated[bytes, Body(media_type="application/octet-stream")]


class Images(litserve.LitAPI):
    def setup(self, device: str) -> None:
        """Load the model in the worker."""
        self.classifier = work.Classifier(threads=1)

    def decode_request(self, request: RawBody) -> bytes:
        """Pass the bytes of the image to the worker."""
        return request

    def predict(self, image: bytes) -> dict[str, Any]:
        return self.classifier.classify(image)

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


class Logits(litserve.LitAPI):
    """1000 logits → softmax."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def decode_request(self, request: RawBody) -> bytes:
        """Pass the body to the worker, so that only the worker parses it."""
        return request

    def predict(self, body: bytes) -> bytes:
        return work.softmax_json(body)

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/json")


if __name__ == "__main__":
    api = Images() if work.task() == "images" else Logits()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=os.cpu_count() or 1)
    server.run(host="127.0.0.1", port=work.port(), log_level="warning", generate_client_file=False)
