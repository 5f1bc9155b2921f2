"""The predict path: bytes, decoding, batcher, backbone, calibrator, response."""
