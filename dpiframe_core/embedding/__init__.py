"""Where the rows of the tables lie, and in which form. Knows no requests."""
