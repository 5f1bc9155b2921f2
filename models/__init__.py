"""Backbones: images or tensors in, logits out; nothing here knows of calibration or of HTTP."""

if __name__ != "boxcal.models":  # the folder itself, from the folder of the project
    raise ImportError("import boxcal.models: 'models' would be a second copy of it")


class BackboneError(ValueError):
    """A model that cannot be loaded; base class of the errors of this package."""


class UnusableInput(BackboneError):
    """A batch that the backbone cannot read."""


class InvalidImage(BackboneError):
    """An encoded image that cannot be decoded."""


class TooManyPixels(InvalidImage):
    """An image with more pixels than the limit; it was not decoded."""
