"""Suites that measure an engine or a kernel, without a service."""
