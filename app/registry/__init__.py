"""The append-only record of calibrators, activations and fits."""
