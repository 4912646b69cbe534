"""Phase FUSE: layers and their epilogues become fused layers."""
