"""Compares the service with other servers: same model, images, load and machine.

`environments` installs each server in its own environment, `running` starts it, `load` (a separate process)
generates load, `limits` measures the throughput without a server, `report` writes the tables.
"""
