"""One small server per framework, as its documentation recommends, run in its own environment."""
