"""The worker process of fits: reads uploads, checks them, fits, compares and draws."""
