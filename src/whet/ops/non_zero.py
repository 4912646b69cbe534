"""NonZero: where x is not 0. Refused: the shape of its output is in the data."""

from whet.ops._refused import refused

refused(
    "NonZero",
    "how many places it finds depends on the data, and an engine needs shapes before; export with a mask (Where, Mul) in its place",
)
