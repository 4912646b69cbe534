"""Compiled loops for single ops in row-major order that no other family computes: for coverage, otherwise NumPy computes them."""
