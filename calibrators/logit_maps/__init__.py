"""Logit maps: the part of a calibrator that moves logits before the box."""
