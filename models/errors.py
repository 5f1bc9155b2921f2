"""What can be wrong with a backbone while it is loaded, or with an input of it.

BackboneError (ValueError)
  - UnknownBackbone        the specification names no backbone we can build
  - UnusableWeights        a weights file is absent, unreadable, or does not fit the network
  - UnusableLabels         the labels do not fit the number of classes
  - UnusablePreprocessing  the declared way from an image to an input is incomplete or contradictory
  - UnusableDevice         the device or precision asked for is not there
  - UnusableInput          a batch that the backbone cannot read
  + InvalidImage           an encoded image that cannot be decoded
  |   - TooManyPixels      an image with more pixels than the limit; it was not decoded
"""


class BackboneError(ValueError):
    """Root of every error of this package; the message names the file, shape, key or value."""


class UnknownBackbone(BackboneError):
    """The specification names no backbone we can build."""


class UnusableWeights(BackboneError):
    """A weights file is absent, unreadable, or does not fit the network."""


class UnusableLabels(BackboneError):
    """The labels do not fit the number of classes."""


class UnusablePreprocessing(BackboneError):
    """The declared way from an image to an input is incomplete or contradictory."""


class UnusableDevice(BackboneError):
    """The device or precision asked for is not there."""


class UnusableInput(BackboneError):
    """A batch that the backbone cannot read."""


class InvalidImage(BackboneError):
    """An encoded image that cannot be decoded."""


class TooManyPixels(InvalidImage):
    """An image with more pixels than the limit; it was not decoded."""
