"""What a route and a batcher have between them: the served model, its request form, its counts. Knows no HTTP."""
