"""Softplus: y = log(1 + e^x)."""

from whet.ops._unary import softplus, unary

unary("Softplus", softplus)
