"""Softplus: y = log(1 + e^x)."""

from whet.ops._unary import register_unary, softplus

register_unary("Softplus", softplus)
