"""NumPy fallbacks: every op, every reformat."""
