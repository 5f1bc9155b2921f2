"""Metrics, logs, traces and summaries of the service."""
