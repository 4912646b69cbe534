"""Batches: whole or per sample, optimization profiles."""
