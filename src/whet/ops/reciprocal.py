"""Reciprocal: y = 1 / x; infinite at 0."""

from whet.ops._unary import register_unary

register_unary("Reciprocal", lambda x: 1 / x)
