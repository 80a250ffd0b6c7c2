"""Files of rows (CSV, Parquet, JSON lines, click logs) read in bounded memory. Knows no models."""
