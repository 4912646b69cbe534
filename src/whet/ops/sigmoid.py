"""Sigmoid: y = 1 / (1 + e^-x)."""

from whet.ops._unary import sigmoid, unary

unary("Sigmoid", sigmoid)
