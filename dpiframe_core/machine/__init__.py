"""This machine: its devices by name, what timings depend on, how many threads torch takes. Knows no model."""
