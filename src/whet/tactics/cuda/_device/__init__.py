"""Shared parts of the CUDA tactics: kernel sources, launches, device headers."""
