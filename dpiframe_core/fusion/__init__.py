"""Joins operators of a graph into those that kernels offer, and finds such among a compiled module's generic ones. Plain data."""
