"""The Open Inference Protocol, version 2: the same predictions for clients of Triton and KServe."""
