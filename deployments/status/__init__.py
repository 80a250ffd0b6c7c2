"""The status page at `/`: its files, what this replica answered lately, and stored profiles. Knows no Ray and no scoring."""
