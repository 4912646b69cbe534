"""Compress: the entries that a mask selects. Refused: its output shape depends on the data."""

from whet.ops._refused import refused

refused(
    "Compress",
    "its output size depends on the data, but an engine needs shapes in advance; export with a mask (Where, Mul) instead",
)
