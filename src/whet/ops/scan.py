"""Scan: applies a body to the entries of sequences in order; carries states and stacks the results.

Inputs are `states` carried values (all but the sequences without the attribute), `num_scan_inputs` sequences, then captured values
(lowering turns them into inputs). The body takes (*carried, *entries, *captured) and returns (*carried, *results).
Definition of opset 9: no batch axis.
"""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import F32, Network, TensorType
from whet.ops._base import INT, INTS, NEEDS_INT, Sample, op
from whet.ops._regions import check_feeds, check_steps
from whet.ops._types import normalize_axis


def _count_inputs(layer) -> tuple[int, int]:
    """(carried values, sequences)."""
    sequences = layer.attrs["num_scan_inputs"]
    states = layer.attrs.get("states")
    return (len(layer.inputs) - sequences if states is None else states), sequences


def _get_flags(layer, name: str, count: int) -> tuple[int, ...]:
    flags = layer.attrs.get(name)
    if flags is not None and len(flags) != count:
        raise NetworkError(f"{name} has {len(flags)} entries for {count} tensors")
    return tuple(flags) if flags is not None else (0,) * count


def infer(layer):
    carried, sequences = _count_inputs(layer)
    body = layer.regions["body"]
    results = len(body.outputs) - carried
    if carried < 0 or sequences < 1 or carried + sequences > len(layer.inputs) or results < 0 or any(t is None for t in layer.inputs):
        raise NetworkError(f"takes {carried} carried values and {sequences} sequences, but has {len(layer.inputs)} inputs")
    feeds = [t.type for t in layer.inputs]
    length = None
    axes = _get_flags(layer, "scan_input_axes", sequences)
    _get_flags(layer, "scan_input_directions", sequences)
    _get_flags(layer, "scan_output_directions", results)
    for k, axis in enumerate(axes, start=carried):
        t = feeds[k]
        axis = normalize_axis(axis, t.rank)
        if length is not None and t.shape[axis] != length:
            raise NetworkError(f"its sequences have lengths {length} and {t.shape[axis]}")
        length = t.shape[axis]
        feeds[k] = t.with_shape((*t.shape[:axis], *t.shape[axis + 1 :]))
    check_feeds(layer, "body", feeds)
    check_steps(layer, "body", length)
    for a, b in zip(feeds[:carried], body.outputs[:carried], strict=True):
        if a != b.type:
            raise UnsupportedError(f"Scan '{layer.name}' carries {a} into its first entry and {b.type} out of it; the type must be constant")
    types = [t.type for t in body.outputs[:carried]]
    for t, axis in zip(body.outputs[carried:], _get_flags(layer, "scan_output_axes", results), strict=True):
        axis = normalize_axis(axis, t.type.rank + 1)
        types.append(t.type.with_shape((*t.shape[:axis], length, *t.shape[axis:])))
    return types


def compute_reference(layer, *arrays, run):
    carried, sequences = _count_inputs(layer)
    body = layer.regions["body"]
    results = len(body.outputs) - carried
    states, read = list(arrays[:carried]), arrays[carried + sequences :]
    moved = [np.moveaxis(a, axis, 0) for a, axis in zip(arrays[carried:], _get_flags(layer, "scan_input_axes", sequences), strict=False)]
    moved = [a[::-1] if back else a for a, back in zip(moved, _get_flags(layer, "scan_input_directions", sequences), strict=True)]
    held = [[] for _ in range(results)]
    for entries in zip(*moved, strict=True):
        outputs = run("body", *states, *(np.array(e) for e in entries), *read)
        states = outputs[:carried]
        for rows, a in zip(held, outputs[carried:], strict=True):
            rows.append(np.array(a))
    outs = []
    for rows, t, axis, back in zip(
        held,
        body.outputs[carried:],
        _get_flags(layer, "scan_output_axes", results),
        _get_flags(layer, "scan_output_directions", results),
        strict=True,
    ):
        stacked = np.stack(rows[::-1] if back else rows) if rows else np.zeros((0, *t.shape), t.dtype.numpy)
        outs.append(np.moveaxis(stacked, 0, axis))
    return [*states, *outs]


def read(node, g):
    sequences = node.attrs["num_scan_inputs"]
    carried = len(node.inputs) - sequences
    axes = node.attrs.get("scan_input_axes") or (0,) * sequences
    types = [t.type for t in node.inputs[:carried]]
    for t, axis in zip(node.inputs[carried:], axes, strict=True):
        axis = normalize_axis(axis, t.type.rank)
        types.append(t.type.with_shape((*t.shape[:axis], *t.shape[axis + 1 :])))
    return node.add(g, "Scan", *node.inputs, regions={"body": node.graphs["body"](types)}, **node.attrs)


def _sample() -> dict[str, Network]:
    region = Network("body")
    s, x = (region.add_input(n, TensorType(F32, (3,))) for n in "sx")
    y = region.add("Add", region.add("Mul", s, region.constant(np.array(0.5, np.float32))), x)
    region.mark_output(y)
    region.mark_output(region.add("Neg", y))
    return {"body": region}


op(
    "Scan",
    infer,
    compute_reference,
    attrs={
        "num_scan_inputs": NEEDS_INT,
        "scan_input_axes": INTS,
        "scan_input_directions": INTS,
        "scan_output_axes": INTS,
        "scan_output_directions": INTS,
        "states": INT,
    },
    onnx=read,
    samples=[
        Sample(["f32[3]", "f32[5,3]"], {"num_scan_inputs": 1}, _sample),
        Sample(
            ["f32[3]", "f32[3,4]"],
            {"num_scan_inputs": 1, "scan_input_axes": (1,), "scan_input_directions": (1,), "scan_output_axes": (1,), "scan_output_directions": (1,)},
            _sample,
        ),
    ],
)
