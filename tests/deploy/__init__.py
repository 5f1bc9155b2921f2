"""Tests of what an operator runs: the image, the compose project, the dashboard and the alerts."""
