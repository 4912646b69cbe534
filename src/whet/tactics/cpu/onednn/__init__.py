"""oneDNN's primitives as tactics."""
