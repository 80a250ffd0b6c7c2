"""The raw values of requests, column by column, in C: read from Python's objects or from a client's bytes. Knows no schema."""
