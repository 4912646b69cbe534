"""Phase CLEAN: fold constants, remove what has no effect, merge duplicates."""
