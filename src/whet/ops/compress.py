"""Compress: the entries that a mask selects. Refused: the shape of its output is in the data."""

from whet.ops._refused import refused

refused(
    "Compress",
    "how many entries it keeps depends on the data, and an engine needs shapes before; export with a mask (Where, Mul) in its place",
)
