"""MatMul: matrix products with broadcasting over leading axes, as NumPy's matmul."""


from whet.errors import NetworkError
from whet.network import TensorType
from whet.ops._base import Couple, op
from whet.ops._products import accumulate_matmul, round_accumulator
from whet.ops._types import broadcast, may_span, unify


def infer(layer):
    a, b = layer.inputs
    if a.dtype != b.dtype or not a.type.rank or not b.type.rank:
        raise NetworkError(f"MatMul '{layer.name}' takes two tensors of one type and rank 1 or more, not {a.type} and {b.type}")
    inner = b.shape[-2] if b.type.rank > 1 else b.shape[0]
    unify(a.shape[-1], inner, f"MatMul '{layer.name}': {a.type} and {b.type} have mismatched inner dimensions")
    rows = a.shape[-2:-1]
    columns = b.shape[-1:] if b.type.rank > 1 else ()
    return TensorType(a.dtype, (*broadcast(a.shape[:-2], b.shape[:-2]), *rows, *columns))


def list_couples(layer):
    """Contracted axes are coupled to each other; rows, columns and batches to the output."""
    a, b, y = layer.inputs[0], layer.inputs[1], layer.output
    ra, rb, ry = a.type.rank, b.type.rank, y.type.rank
    result = [Couple(a, ra - 1, b, max(rb - 2, 0), summed=True)]
    if ra > 1:
        result.append(Couple(a, ra - 2, y, ry - 1 - (rb > 1)))
    if rb > 1:
        result.append(Couple(b, rb - 1, y, ry - 1))
    batch = ry - (ra > 1) - (rb > 1)
    for t, r in ((a, ra - 2), (b, rb - 2)):
        result += [Couple(t, i, y, i + batch - r) for i in range(r) if may_span(t.shape[i], y.shape[i + batch - r])]
    return result


op(
    "MatMul",
    infer,
    lambda layer, a, b: round_accumulator(accumulate_matmul(a, b), a.dtype),
    couples=list_couples,
    zeros=(),
    samples=[
        (["f32[2,5,16]", "const f32[16,12]"], {}),
        (["f32[2,3,5,8]", "f32[2,3,8,7]"], {}),
        (["f32[2,1,5,8]", "f32[3,8,7]"], {}),
        (["f32[3,17]", "const f32[17,19]"], {}),
        (["f32[7]", "f32[7,3]"], {}),
        (["f32[2,4,7]", "f32[7]"], {}),
        (["f32[7]", "f32[7]"], {}),
        (["nonfinite f32[4,16]", "f32[16,8]"], {}),
        (["f16[2,5]", "f16[5,3]"], {}),
        (["f32[3,5,16]", "const f32[3,16,24]"], {}),
    ],
)
