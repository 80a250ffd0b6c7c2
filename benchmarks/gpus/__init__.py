"""Lookups over tables that several GPUs of a host hold together: a process a GPU, as serving has them. Starts no process: that
is `torch.distributed.run`.
"""
