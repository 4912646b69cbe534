"""Passes of phase FUSE that create no fused layers; those that do are in `whet.composites`."""
