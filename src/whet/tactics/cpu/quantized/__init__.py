"""8-bit kernels in LLVM IR."""
