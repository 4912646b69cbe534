"""Loop: repeats a body up to M times, while a condition holds; carries states between iterations and stacks each iteration's scan outputs.

Inputs are M (i64, optional), the condition (optional), `states` carried values (all remaining inputs without the attribute), then captured
values (lowering turns them into inputs). The body takes (iteration, condition, *carried, *captured) and returns (condition, *carried,
*scanned). An engine needs shapes in advance: carried values keep their types, and scan outputs have a size that depends on the data if the number of
iterations is unknown. The reader unrolls a loop with carried values of changing shape if its number of iterations is known.

A sequence to which each iteration appends a tensor is read as a scan output; the condition of such a loop as its count, if it compares a carried
counter with a limit (`i < n`).
"""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import BOOL, F32, I32, I64, Expr, Network, Tensor, TensorType
from whet.ops._base import INT, Sample, find_known_values, is_data_sized, op
from whet.ops._data_sized import make_size_symbol
from whet.ops._regions import check_feeds, check_steps
from whet.ops._sequences import Counter, GrowingSequence, StackedSequence, TensorSequence

_MOST = 64  # largest number of unrolled iterations
_ENDLESS = 2**31 - 1  # counts from this on mean "while the condition holds": exporters write the largest 32- or 64-bit integer


def find_iteration_count(layer):
    """The number of iterations as a dim, or None if it depends on the data."""
    m, condition, body = layer.inputs[0], layer.input(1), layer.regions["body"]
    if m is None or find_known_values(m) is None or not _runs_to_the_end(body):
        return None
    first = (1,) if condition is None else find_known_values(condition)
    if first is None or isinstance(first[0], Expr):
        return None
    return find_known_values(m)[0] if first[0] else 0


def _runs_to_the_end(body: Network) -> bool:
    """True if the body never ends the loop: its condition is passed through or constant true."""
    t: Tensor | None = body.outputs[0]
    while t is not None and t.maker is not None and t.maker.op == "Identity":
        t = t.maker.inputs[0]
    return t is body.inputs[1] or find_known_values(t) == (1,)


def infer(layer):
    body = layer.regions["body"]
    carried = count_carried(layer)
    if len(layer.inputs) < 2 or not 0 <= carried <= len(layer.inputs) - 2 or len(body.inputs) < 2:
        raise NetworkError(f"takes a count, a condition and {carried} carried values, but has {len(layer.inputs)} inputs")
    for t, want in ((layer.inputs[0], I64), (layer.inputs[1], BOOL), (body.inputs[0], I64), (body.inputs[1], BOOL), (body.outputs[0], BOOL)):
        if t is not None and (t.dtype != want or t.type.elements != 1):
            raise NetworkError(f"takes one {want} where it is given {t.type}")
    check_feeds(layer, "body", [body.inputs[0].type, body.inputs[1].type, *(t and t.type for t in layer.inputs[2:])])
    before, after = layer.inputs[2 : 2 + carried], body.outputs[1 : 1 + carried]
    for a, b in zip(before, after, strict=True):
        if a.type != b.type:
            raise UnsupportedError(
                f"Loop '{layer.name}' carries %{a.name} as {a.type} into its first iteration and %{b.name} as {b.type} out of it; the type "
                "must be constant, or the number of iterations known from constants and shapes"
            )
    scanned = body.outputs[1 + carried :]
    count, condition = find_iteration_count(layer), layer.inputs[1]
    check_steps(layer, "body", count)
    if layer.inputs[0] is None and _runs_to_the_end(body) and (condition is None or find_known_values(condition) == (1,)):
        raise UnsupportedError(f"Loop '{layer.name}' has no iteration count, and its body never changes the condition: it would not end")
    rows = make_size_symbol(layer) if count is None else count
    return [*(t.type for t in after), *(t.type.with_shape((rows, *t.shape)) for t in scanned)]


def has_unknown_rows(layer):
    """True if it scans, and the number of its iterations is computed at run time."""
    return len(layer.outputs) > count_carried(layer) and find_iteration_count(layer) is None


