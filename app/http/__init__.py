"""What every request over HTTP passes: protocol, admission, problems, responses, documentation."""
