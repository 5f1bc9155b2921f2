"""Benchmarks: run by hand, each by one command, never part of the test suite."""
