"""Sigmoid: y = 1 / (1 + e^-x)."""

from whet.ops._unary import register_unary, sigmoid

register_unary("Sigmoid", sigmoid)
