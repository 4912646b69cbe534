"""8-bit layers."""
