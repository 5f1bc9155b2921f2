"""The active calibrator, the gate that decides on it, and how one becomes active."""
