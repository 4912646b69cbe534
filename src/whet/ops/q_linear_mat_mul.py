"""QLinearMatMul: an integer product with scales. Read as MatMul between DequantizeLinear and QuantizeLinear."""

from whet.ops._refused import read_as_others


def read(node, g):
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.inputs
    name, sources = node.name, (node.name,)
    if a_scale.type.rank > 1 or b_scale.type.rank > 1:
        raise node.unsupported("its scales differ between matrices of a batch; export with one scale, or one per row and column")
    rows, columns = a.type.rank - 2, b.type.rank - 1  # one scale per row of a, per column of b
    af = g.add("DequantizeLinear", a, a_scale, a_zero, axis=rows, name=f"{name}_a", sources=sources)
    bf = g.add("DequantizeLinear", b, b_scale, b_zero, axis=columns, name=f"{name}_b", sources=sources)
    y = g.add("MatMul", af, bf, name=f"{name}_product", sources=sources)
    return node.add(g, "QuantizeLinear", y, y_scale, y_zero)


read_as_others("QLinearMatMul", read, "DequantizeLinear, MatMul and QuantizeLinear")
