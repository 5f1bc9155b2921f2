"""Measures the service beside the servers people would otherwise choose: same model, images, load, machine.

The way through: `environments` installs each contestant apart, `running` starts one of them, `load` (its own
process) puts it under load, `limits` measures what the machine does without any server, `report` tells.
"""
