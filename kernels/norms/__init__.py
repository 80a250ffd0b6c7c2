"""Softmax and layer norm of rows on a CPU."""
