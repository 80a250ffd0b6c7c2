"""Other servers with the same model, encoder and engine, so that only the servers differ."""
