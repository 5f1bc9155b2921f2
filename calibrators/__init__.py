"""Calibration mathematics: tensors in, tensors out; no HTTP, no files."""
