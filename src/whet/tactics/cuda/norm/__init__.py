"""Normalizations and reductions."""
