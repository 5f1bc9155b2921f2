"""Uploads: a request body becomes a file on the data disk; nothing in it is parsed."""
