"""Tests of the instruments: a benchmark is worth as much as its load generator."""
