"""Joins operators into those that kernels offer, and finds such among a compiled module's generic ones. Graph in, graph out."""
