"""mosec with one worker process per core; JSON with orjson."""

import os
from typing import Any

import orjson
import work
from mosec import Server, Worker

CORES = os.cpu_count() or 1


class Images(Worker):
    def __init__(self) -> None:
        self.classifier = work.Classifier(threads=1)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> dict[str, Any]:
        return self.classifier.classify(data)

    def serialize(self, data: dict[str, Any]) -> bytes:
        return orjson.dumps(data)


class Logits(Worker):
    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> bytes:
        return work.softmax_json(data)

    def serialize(self, data: bytes) -> bytes:
        return data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Images if work.task() == "images" else Logits, num=CORES)
    server.run()
