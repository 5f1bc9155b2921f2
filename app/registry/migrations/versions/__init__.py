"""The steps, ordered by their numbers."""
