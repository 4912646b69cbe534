"""FusedConv, FusedGemm and FusedMatMul (ONNX Runtime): an op with the scale, transpositions, sum and activation that followed it."""

from whet.ops._ort import add_scalar, apply_activation, make_adder, register_fused
from whet.ops._qlinear import compute_in_floats

_ACTIVATION = ("activation", "activation_params", "activation_alpha", "activation_beta", "activation_gamma", "leaky_relu_alpha")


def _select_other_attributes(node):
    return {k: v for k, v in node.attrs.items() if k not in _ACTIVATION}


def read_conv(node, g):
    """Inputs: x, weight, bias, a tensor of the output's shape that is added before the activation."""
    given = [t for t in node.inputs[:3] if t is not None]
    y = compute_in_floats(node, g, "Conv", given, _select_other_attributes(node))
    if node.input(3) is not None:
        y = make_adder(node, g)("Add", y, node.inputs[3])
    return apply_activation(node, g, y, tuple(node.attrs.get("activation_params", ())))


def read_gemm(node, g):
    y = compute_in_floats(node, g, "Gemm", [t for t in node.inputs if t is not None], _select_other_attributes(node))
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    parameters = tuple(node.attrs[k] for k in names if k in node.attrs)
    return apply_activation(node, g, y, parameters or ((node.attrs["leaky_relu_alpha"],) if "leaky_relu_alpha" in node.attrs else ()))


def read_mat_mul(node, g):
    """alpha * A B; transA/transB swap the last two axes, transBatchA/transBatchB take the first axis behind the batch axes before that."""
    add = make_adder(node, g)
    a, b = (_arrange_input(node, add, i, side) for i, side in enumerate("AB"))
    alpha = node.attrs.get("alpha", 1.0)
    if alpha == 1.0:
        return node.add(g, "MatMul", a, b)
    y = add("MatMul", a, b)
    return node.add(g, "Mul", y, add_scalar(node, g, alpha, y, "alpha"))


def _arrange_input(node, add, i, side):
    x = node.inputs[i]
    axes = list(range(x.type.rank))
    if node.attrs.get(f"transBatch{side}", 0):
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if node.attrs.get(f"trans{side}", 0):
        axes[-2:] = axes[:-3:-1]
    return x if axes == list(range(x.type.rank)) else add("Transpose", x, perm=tuple(axes))


register_fused("FusedConv", read_conv, "Conv, Add and the activation")
register_fused("FusedGemm", read_gemm, "Gemm and the activation")
register_fused("FusedMatMul", read_mat_mul, "Transpose, MatMul and Mul")
register_fused("TransposeMatMul", read_mat_mul, "Transpose, MatMul and Mul")
