"""Sampled logging of scored rows: who picks them, and the files that they become. Knows no HTTP and no Ray."""
