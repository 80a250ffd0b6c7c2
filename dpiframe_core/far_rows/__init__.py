"""Rows of tables that no memory holds: which they are, where they come from, and how they are read ahead of the batches."""
