"""`dpiframe score`: a file of rows in, a file with scores out, here or on a Ray cluster."""
