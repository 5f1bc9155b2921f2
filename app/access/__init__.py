"""Who may use the service: API keys with scopes, checks of browsers, TLS, and the audit log's routes."""
