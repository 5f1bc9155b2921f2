"""`make demo`: prediction, bounds, fit, monitoring and rollback with the running service."""
