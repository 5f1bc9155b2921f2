"""Benchmarks. Each is run manually with one command and is not part of the test suite."""
