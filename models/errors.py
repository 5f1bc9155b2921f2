"""Errors of loading a backbone, and of inputs that it cannot read.

BackboneError (ValueError)   a model that cannot be loaded; the message names the file, shape, key or value
  - UnusableInput            a batch that the backbone cannot read
  + InvalidImage             an encoded image that cannot be decoded
      - TooManyPixels        an image with more pixels than the limit; it was not decoded
"""


class BackboneError(ValueError):
    """A model that cannot be loaded; base class of the errors of this package."""


class UnusableInput(BackboneError):
    """A batch that the backbone cannot read."""


class InvalidImage(BackboneError):
    """An encoded image that cannot be decoded."""


class TooManyPixels(InvalidImage):
    """An image with more pixels than the limit; it was not decoded."""
