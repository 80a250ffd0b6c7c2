"""What is computed from what, and in which order: op graph, schedule, waves. Plain data; no torch, no CuPy."""
