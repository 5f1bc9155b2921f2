"""From the specification of a model to its backbone, or to a description of it."""

from boxcal.models.loading.specifications import load_backbone

__all__ = ["load_backbone"]
