"""Binds the operators of a graph to torch on a CPU or to kernels on a GPU, and runs a plan of them. Knows no batches."""
