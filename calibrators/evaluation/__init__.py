"""Judging probabilities: metrics, intervals, comparisons, reliability diagrams and the report."""
