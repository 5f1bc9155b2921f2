"""Backbones: images or tensors in, logits out; nothing here knows of calibration or of HTTP."""
