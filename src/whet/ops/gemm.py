"""Gemm: alpha * A B + beta * C for matrices; A and B may be transposed, C broadcasts."""


from whet.errors import NetworkError
from whet.network import TensorType
from whet.ops._base import Couple, op
from whet.ops._products import accumulate_matmul, round_accumulator
from whet.ops._types import may_broadcast_to, may_span, unify


def infer(layer):
    a, b, c = layer.inputs[0], layer.inputs[1], layer.input(2)
    if a.type.rank != 2 or b.type.rank != 2 or a.dtype != b.dtype:
        raise NetworkError(f"Gemm '{layer.name}' takes two matrices of one type, not {a.type} and {b.type}")
    m, ka = a.shape[::-1] if layer.attrs["transA"] else a.shape
    kb, n = b.shape[::-1] if layer.attrs["transB"] else b.shape
    unify(ka, kb, f"Gemm '{layer.name}': A {a.type} and B {b.type} have mismatched inner dimensions")
    if c is not None and (c.dtype != a.dtype or not may_broadcast_to((m, n), c.shape)):
        raise NetworkError(f"Gemm '{layer.name}': C {c.type} does not broadcast to [{m},{n}] of {a.dtype}")
    return TensorType(a.dtype, (m, n))


def compute_reference(layer, a, b, c=None):
    at = layer.attrs
    y = round_accumulator(accumulate_matmul(a.T if at["transA"] else a, b.T if at["transB"] else b), a.dtype)
    if at["alpha"] != 1:
        y = (y * a.dtype.type(at["alpha"])).astype(a.dtype)
    if c is None or at["beta"] == 0:
        return y
    return (y + (c if at["beta"] == 1 else c * a.dtype.type(at["beta"]))).astype(a.dtype)


def list_couples(layer):
    a, b, c, y = layer.inputs[0], layer.inputs[1], layer.input(2), layer.output
    ta, tb = bool(layer.attrs["transA"]), bool(layer.attrs["transB"])
    result = [Couple(a, int(not ta), b, int(tb), summed=True), Couple(a, int(ta), y, 0), Couple(b, int(not tb), y, 1)]
    if c is not None:
        lead = 2 - c.type.rank
        result += [Couple(c, i, y, i + lead) for i, d in enumerate(c.shape) if may_span(d, y.shape[i + lead])]
    return result


op(
    "Gemm",
    infer,
    compute_reference,
    attrs={"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0},
    couples=list_couples,
    zeros=(2,),
    samples=[
        (["f32[4,16]", "const f32[10,16]", "const f32[10]"], {"transB": 1}),
        (["f32[3,17]", "const f32[17,19]", None], {}),
        (["f32[5,4]", "const f32[5,7]", "const f32[4,7]"], {"transA": 1, "alpha": 0.5, "beta": 2.0}),
        (["f32[5,4]", "f32[7,5]", "f32[4,1]"], {"transA": 1, "transB": 1}),
        (["nonfinite f32[4,16]", "const f32[8,16]", "const f32[1,8]"], {"transB": 1}),
        (["f16[3,5]", "f16[5,4]", "f16[]"], {}),
    ],
)
