"""Phase FILL: channels padded to multiples that kernels take."""
