"""All operators of a level in one launch (wave), and all levels of a small batch in one (chain). Knows no graph."""
