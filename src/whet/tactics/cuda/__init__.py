"""Tactics for NVIDIA GPUs: own kernels first, libraries as optional packs. Files with a leading underscore are shared parts."""
