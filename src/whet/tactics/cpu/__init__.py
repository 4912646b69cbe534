"""Tactics on the CPU: oneDNN, and NumPy for all else."""
