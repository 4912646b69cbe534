"""Loop: repeats a body up to M times, while a condition holds; carries states from turn to turn, and stacks what each turn scans out.

Inputs are M (i64, may be absent), the condition (may be absent), `states` carried values (all that follow, unless the attribute says how
many), then what else the body reads (lowering makes captured values inputs). The body takes (turn, condition, *carried, *read) and makes
(condition, *carried, *scanned). An engine needs shapes before it runs: carried values keep their types, and where something is scanned
out, the number of turns is known before. A loop whose carried values grow is unrolled when it is read, if its turns are known.
"""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import BOOL, F32, I64, Expr, Network, Tensor, TensorType
from whet.ops._base import INT, Sample, known_values, op
from whet.ops._regions import check_feeds

_MOST = 64  # turns that are unrolled


def turns(layer):
    """How often the body runs, as a dim, or None when that is in the data."""
    m, condition, body = layer.inputs[0], layer.input(1), layer.regions["body"]
    if m is None or known_values(m) is None or not _always(body):
        return None
    first = (1,) if condition is None else known_values(condition)
    if first is None or isinstance(first[0], Expr):
        return None
    return known_values(m)[0] if first[0] else 0


def _always(body: Network) -> bool:
    """Whether the body keeps the condition: passes it through, or makes it true."""
    t: Tensor | None = body.outputs[0]
    while t is not None and t.maker is not None and t.maker.op == "Identity":
        t = t.maker.inputs[0]
    return t is body.inputs[1] or known_values(t) == (1,)


def infer(layer):
    body = layer.regions["body"]
    carried = len(layer.inputs) - 2 if layer.attrs.get("states") is None else layer.attrs["states"]
    if len(layer.inputs) < 2 or not 0 <= carried <= len(layer.inputs) - 2 or len(body.inputs) < 2:
        raise NetworkError(f"takes a count, a condition and {carried} carried values, and is given {len(layer.inputs)}")
    for t, want in ((layer.inputs[0], I64), (layer.inputs[1], BOOL), (body.inputs[0], I64), (body.inputs[1], BOOL), (body.outputs[0], BOOL)):
        if t is not None and (t.dtype != want or t.type.elements != 1):
            raise NetworkError(f"takes one {want} where it is given {t.type}")
    check_feeds(layer, "body", [body.inputs[0].type, body.inputs[1].type, *(t and t.type for t in layer.inputs[2:])])
    before, after = layer.inputs[2 : 2 + carried], body.outputs[1 : 1 + carried]
    for a, b in zip(before, after, strict=True):
        if a.type != b.type:
            raise UnsupportedError(
                f"Loop '{layer.name}' carries %{a.name} as {a.type} into its first turn and %{b.name} as {b.type} out of it; whet needs a "
                "type that stays, or a number of turns that is known from constants and shapes"
            )
    scanned = body.outputs[1 + carried :]
    count = turns(layer)
    if scanned and count is None:
        raise UnsupportedError(
            f"Loop '{layer.name}' collects %{scanned[0].name} of every turn, and how many turns there are is computed at run time; an engine "
            "needs shapes before. Give a number of turns that is known from constants and shapes, and a condition that stays"
        )
    return [*(t.type for t in after), *(t.type.with_shape((count, *t.shape)) for t in scanned)]


def reference(layer, m, condition, *rest, run):
    body = layer.regions["body"]
    carried = len(rest) if layer.attrs.get("states") is None else layer.attrs["states"]
    states, read = list(rest[:carried]), rest[carried:]
    scanned = [[] for _ in body.outputs[1 + carried :]]
    goes_on, turn = condition is None or bool(condition.item()), 0
    turn_shape, flag_shape = ([d if isinstance(d, int) else 1 for d in t.shape] for t in body.inputs[:2])
    while goes_on and (m is None or turn < m.item()):
        again, *made = run("body", np.full(turn_shape, turn, np.int64), np.full(flag_shape, goes_on), *states, *read)
        states = made[:carried]
        for held, a in zip(scanned, made[carried:], strict=True):
            held.append(np.array(a))
        goes_on, turn = bool(again.item()), turn + 1
    return [*states, *(np.stack(held) if held else _nothing(t) for held, t in zip(scanned, body.outputs[1 + carried :], strict=True))]


def _nothing(t) -> np.ndarray:
    return np.zeros((0, *(d if isinstance(d, int) else 0 for d in t.shape)), t.dtype.numpy)


def read(node, g):
    inputs = [*node.inputs, *[None] * (2 - len(node.inputs))]
    try:
        region = node.graphs["body"]([None, None, *(t.type for t in inputs[2:])])
    except UnsupportedError as e:  # perhaps because what it cuts or fills depends on the turn
        return _unrolled(node, g, inputs, str(e))
    if any(a.type != b.type for a, b in zip(inputs[2:], region.outputs[1:], strict=False)):
        return _unrolled(node, g, inputs, "what it carries changes its shape from turn to turn")
    layer = g.add_layer("Loop", inputs, {}, name=node.name, outputs=node.outputs, regions={"body": region}, sources=(node.name,))
    return layer.outputs[0] if len(layer.outputs) == 1 else layer.outputs


def _unrolled(node, g, inputs, why: str):
    """The body's layers once for each turn. Raises UnsupportedError where it is not known how many there are."""
    count, first = known_values(inputs[0]), (1,) if inputs[1] is None else known_values(inputs[1])
    if count is None or not isinstance(count[0], int) or not 1 <= count[0] <= _MOST or first != (1,):
        raise node.unsupported(
            f"{why.rstrip('.')}; a loop is unrolled for 1 to {_MOST} turns and a condition that are known from constants and shapes. Export "
            "with fixed sizes, or unrolled"
        )
    states = list(inputs[2:])
    scanned: list[list] = []
    for turn in range(count[0]):
        flag = g.constant(np.array(True), f"{node.name}.condition")
        again, *made = node.inline("body", g, [g.constant(np.array(turn, np.int64), f"{node.name}.turn"), flag, *states])
        states, results = made[: len(states)], made[len(states) :]
        scanned = scanned or [[] for _ in results]
        for held, t in zip(scanned, results, strict=True):
            axes = g.constant(np.array([0], np.int64), f"{node.name}.axes")
            held.append(g.add("Unsqueeze", t, axes, sources=(node.name,)))
        goes_on = (1,) if again is flag else known_values(again)
        if goes_on is None:
            raise node.unsupported(f"{why.rstrip('.')}, and whether it goes on after turn {turn} is computed at run time")
        if not goes_on[0]:
            break
    return [*states, *(g.add("Concat", *held, axis=0, sources=(node.name,)) for held in scanned)]


def _sample(scans: bool):
    def body() -> dict[str, Network]:
        region = Network("body")
        turn, condition = region.add_input("turn", TensorType(I64, ())), region.add_input("condition", TensorType(BOOL, ()))
        x = region.add_input("x", TensorType(F32, (2, 3)))
        y = region.add("Add", x, region.add("Cast", turn, to=F32))
        region.mark_output(region.add("Identity", condition))
        region.mark_output(region.add("Mul", y, region.constant(np.float32(0.5))))
        if scans:
            region.mark_output(region.add("Neg", y))
        return {"body": region}

    return body


op(
    "Loop",
    infer,
    reference,
    attrs={"states": INT},
    onnx=read,
    samples=[
        Sample([np.array(3), np.array(True), "f32[2,3]"], {}, _sample(True)),
        Sample([np.array(0), None, "f32[2,3]"], {}, _sample(False)),
        Sample([np.array([4]), None, "f32[2,3]"], {}, _sample(False)),
    ],
)