def count_carried(layer) -> int:
    """The number of values that an iteration passes to the next one."""
    return len(layer.inputs) - 2 if layer.attrs.get("states") is None else layer.attrs["states"]


def compute_reference(layer, m, condition, *states_and_inputs, run):
    body = layer.regions["body"]
    carried = count_carried(layer)
    states, read = list(states_and_inputs[:carried]), states_and_inputs[carried:]
    scanned = [[] for _ in body.outputs[1 + carried :]]
    goes_on, turn = condition is None or bool(condition.item()), 0
    turn_shape, flag_shape = ([d if isinstance(d, int) else 1 for d in t.shape] for t in body.inputs[:2])
    while goes_on and (m is None or turn < m.item()):
        again, *results = run("body", np.full(turn_shape, turn, np.int64), np.full(flag_shape, goes_on), *states, *read)
        states = results[:carried]
        for part, a in zip(scanned, results[carried:], strict=True):
            part.append(np.array(a))
        goes_on, turn = bool(again.item()), turn + 1
    return [*states, *(np.stack(part) if part else _make_empty_array(t) for part, t in zip(scanned, body.outputs[1 + carried :], strict=True))]


def _make_empty_array(t) -> np.ndarray:
    return np.zeros((0, *(d if isinstance(d, int) else 0 for d in t.shape)), t.dtype.numpy)


def read(node, g):
    inputs = [*node.inputs, *[None] * (2 - len(node.inputs))]
    if not all(t is None or isinstance(t, Tensor) for t in inputs):
        return _read_appending(node, g, inputs)
    try:
        region = node.graphs["body"]([None, None, *(t.type for t in inputs[2:])])
    except UnsupportedError as e:  # e.g. if a slice depends on the iteration
        return _unroll(node, g, inputs, str(e))
    sized = has_data_sizes(region)
    if any(a.type != b.type for a, b in zip(inputs[2:], region.outputs[1:], strict=False)):
        size = ", and a size in it depends on the data" if sized else ""
        return _unroll(node, g, inputs, f"its carried values change shape between iterations{size}")
    if sized and _find_count(inputs) is not None and _keeps_condition(region):  # unrolled, a slice at the iteration's index has a known size
        return _unroll(node, g, inputs, "a size in it depends on the data")
    layer = g.add_layer("Loop", inputs, {}, name=node.name, outputs=node.outputs, regions={"body": region}, sources=(node.name,))
    return layer.outputs[0] if len(layer.outputs) == 1 else layer.outputs


def _read_appending(node, g, inputs):
    """A loop that carries sequences: unrolled if it has few iterations, otherwise with scan outputs if it only appends to empty sequences."""
    why = "it carries a sequence of tensors"
    states = inputs[2:]
    if _find_count(inputs) is not None or not all(isinstance(t, Tensor) or t == TensorSequence(()) for t in states):
        return _unroll(node, g, inputs, why)
    types = [t.type if isinstance(t, Tensor) else GrowingSequence() for t in states]
    counted = _count_iterations(node, g, inputs, types)
    if _find_count(inputs) is not None:
        return _unroll(node, g, inputs, why)
    if counted is not None:
        types[counted] = Counter(types[counted])
    try:
        region = node.graphs["body"]([None, None, *types], strict=True)
    except UnsupportedError as e:
        return _unroll(node, g, inputs, f"{why}, and {e}")
    if counted is not None:
        _go_on(node, region)
    lengths = node.lengths["body"][1 : 1 + len(states)]
    carried = [a for a, n in zip(states, lengths, strict=True) if n is None]
    after, appended = ([t for t, n in zip(region.outputs[1:], lengths, strict=False) if n == kind] for kind in (None, 1))
    if any(n not in (None, 1) for n in lengths) or any(a.type != b.type for a, b in zip(carried, after, strict=True)):
        return _unroll(node, g, inputs, f"{why}, to which an iteration appends several, or changes the shape of others")
    region.outputs[1 : 1 + len(states)] = [*after, *appended]
    attrs = {"states": len(carried)}
    layer = g.add_layer("Loop", [*inputs[:2], *carried], attrs, name=node.name, regions={"body": region}, sources=(node.name,))
    final, stacked, scanned = (iter(layer.outputs[i:]) for i in (0, len(carried), len(states)))
    return [*(next(final) if n is None else StackedSequence(next(stacked)) for n in lengths), *scanned]


