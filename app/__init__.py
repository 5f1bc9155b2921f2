"""The service: HTTP in, calibrated and bounded probabilities out; it uses `models` and `calibrators`."""
