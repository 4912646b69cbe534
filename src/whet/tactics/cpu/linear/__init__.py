"""Products of rows with constant matrices."""
