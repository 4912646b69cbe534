"""Convolutions in LLVM IR."""
