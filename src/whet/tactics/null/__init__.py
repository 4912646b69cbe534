"""Tactics of the null machine: formats, in-place pairs and a cost table, no kernels."""