def _go_on(node, region) -> None:
    """Makes the body of a counted loop return the condition that it is given."""
    region.outputs[0] = region.add("Identity", region.inputs[1], name=f"{node.name}.goes_on", sources=(node.name,))


def _count_iterations(node, g, inputs, types) -> int | None:
    """Replaces the condition in `inputs` by the count if the loop has none and ends when a carried integer of at least 0 reaches a limit.

    Returns the index of that integer among the carried values, whose types are `types`.
    """
    count = find_known_values(inputs[0])
    if inputs[0] is not None and (count is None or not isinstance(count[0], int) or count[0] < _ENDLESS):
        return None
    for k, start in enumerate(inputs[2:]):
        first = find_known_values(start) if isinstance(start, Tensor) and start.dtype in (I32, I64) else None
        if first is None or len(first) != 1 or not isinstance(first[0], int) or first[0] < 0:
            continue
        limit = _find_limit(node, types, k, sum(isinstance(t, Tensor) for t in inputs[2 : 2 + k]))
        if limit is not None and (least := _find_least_count(inputs[1], first[0], limit)) is not None:
            inputs[:2] = _subtract(node, g, limit, first[0], least), None
            return k
    return None


def _find_limit(node, types, k: int, place: int) -> Tensor | None:
    """The value outside of the body below which the loop goes on if carried value `k`, tensor `place` of them, grows by 1; None otherwise."""
    try:
        region = node.graphs["body"]([None, None, *types], strict=True, only=(0, 1 + k))
    except UnsupportedError:
        return None
    goes_on, following = map(_skip_identities, region.outputs)
    if goes_on.maker is None or goes_on.maker.op not in ("Less", "Greater"):
        return None
    low, limit = _order_terms(goes_on.maker)
    own = {t for layer in region.layers for t in layer.outputs} | set(region.inputs)
    if _skip_identities(low) is not following or limit in own or limit.type.elements != 1:
        return None
    terms = list(map(_skip_identities, following.maker.required_inputs())) if following.maker is not None and following.maker.op == "Add" else []
    counter = region.inputs[2 + place]
    return limit if any(a is counter and find_known_values(b) == (1,) for a, b in (terms, terms[::-1]) if terms) else None


def _skip_identities(t: Tensor) -> Tensor:
    while t.maker is not None and t.maker.op == "Identity":
        t = t.maker.needs(0)
    return t


def _order_terms(layer) -> tuple[Tensor, Tensor]:
    """(a, b) of a layer a < b or b > a."""
    return (layer.needs(0), layer.needs(1)) if layer.op == "Less" else (layer.needs(1), layer.needs(0))


def _find_least_count(condition, first: int, limit: Tensor) -> int | None:
    """The least number of iterations: 0 if the first condition is the comparison itself, 1 if it is true; None if it is another."""
    if condition is None or find_known_values(condition) == (1,):
        return 1
    t = _skip_identities(condition)
    if t.maker is None or t.maker.op not in ("Less", "Greater"):
        return None
    low, high = map(_skip_identities, _order_terms(t.maker))
    same = high is _skip_identities(limit) or (find_known_values(high) is not None and find_known_values(high) == find_known_values(limit))
    return 0 if same and find_known_values(low) == (first,) else None


