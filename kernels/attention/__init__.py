"""Attention: of a target over a sequence, of a row's fields over one another."""
