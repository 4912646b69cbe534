"""Measurement: interleaved timing of candidates and engines, statistics, and the timing cache."""
