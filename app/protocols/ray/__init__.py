"""Replicas on a cluster that Ray manages; the only part of the service that knows Ray."""
