"""Layers with 2:4 weights in own kernels."""
