"""Depthwise convolutions."""
