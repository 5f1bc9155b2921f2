"""mosec with one worker process per core; JSON with orjson."""

import os
from typing import Any

import orjson
import work
from mosec import Server, Worker

CORES = os.cpu_count() or 1


class Images(Worker):
    """JPEG → top 5."""

    def __init__(self) -> None:
        self.classifier = work.Classifier(threads=1)

    def deserialize(self, data: bytes) -> bytes:
        """Pass the body on unchanged."""
        return data

    def forward(self, data: bytes) -> dict[str, Any]:
        """Decode and run."""
        return self.classifier.classify(data)

    def serialize(self, data: dict[str, Any]) -> bytes:
        """Write the JSON."""
        return orjson.dumps(data)


class Logits(Worker):
    """1000 logits → softmax."""

    def deserialize(self, data: bytes) -> bytes:
        """Pass the body on unchanged."""
        return data

    def forward(self, data: bytes) -> bytes:
        """Softmax, JSON to JSON."""
        return work.softmax_json(data)

    def serialize(self, data: bytes) -> bytes:
        """Send the JSON as it is."""
        return data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Images if work.task() == "images" else Logits, num=CORES)
    server.run()
