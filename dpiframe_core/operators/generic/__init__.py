"""Operators that a graph takes from ATen as they are: strided windows of rows, and what is computed of them."""
