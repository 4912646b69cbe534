"""Phase FINAL: fusions of several layers and pointwise chains."""
