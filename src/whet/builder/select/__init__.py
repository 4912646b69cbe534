"""Selection over the whole graph: formats and tactics, fused or unfused layers, then whole engines by measured time."""
