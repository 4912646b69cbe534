"""Data movement: views, and generated copies with arithmetic."""
