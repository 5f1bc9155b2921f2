"""One small server per peer, written as the peer's own documentation advises, run in its environment."""
