"""Erf: the error function."""

from whet.ops._erf import erf
from whet.ops._unary import register_unary

register_unary("Erf", erf)