def _subtract(node, g, limit: Tensor, first: int, least: int) -> Tensor:
    """max(limit - first, least) as i64[]."""
    high = find_known_values(limit)
    if high is not None and isinstance(high[0], int):
        return g.constant(np.array(max(high[0] - first, least), np.int64), f"{node.name}.count")

    def add(op_name: str, *terms: Tensor, **attrs) -> Tensor:
        return g.add(op_name, *terms, name=f"{node.name}.count", sources=(node.name,), **attrs)

    def number(value: int) -> Tensor:
        return g.constant(np.array(value, np.int64), f"{node.name}.number")

    count = add("Reshape", limit if limit.dtype == I64 else add("Cast", limit, to=I64), shape=())
    count = add("Sub", count, number(first)) if first else count
    return count if high is not None and not first else add("Max", count, number(least))  # a size is at least 1


def has_data_sizes(region) -> bool:
    """True if a size in the region depends on the data."""
    return any(is_data_sized(x) or any(map(has_data_sizes, x.regions.values())) for x in region.layers)


def _keeps_condition(region) -> bool:
    """True if an iteration returns the condition that it was given, or a constant."""
    t = region.outputs[0]
    while t.maker is not None and t.maker.op == "Identity":
        t = t.maker.inputs[0]
    return t is region.inputs[1] or t.is_constant


def _find_count(inputs) -> int | None:
    """The most iterations of a loop with these inputs if they are 1 to _MOST and known, as is that it begins."""
    count, first = find_known_values(inputs[0]), (1,) if inputs[1] is None else find_known_values(inputs[1])
    return count[0] if count is not None and isinstance(count[0], int) and 1 <= count[0] <= _MOST and first == (1,) else None


def _unroll(node, g, inputs, why: str):
    """Unrolls the body. Raises UnsupportedError if the number of iterations is unknown."""
    if (count := _find_count(inputs)) is None:
        raise node.unsupported(
            f"{why.rstrip('.')}; a loop is unrolled for 1 to {_MOST} iterations and a condition known from constants and shapes. Export "
            "with fixed sizes, or unrolled"
        )
    states = list(inputs[2:])
    scanned: list[list] = []
    for turn in range(count):
        flag = g.constant(np.array(True), f"{node.name}.condition")
        again, *made = node.inline("body", g, [g.constant(np.array(turn, np.int64), f"{node.name}.turn"), flag, *states])
        states, results = made[: len(states)], made[len(states) :]
        scanned = scanned or [[] for _ in results]
        for part, t in zip(scanned, results, strict=True):
            axes = g.constant(np.array([0], np.int64), f"{node.name}.axes")
            part.append(g.add("Unsqueeze", t, axes, sources=(node.name,)))
        goes_on = (1,) if again is flag else find_known_values(again)
        if goes_on is None:
            raise node.unsupported(f"{why.rstrip('.')}, and its condition after iteration {turn} is computed at run time")
        if not goes_on[0]:
            break
    return [*states, *(g.add("Concat", *part, axis=0, sources=(node.name,)) for part in scanned)]


def _sample(scans: bool):
    def build_body() -> dict[str, Network]:
        region = Network("body")
        turn, condition = region.add_input("turn", TensorType(I64, ())), region.add_input("condition", TensorType(BOOL, ()))
        x = region.add_input("x", TensorType(F32, (2, 3)))
        y = region.add("Add", x, region.add("Cast", turn, to=F32))
        region.mark_output(region.add("Identity", condition))
        region.mark_output(region.add("Mul", y, region.constant(np.array(0.5, np.float32))))
        if scans:
            region.mark_output(region.add("Neg", y))
        return {"body": region}

    return build_body


op(
    "Loop",
    infer,
    compute_reference,
    attrs={"states": INT},
    onnx=read,
    reads_sequences=True,
    data_sized=has_unknown_rows,
    samples=[
        Sample([np.array(3), np.array(True), "f32[2,3]"], {}, _sample(True)),
        Sample([np.array(0), None, "f32[2,3]"], {}, _sample(False)),
        Sample([np.array([4]), None, "f32[2,3]"], {}, _sample(False)),
    ],
)
