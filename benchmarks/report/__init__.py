"""Stored results as tables and pictures, held against the aims."""
