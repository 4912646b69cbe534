"""Reciprocal: y = 1 / x; infinite at 0."""

from whet.ops._unary import unary

unary("Reciprocal", lambda x: 1 / x)
