"""The active calibrator, and how one becomes active."""
