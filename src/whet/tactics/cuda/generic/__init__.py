"""Ops for coverage: generated kernels with a thread per value of the result, shapes compiled in."""
