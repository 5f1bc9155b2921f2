"""Predictions over other protocols than HTTP with JSON."""
