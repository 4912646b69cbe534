"""Layers with 2:4 weights on Hopper's sparse tensor cores."""
