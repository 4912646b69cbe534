"""Network -> engine."""
