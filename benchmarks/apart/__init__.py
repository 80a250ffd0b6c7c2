"""Suites that give each model a process of its own: what takes the CPU runs side by side, what launches on the GPU in turns."""
