"""Elementwise layers and reductions in own kernels, generated for each layer."""
