"""Hostile requests, the judgement of their answers, and kills of the service at random moments."""
