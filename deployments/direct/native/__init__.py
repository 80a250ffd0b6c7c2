"""The listener of the direct port, in C: `listener.py` builds and loads it."""
