"""The same work on a CPU: C code, the OpenMP pool that it shares with torch, and NumPy or torch where there is no compiler."""
