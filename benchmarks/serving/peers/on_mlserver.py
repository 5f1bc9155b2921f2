"""MLServer's runtime for both tasks: Open Inference Protocol, images as base64, one worker per core."""

import base64

import numpy as np
import work
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Bench(MLModel):
    async def load(self) -> bool:
        if work.task() == "images":
            self.classifier = work.Classifier(threads=1)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        (tensor,) = payload.inputs
        if work.task() == "images":
            top = self.classifier.classify(base64.b64decode(tensor.data[0]))["top"]
            outputs = [
                NumpyCodec.encode_output("index", np.array([each["index"] for each in top])),
                NumpyCodec.encode_output("probability", np.array([each["probability"] for each in top])),
            ]
        else:
            outputs = [
                NumpyCodec.encode_output("probabilities", work.softmax(NumpyCodec.decode_input(tensor)))
            ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
