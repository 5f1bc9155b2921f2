"""The server's side of fits: uploads, jobs, the decision about activation. It parses no upload."""
