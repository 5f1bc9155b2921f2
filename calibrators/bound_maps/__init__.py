"""Bound maps: the part of a calibrator that says which box the probabilities must lie in."""
