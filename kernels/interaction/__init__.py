"""Feature interactions: factorization machine, cross networks, pairwise dots, CIN."""
