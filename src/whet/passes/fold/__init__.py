"""Phase FOLD: batch norms, pads and scales into weights and attributes."""
