"""Normalizations in own kernels."""
