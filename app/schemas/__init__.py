"""Documents of every route, which the server, the client and the command line share; pydantic alone."""
