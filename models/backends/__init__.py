"""The backbones: modules of torch, ONNX files, and none; with what they read beside their weights."""
