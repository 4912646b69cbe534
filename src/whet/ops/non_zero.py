"""NonZero: indices of nonzero elements. Refused: its output shape depends on the data."""

from whet.ops._refused import refused

refused(
    "NonZero",
    "its output size depends on the data, but an engine needs shapes in advance; export with a mask (Where, Mul) instead",
)
