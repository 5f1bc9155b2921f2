"""The paper's experiment on real sets: `python -m benchmarks.paper DATA` prints the tables of the results."""
