"""Limits that are the same for every service; read where they apply, as `limits.NAME`."""

MAX_BODY_BYTES = 32 * 2**20
"""Of a request with inputs, logits or labels."""
MAX_MESSAGE_BYTES = 8 * 2**20
"""Of a gRPC message with these. gRPC copies it three times on the event loop, which takes up to 34 ms."""
MAX_JSON_BYTES = 4 * 2**20
"""Of a JSON body with these. One call parses it, for which no other thread runs."""
SMALL_BODY_BYTES = 64 * 2**10
"""Of any other request, except uploads."""
MAX_UPLOAD_BYTES = 2**30
"""Of a request to `/fit` or `/compare`, and of its arrays."""
MAX_JSON_UPLOAD_BYTES = 64 * 2**20
"""Of a validation set or a table in JSON."""
MAX_IMAGE_BYTES = 32 * 2**20
"""Of one image of a ZIP file."""
MAX_TEXT_BYTES = 2**20
"""Of one text of a validation set."""
MAX_LABELS = 50_000
"""Of a request to `/feedback`."""
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
CHECK_SECONDS = 120.0
"""Of the check of an upload."""
COMPARE_SECONDS = 300.0
"""Of a comparison."""
LONGEST_WAIT_SECONDS = 3600
"""Of `wait` of a request to `/fit`."""
MAX_WAITING_FITS = 8
"""Fits and arriving uploads beside the fit that runs."""
MAX_QUEUED_FITS = 64
"""Fits that wait for `boxcal worker` processes."""
SHUTDOWN_SECONDS = 20.0
"""To finish open requests after SIGTERM."""
KEEP_DAYS = 30.0
"""For which calibrators that were active are not pruned."""
