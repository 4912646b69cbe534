"""Layers in the body of a fused layer as if they stood alone, for fused layers around more than one op."""

from whet.tactics._fused import with_outer_inputs as with_outer_inputs
