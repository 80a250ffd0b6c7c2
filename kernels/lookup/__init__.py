"""The lookup of all tables in one launch: its kernel, its plan, how ids lie in memory and where tables lie. Knows no layer."""
