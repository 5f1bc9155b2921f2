"""The refit path: upload, checked validation set, fit job in its own process, gate, activation."""
