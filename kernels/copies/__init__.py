"""What the host copies for lookups, in C: blocks joined into a batch where a device reads it, rows of files into slots."""
