"""The direct port: a replica's own HTTP listener in C, around whose rounds scoring requests need neither a task nor Serve.

Owns sockets, HTTP/1.1 and the short way of a scoring request; every rule of what is asked and answered is the routes' own. Knows
no Ray.
"""
