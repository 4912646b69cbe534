"""Optional packs: cuBLASLt, cuDNN; and the reference on the host."""
