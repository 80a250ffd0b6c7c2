"""Suites that measure a service from a client's side, and its peers."""
