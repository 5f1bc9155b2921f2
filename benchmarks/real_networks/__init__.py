"""Methods that read features or inputs, on real networks: `python -m benchmarks.real_networks`."""
