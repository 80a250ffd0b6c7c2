"""Sockets of the processes of one user on a host: where clients connect, and how those tell each other. Knows no HTTP."""
