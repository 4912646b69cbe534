"""Unique: the distinct entries. Refused: its output shape depends on the data."""

from whet.ops._refused import refused

refused("Unique", "its output size depends on the data, but an engine needs shapes in advance; compute it outside the model")
