"""The service: HTTP in, calibrated and bounded probabilities out; it uses `models` and `calibrators`."""

if __name__ != "boxcal.app":  # the folder itself, from the folder of the project
    raise ImportError("import boxcal.app: 'app' would be a second copy of it")
