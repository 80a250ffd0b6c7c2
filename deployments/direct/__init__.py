"""The direct port: a replica's own HTTP listener in C, around whose rounds scoring requests need neither a task nor Serve.

Owns sockets, HTTP/1.1 and the short way of a scoring request; the rules of what is asked and answered are the routes' own.
Knows no Ray.
"""
