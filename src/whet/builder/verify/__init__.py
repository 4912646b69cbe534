"""Verification: each layer and the whole network against references, within error bounds."""
