"""Tests of the predict path."""
