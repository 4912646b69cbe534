"""Shared parts of the CPU kernels that are generated as LLVM IR."""
