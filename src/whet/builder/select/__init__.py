"""Selection over the whole graph: formats and tactics together, fused or not, then whole engines against each other."""
