"""Ingress processes and an engine process of one host, over shared memory. Knows no Ray and no HTTP."""
