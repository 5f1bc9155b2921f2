"""The paper's experiment on real sets: `python -m benchmarks.paper DATA` writes `docs/results.md`."""
