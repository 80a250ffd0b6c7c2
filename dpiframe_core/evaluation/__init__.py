"""How well scores rank and fit clicks, and how near two models' scores are. NumPy only."""
