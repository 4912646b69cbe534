"""Tactics of the null backend: formats, in-place pairs and a cost table, no kernels."""
