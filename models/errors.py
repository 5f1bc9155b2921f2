"""Errors of loading a backbone, and of inputs that it cannot read.

BackboneError (ValueError)
  - UnknownBackbone        the specification names no known backbone
  - UnusableWeights        the weights file does not exist, cannot be read or does not match the network
  - UnusableLabels         the number of labels is not the number of classes
  - UnusablePreprocessing  the declared preprocessing is incomplete or contradictory
  - UnusableDevice         the requested device or precision is not available
  - UnusableInput          a batch that the backbone cannot read
  + InvalidImage           an encoded image that cannot be decoded
  |   - TooManyPixels      an image with more pixels than the limit; it was not decoded
"""


class BackboneError(ValueError):
    """Base class of the errors of this package; the message names the file, shape, key or value."""


class UnknownBackbone(BackboneError):
    """The specification names no known backbone."""


class UnusableWeights(BackboneError):
    """The weights file does not exist, cannot be read or does not match the network."""


class UnusableLabels(BackboneError):
    """The number of labels is not the number of classes."""


class UnusablePreprocessing(BackboneError):
    """The declared preprocessing is incomplete or contradictory."""


class UnusableDevice(BackboneError):
    """The requested device or precision is not available."""


class UnusableInput(BackboneError):
    """A batch that the backbone cannot read."""


class InvalidImage(BackboneError):
    """An encoded image that cannot be decoded."""


class TooManyPixels(InvalidImage):
    """An image with more pixels than the limit; it was not decoded."""
