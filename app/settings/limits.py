"""Limits that are the same for every service; read where they apply, as `limits.NAME`."""

MAX_BODY_BYTES = 32 * 2**20
"""Of a request with inputs, logits or labels."""
SMALL_BODY_BYTES = 64 * 2**10
"""Of any other request, except uploads."""
MAX_UPLOAD_BYTES = 2**30
"""Of a request to `/fit` or `/compare`, and of its arrays."""
MAX_PIXELS = 50_000_000
"""Of one image."""
MAX_QUEUE_SAMPLES = 1024
"""In the queue of a model and in progress."""
BATCH_SECONDS = 0.1
"""A batch is made no larger than what the backbone computes in this time."""
TIMEOUT_SECONDS = 30.0
"""Of a request that sets none."""
FIT_SECONDS = 3600.0
"""Of one fit."""
SHUTDOWN_SECONDS = 20.0
"""To finish open requests after SIGTERM."""
KEEP_DAYS = 30.0
"""For which calibrators that were active are not pruned."""
