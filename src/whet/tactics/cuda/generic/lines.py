"""Ops along one axis: a thread walks over a line of it, or over the other values of a value's line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from whet.network import Layer, static_shape
from whet.ops._reduce import list_reduced_axes
from whet.ops._running import get_running_axis
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, compute_row_major_strides, emit_coordinates, emit_flat_index

Passes = Sequence[tuple[str, int]]
_ABOVE = "(a != a ? b == b : a {} b)"  # a ranks before b; NaN ranks first, as in NumPy's argmax


def _describe_lines(layer: Layer, axis: int) -> tuple[int, int, int, str]:
    """(lines, entries of a line, elements between entries, statements that set `first` to the index of line i's first element)."""
    shape = static_shape(layer.needs(0).shape)
    axis %= len(shape)
    inner, entries = prod(shape[axis + 1 :]), shape[axis]
    return prod(shape) // entries if entries else 0, entries, inner, f"const long long first = i / {inner} * {inner * entries} + i % {inner};"


def _emit_running(layer: Layer) -> Passes:
    lines, n, step, start = _describe_lines(layer, get_running_axis(layer))
    total, op = ("(Number)0", "+") if layer.op == "CumSum" else ("(Number)1", "*")
    at = f"first + (long long)({f'{n - 1} - k' if layer.attrs['reverse'] else 'k'}) * {step}"
    update = f"total = total {op} in0(at);"
    store = "put0(at, total);"
    steps = f"{store} {update}" if layer.attrs["exclusive"] else f"{update} {store}"
    return [(f"{start} Number total = {total}; for (int k = 0; k < {n}; ++k) {{ const long long at = {at}; {steps} }}", lines)]


def _emit_extreme(layer: Layer, largest: bool, last: bool = False) -> tuple[int, str, int, int]:
    """(lines, statements that set `best` to the entry of the extreme value of line i, entries, elements between entries)."""
    lines, n, step, start = _describe_lines(layer, layer.attrs["axis"])
    better = _ABOVE.format((">=" if last else ">") if largest else ("<=" if last else "<"))
    if last:
        better = f"({better} || a != a)"
    text = (
        f"{start} int best = 0; Number b = in0(first); for (int k = 1; k < {n}; ++k) {{ const Number a = in0(first + (long long)k * {step}); "
        f"if {better} {{ best = k; b = a; }} }}"
    )
    return lines, text, n, step


def _emit_arg_extreme(layer: Layer) -> Passes:
    lines, text, _, _ = _emit_extreme(layer, layer.op == "ArgMax", bool(layer.attrs["select_last_index"]))
    return [(f"{text} index0(i, best);", lines)]


def _emit_hardmax(layer: Layer) -> Passes:
    lines, text, n, step = _emit_extreme(layer, True)
    return [(f"{text} for (int k = 0; k < {n}; ++k) put0(first + (long long)k * {step}, k == best);", lines)]


def _emit_lp_normalization(layer: Layer) -> Passes:
    lines, n, step, start = _describe_lines(layer, layer.attrs["axis"])
    add, norm = ("fabs(a)", "sum") if layer.attrs["p"] == 1 else ("a * a", "sqrt(sum)")
    each = f"for (int k = 0; k < {n}; ++k)"
    text = f"{start} Number sum = 0; {each} {{ const Number a = in0(first + (long long)k * {step}); sum += {add}; }} const Number norm = {norm};"
    return [(f"{text} {each} {{ const long long at = first + (long long)k * {step}; put0(at, norm != 0 ? in0(at) / norm : (Number)0); }}", lines)]


def _emit_top_k(layer: Layer) -> Passes:
    """A thread per entry of x: its rank is the number of entries before it in the order of results."""
    _, n, step, _ = _describe_lines(layer, layer.attrs["axis"])
    shape, axis = static_shape(layer.needs(0).shape), layer.attrs["axis"] % layer.needs(0).type.rank
    k = static_shape(layer.outputs[0].shape)[axis]
    # NaN is the largest of all: first of the largest, last of the smallest
    before = "(b != b ? 1 : a != a ? 0 : b > a)" if layer.attrs["largest"] else "(a != a ? b == b : b < a)"
    same = "(a == b || (a != a && b != b))"
    text = f"""
        const long long row = i / {step * n} * {step * n} + i % {step}; const int own = (int)(i / {step} % {n}); const Number a = in0(i);
        int rank = 0;
        for (int e = 0; e < {n}; ++e) {{
            const Number b = in0(row + (long long)e * {step});
            rank += {same} ? e < own : {before};
        }}
        if (rank < {k}) {{
            const long long to = i / {step * n} * {step * k} + (long long)rank * {step} + i % {step};
            put0(to, a); index1(to, own);
        }}
    """
    return [(text, prod(shape))]


def _emit_lrn(layer: Layer) -> Passes:
    shape, a = static_shape(layer.needs(0).shape), layer.attrs
    c, inner = shape[1], prod(shape[2:])
    low, high = (a["size"] - 1) // 2, a["size"] // 2
    text = f"""
        const int c = (int)(i / {inner} % {c}); Number sum = 0; const Number x = in0(i);
        for (int k = c > {low} ? c - {low} : 0; k <= c + {high} && k < {c}; ++k) {{
            const Number v = in0(i + (long long)(k - c) * {inner}); sum += v * v;
        }}
        put0(i, x / pow((Number){a["bias"]!r} + (Number){a["alpha"] / a["size"]!r} * sum, (Number){a["beta"]!r}));
    """
    return [(text, prod(shape))]


def _emit_mean_variance(layer: Layer) -> Passes:
    """A thread per line of the reduced axes."""
    shape = static_shape(layer.needs(0).shape)
    over = {x % len(shape) for x in layer.attrs["axes"]}
    kept = [d for d in range(len(shape)) if d not in over]
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]

    def index(name: str, axes: Sequence[int]) -> str:
        terms, rest = [], 1
        for d in reversed(axes):
            terms.append(f"({name} / {rest} % {shape[d]}) * {strides[d]}ll")
            rest *= shape[d]
        return " + ".join(terms) or "0"

    n = prod(shape[d] for d in over)
    each = f"for (long long k = 0; k < {n}; ++k)"
    at = f"first + {index('k', sorted(over))}"
    text = f"""
        const long long first = {index("i", kept)}; Number mean = 0, square = 0;
        {each} mean += in0({at});
        mean /= {n};
        {each} {{ const Number d = in0({at}) - mean; square += d * d; }}
        const Number scale = 1 / (sqrt(square / {n}) + (Number)1e-9);
        {each} put0({at}, (in0({at}) - mean) * scale);
    """
    return [(text, prod(shape) // n if n else 0)]


def _normalize(layer: Layer) -> Passes:
    """LayerNormalization and RMSNormalization of few values, or with a scale computed at run time: a thread per line of the normalized axes."""
    shape, rms = static_shape(layer.needs(0).shape), layer.op == "RMSNormalization"
    normalized = shape[layer.attrs["axis"] % len(shape) :]
    n, each = prod(normalized), f"for (long long k = 0; k < {prod(normalized)}; ++k)"

    def emit_parameter(i: int) -> str:
        own = static_shape(layer.needs(i).shape)
        places = emit_coordinates(normalized, "k")[len(normalized) - len(own) :]
        return f"in{i}({emit_flat_index([p if size > 1 else '0' for p, size in zip(places, own, strict=True)], own)})"

    value = "(in0(first + k) - mean) * scale"
    value += f" * {emit_parameter(1)}" if layer.input(1) is not None else ""
    value += f" + {emit_parameter(2)}" if layer.input(2) is not None else ""
    mean = "" if rms else f"{each} mean += in0(first + k); mean /= {n};"
    text = f"""
        const long long first = i * {n}; Number mean = 0, square = 0; {mean}
        {each} {{ const Number d = in0(first + k) - mean; square += d * d; }}
        const Number scale = 1 / sqrt(square / {n} + (Number){layer.attrs["epsilon"]!r});
        {each} put0(first + k, {value});
    """
    return [(text, prod(shape) // n if n else 0)]


#: of each reduction: its value before the first element, and the update by an element `a`
_REDUCTIONS = {
    "ReduceProd": ("1", "y *= a;"),
    "ReduceSum": ("0", "y += a;"),
    "ReduceMax": ("in0(first)", "y = a != a || a > y ? a : y;"),
    "ReduceMin": ("in0(first)", "y = a != a || a < y ? a : y;"),
}


def _emit_reduction(layer: Layer) -> Passes:
    """A thread per result, in the accumulators' type, which holds more than 16-bit values do."""
    shape, over = static_shape(layer.needs(0).shape), set(list_reduced_axes(layer))
    kept = [d for d in range(len(shape)) if d not in over]
    strides, n = compute_row_major_strides(shape), prod(shape[d] for d in over)

    def index(name: str, axes: Sequence[int]) -> str:
        places = emit_coordinates([shape[d] for d in axes], name)
        return " + ".join(f"{p} * {strides[d]}ll" for p, d in zip(places, axes, strict=True)) or "0"

    start, update = _REDUCTIONS[layer.op]
    each = f"for (long long k = 0; k < {n}; ++k) {{ const Number a = in0(first + {index('k', sorted(over))}); {update} }}"
    text = f"const long long first = {index('i', kept)}; Number y = {start}; {each} put0(i, y);"
    return [(text, prod(static_shape(layer.outputs[0].shape)))]


_PASSES: dict[str, Callable[[Layer], Passes]] = {
    "CumSum": _emit_running, "CumProd": _emit_running, "ArgMax": _emit_arg_extreme, "ArgMin": _emit_arg_extreme, "Hardmax": _emit_hardmax,
    "LpNormalization": _emit_lp_normalization,
    "TopK": _emit_top_k, "LRN": _emit_lrn, "MeanVarianceNormalization": _emit_mean_variance, "LayerNormalization": _normalize,
    "RMSNormalization": _normalize,
    **dict.fromkeys(_REDUCTIONS, _emit_reduction),
}  # fmt: skip
_PARAMETERS = {"CumSum": (1,), "CumProd": (1,), "TopK": (1,), **dict.fromkeys(_REDUCTIONS, (1,))}
#: comparing ops, and reductions: partial results would leave the range of 16 bits
_KEEP_TYPES = frozenset({"ArgMax", "ArgMin", "Hardmax", "TopK", *_REDUCTIONS})


@tactic
class Lines(PerValueTactic):
    """Row-major; accumulators are f32, f64 for f64. Rounded operands could have another order, so that ops that compare take their own type."""

    ops = tuple(_PASSES)

    def parameters(self, layer: Layer) -> tuple[int, ...]:
        return _PARAMETERS.get(layer.op, ())

    def allows_16_bits(self, layer: Layer) -> bool:
        return layer.op not in _KEEP_TYPES

    def why_no_code(self, layer: Layer) -> str | None:
        return "it is empty" if layer.op in ("ReduceMax", "ReduceMin") and 0 in layer.needs(0).shape else None

    def launches(self, layer: Layer) -> Passes:
        return _PASSES[layer.op](layer)
