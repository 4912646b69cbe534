"""Verification: each layer and the whole network against references, with the errors that are allowed."""
