"""What `docs/monitoring.md` claims, measured on streams whose law is known; see `__main__`."""
