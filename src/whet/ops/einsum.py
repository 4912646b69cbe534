"""Einsum: as numpy.einsum, without repeated subscripts in one input."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import TensorType
from whet.ops._base import NEEDS_STRING, Couple, op
from whet.ops._types import broadcast, may_span, unify


def parse_subscripts(layer):
    """Subscripts of each input and of the output; axes of an ellipsis are digits, counted from the back ("0" is the last)."""
    equation = "".join(layer.attrs["equation"].split())
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(layer.inputs):
        raise NetworkError(f"Einsum '{layer.name}': {equation!r} has {len(terms)} terms for {len(layer.inputs)} inputs")
    expanded, most = [], 0
    for term, t in zip(terms, layer.inputs, strict=True):
        n = t.type.rank - len(term.replace("...", ""))
        if n < 0 or (n and "..." not in term) or n > 9:
            raise NetworkError(f"Einsum '{layer.name}': {term!r} does not match {t.type}")
        most = max(most, n)
        expanded.append(term.replace("...", "".join(str(i) for i in reversed(range(n)))))
        if len(set(expanded[-1])) != len(expanded[-1]):
            raise UnsupportedError(f"Einsum '{layer.name}': {term!r} selects a diagonal; export without repeated subscripts")
    rest = "".join(str(i) for i in reversed(range(most)))
    if not arrow:
        every = "".join(expanded)
        out = "..." + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c.isalpha()))
    return expanded, out.replace("...", rest)


def infer(layer):
    terms, out = parse_subscripts(layer)
    sizes = {}
    for term, t in zip(terms, layer.inputs, strict=True):
        if t.dtype != layer.inputs[0].dtype:
            raise NetworkError(f"Einsum '{layer.name}' takes tensors of one type")
        for c, d in zip(term, t.shape, strict=True):
            old = sizes.get(c, d)
            sizes[c] = broadcast((old,), (d,))[0] if c.isdigit() else unify(old, d, f"Einsum '{layer.name}': subscript {c}")
    if any(c not in sizes for c in out):
        raise NetworkError(f"Einsum '{layer.name}': the output has a subscript that no input has")
    return TensorType(layer.inputs[0].dtype, tuple(sizes[c] for c in out))


def list_couples(layer):
    """Axes of one subscript are coupled, a broadcast one only with itself; a summed one may lose zeros."""
    terms, out = parse_subscripts(layer)
    seen = {c: (layer.output, i) for i, c in enumerate(out)}
    result = []
    for term, t in zip(terms, layer.inputs, strict=True):
        for i, c in enumerate(term):
            first, axis = seen.setdefault(c, (t, i))
            if first is t and axis == i:
                result.append(Couple(t, i, t, i, summed=c not in out and (c.isdigit() or sum(c in x for x in terms) == 1)))
            elif c.isalpha() or may_span(t.shape[i], first.shape[axis]):
                result.append(Couple(t, i, first, axis, summed=c not in out))
    return result


def read(node, g):
    """A subscript that one input repeats takes a diagonal: a Gather from the merged axes."""
    left, arrow, right = "".join(node.attrs["equation"].split()).partition("->")
    terms, inputs = left.split(","), list(node.inputs)
    if not arrow:  # the implied output: "..." and the subscripts that occur once
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1))
    for i, (term, x) in enumerate(zip(terms, inputs, strict=False)):
        while (c := next((c for c in term if c.isalpha() and term.count(c) > 1), None)) is not None:
            term, x = _select_diagonal(node, g, term, x, c)
        terms[i], inputs[i] = term, x
    equation = node.attrs["equation"] if terms == left.split(",") else f"{','.join(terms)}->{right}"
    return node.add(g, "Einsum", *inputs, equation=equation)


def _select_diagonal(node, g, term, x, c):
    """The term and the tensor with the first two axes of subscript `c` replaced by their diagonal."""
    rest = x.type.rank - len(term.replace("...", ""))
    if rest < 0 or (rest and "..." not in term):
        raise NetworkError(f"Einsum '{node.name}': {term!r} does not match {x.type}")
    subscripts = list(term.replace("...", "." * rest))
    a, b = [i for i, s in enumerate(subscripts) if s == c][:2]
    n = x.shape[a]
    if not isinstance(n, int) or x.shape[b] != n:
        raise node.unsupported(f"{term!r} selects the diagonal of axes of {x.shape[a]} and {x.shape[b]} entries, which must be equal and static")
    kept = [i for i in range(len(subscripts)) if i not in (a, b)]
    flat = g.add("Transpose", x, perm=(a, b, *kept), name=f"{node.name}_front", sources=(node.name,))
    flat = g.add("Reshape", flat, shape=(n * n, *(x.shape[i] for i in kept)), name=f"{node.name}_flat", sources=(node.name,))
    at = g.constant(np.arange(n, dtype=np.int64) * (n + 1), f"{node.name}.diagonal")
    diagonal = g.add("Gather", flat, at, axis=0, name=f"{node.name}_diagonal", sources=(node.name,))
    others = "".join(subscripts[i] for i in kept)
    return c + others.replace("." * rest, "...") if rest else c + others, diagonal


op(
    "Einsum",
    infer,
    lambda layer, *xs: np.einsum(layer.attrs["equation"].replace(" ", ""), *xs, optimize=True),
    attrs={"equation": NEEDS_STRING},
    couples=list_couples,
    onnx=read,
    zeros=(),
    samples=[
        (["f32[3,4]", "f32[4,5]"], {"equation": "ij,jk->ik"}),
        (["f32[2,3,4,5]", "f32[2,6,4,5]"], {"equation": "bnhd,bmhd -> bhnm"}),
        (["f32[2,3,4]"], {"equation": "...ij->...ji"}),
        (["f32[3,4]"], {"equation": "ij->i"}),
        (["f32[3,4]", "f32[4]"], {"equation": "ij,j"}),
    ],
)
