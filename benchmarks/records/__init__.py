"""What a run of a suite leaves: its record, the file that holds it, and the peers of earlier runs that stay in it."""
