"""Scan: applies a body to the entries of sequences in order; carries states and stacks the results.

Inputs are `states` carried values (all but the sequences without the attribute), `num_scan_inputs` sequences, then captured values
(lowering turns them into inputs). The body takes (*carried, *entries, *captured) and returns (*carried, *results).
Definition of opset 9: no batch axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import F32, Dim, Layer, Network, TensorType
from whet.ops._base import INT, INTS, NEEDS_INT, Sample, op
from whet.ops._regions import check_feeds, check_steps
from whet.ops._types import normalize_axis


@dataclass(frozen=True)
class ScanForm:
    """The parts of a Scan: the number of its carried values and of its sequences, their length, and the axis and direction of each sequence and of
    each result."""

    carried: int
    sequences: int
    length: Dim
    input_axes: tuple[int, ...]
    input_directions: tuple[int, ...]
    output_axes: tuple[int, ...]
    output_directions: tuple[int, ...]

    @classmethod
    def of(cls, layer: Layer) -> ScanForm:
        """Raises NetworkError for attributes that do not fit the layer's inputs and the body's outputs."""
        sequences = layer.attrs["num_scan_inputs"]
        states = layer.attrs.get("states")
        carried = len(layer.inputs) - sequences if states is None else states
        results = len(layer.regions["body"].outputs) - carried
        if carried < 0 or sequences < 1 or carried + sequences > len(layer.inputs) or results < 0 or any(t is None for t in layer.inputs):
            raise NetworkError(f"takes {carried} carried values and {sequences} sequences, but has {len(layer.inputs)} inputs")
        types = [t.type for t in layer.required_inputs()[carried : carried + sequences]]
        axes = tuple(normalize_axis(axis, t.rank) for axis, t in zip(_get_flags(layer, "scan_input_axes", sequences), types, strict=True))
        lengths = [t.shape[axis] for axis, t in zip(axes, types, strict=True)]
        for length in lengths:
            if length != lengths[0]:
                raise NetworkError(f"its sequences have lengths {lengths[0]} and {length}")
        outputs = layer.regions["body"].outputs[carried:]
        output_axes = _get_flags(layer, "scan_output_axes", results)
        return cls(
            carried,
            sequences,
            lengths[0],
            axes,
            _get_flags(layer, "scan_input_directions", sequences),
            tuple(normalize_axis(axis, t.type.rank + 1) for axis, t in zip(output_axes, outputs, strict=True)),
            _get_flags(layer, "scan_output_directions", results),
        )

    def order_inputs(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Views of the sequences among the layer's inputs, the entries along axis 0 in the order of the steps."""
        return _order(arrays[self.carried : self.carried + self.sequences], self.input_axes, self.input_directions)

    def order_outputs(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Views of the results among the layer's outputs, the entries along axis 0 in the order of the steps."""
        return _order(arrays[self.carried :], self.output_axes, self.output_directions)


def _order(arrays: Sequence[np.ndarray], axes: Sequence[int], directions: Sequence[int]) -> list[np.ndarray]:
    moved = [np.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
    return [a[::-1] if back else a for a, back in zip(moved, directions, strict=True)]


def _get_flags(layer, name: str, count: int) -> tuple[int, ...]:
    flags = layer.attrs.get(name)
    if flags is not None and len(flags) != count:
        raise NetworkError(f"{name} has {len(flags)} entries for {count} tensors")
    return tuple(flags) if flags is not None else (0,) * count


def infer(layer):
    form, body = ScanForm.of(layer), layer.regions["body"]
    feeds = [t.type for t in layer.inputs]
    for k, axis in enumerate(form.input_axes, start=form.carried):
        feeds[k] = feeds[k].with_shape((*feeds[k].shape[:axis], *feeds[k].shape[axis + 1 :]))
    check_feeds(layer, "body", feeds)
    check_steps(layer, "body", form.length)
    for a, b in zip(feeds[: form.carried], body.outputs[: form.carried], strict=True):
        if a != b.type:
            raise UnsupportedError(f"Scan '{layer.name}' carries {a} into its first entry and {b.type} out of it; the type must be constant")
    types = [t.type for t in body.outputs[: form.carried]]
    for t, axis in zip(body.outputs[form.carried :], form.output_axes, strict=True):
        types.append(t.type.with_shape((*t.shape[:axis], form.length, *t.shape[axis:])))
    return types


def compute_reference(layer, *arrays, run):
    form, body = ScanForm.of(layer), layer.regions["body"]
    states, read = list(arrays[: form.carried]), arrays[form.carried + form.sequences :]
    held = [[] for _ in form.output_axes]
    for entries in zip(*form.order_inputs(arrays), strict=True):
        outputs = run("body", *states, *(np.array(e) for e in entries), *read)
        states = outputs[: form.carried]
        for rows, a in zip(held, outputs[form.carried :], strict=True):
            rows.append(np.array(a))
    outs = []
    for rows, t, axis, back in zip(held, body.outputs[form.carried :], form.output_axes, form.output_directions, strict=True):
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
