"""`POST /v1/score`: bodies in, answers out, also ahead of Serve. Knows no FastAPI and no Ray."""
