"""Recurrent layers in own kernels."""
