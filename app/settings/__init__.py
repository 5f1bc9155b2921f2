"""Settings of the service: options, environment, config file, the list of models."""
