"""Pooling and squeeze-and-excitation."""
