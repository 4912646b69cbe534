"""Unique: the distinct entries. Refused: the shape of its output is in the data."""

from whet.ops._refused import refused

refused("Unique", "how many entries are distinct depends on the data, and an engine needs shapes before; do it in your program")
