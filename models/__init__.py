"""Backbones: images or tensors in, logits out; nothing here knows of calibration or of HTTP."""

if __name__ != "boxcal.models":  # the folder itself, from the folder of the project
    raise ImportError("import boxcal.models: 'models' would be a second copy of it")
