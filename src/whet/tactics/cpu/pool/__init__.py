"""Pooling in LLVM IR."""
