"""Tests of access: keys, browsers, TLS and the audit log."""
