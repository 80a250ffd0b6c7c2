"""Which rows of tables are read often now, and which of them take the places of others in a GPU's memory while it serves."""
