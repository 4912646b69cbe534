"""Fused attention."""
