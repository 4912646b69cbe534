"""Elementwise layers and chains of them."""
