"""The web page: static files, served under a strict Content-Security-Policy."""
