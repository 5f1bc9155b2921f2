"""Online calibration: tests, duels and estimates that fold over labelled predictions one by one.

Every object here is a pure fold: rows of probabilities (N, K) and labels (N,) go in, in prediction order, and
`state_dict()` holds all that is kept. Nothing reads files or a clock, so a log replayed gives the same
numbers.
"""
