"""If: one of two branches, by a condition. If the condition is known from constants and shapes, the reader keeps only the taken branch,
and if the shapes of an unknown condition's branches fit in one of them only, that one (its metadata `assumed.<node>` says so).

The inputs after the condition are passed to both branches (in ONNX and in source networks the branches capture values of the outer
graph; lowering turns captured values into inputs). Sizes in which the branches differ depend on the data.
"""

from whet.errors import FrontendError, NetworkError, UnsupportedError
from whet.network import BOOL, F32, Network, Tensor
from whet.ops._base import Sample, find_known_values, op
from whet.ops._data_sized import make_size_symbol
from whet.ops._regions import check_feeds

_BRANCHES = ("then_branch", "else_branch")


def infer(layer):
    if layer.inputs[0] is None or layer.inputs[0].dtype != BOOL or layer.inputs[0].type.elements != 1:
        raise NetworkError(f"takes one bool, not {layer.inputs[0] and layer.inputs[0].type}")
    for k in _BRANCHES:
        check_feeds(layer, k, [t and t.type for t in layer.inputs[1:]])
    one, two = ([t.type for t in layer.regions[k].outputs] for k in _BRANCHES)
    if [(t.dtype, t.rank) for t in one] != [(t.dtype, t.rank) for t in two]:
        raise UnsupportedError(
            f"If '{layer.name}': its branches return {list(map(str, one))} and {list(map(str, two))}; they need equal element types and "
            "ranks, or a condition known from constants and shapes (give fixed shapes with --shapes, or simplify the model)"
        )
    return [
        a.with_shape(d if d == e else make_size_symbol(layer, i, axis) for axis, (d, e) in enumerate(zip(a.shape, b.shape, strict=True)))
        for i, (a, b) in enumerate(zip(one, two, strict=True))
    ]


def has_other_sizes(layer):
    """True if the branches return other sizes."""
    one, two = ([t.type for t in layer.regions[k].outputs] for k in _BRANCHES)
    return one != two


def read(node, g):
    known = find_known_values(node.inputs[0])
    if known is not None and isinstance(known[0], int):
        return node.inline("then_branch" if known[0] else "else_branch", g)
    regions, misfits = {}, {}
    for k in _BRANCHES:
        try:
            regions[k] = node.graphs[k](strict=True)
        except (FrontendError, NetworkError) as e:
            misfits[k] = e
    if len(misfits) == 1:
        (kept,), ((refused, reason),) = regions, misfits.items()
        if not isinstance(reason, UnsupportedError):
            g.metadata[f"assumed.{node.name}"] = (
                f"node '{node.name}' (If): only its {kept} fits the shapes, so the engine holds that branch and does not check the condition. "
                f"The {refused} was refused: {reason}"
            )
            return node.inline(kept, g)
    regions = {k: regions[k] if k in regions and not misfits else node.graphs[k]() for k in _BRANCHES}
    outputs = node.add(g, "If", *node.inputs, regions=regions)
    if node.lengths["then_branch"] != node.lengths["else_branch"]:
        raise node.unsupported("its branches return sequences of different lengths, and its condition is computed at run time")
    return node.join_sequences("then_branch", [outputs] if isinstance(outputs, Tensor) else outputs)


def _sample() -> dict[str, Network]:
    regions = {}
    for name, value in (("then_branch", 1.0), ("else_branch", -2.0)):
        regions[name] = region = Network(name)
        shape = region.add("ConstantOfShape", shape=(2, 3), value=value, dtype=F32)
        region.mark_output(region.add("Abs", shape))
    return regions


op(
    "If",
    infer,
    lambda layer, condition, *feeds, run: run("then_branch" if condition.item() else "else_branch", *feeds),
    onnx=read,
    data_sized=has_other_sizes,
    samples=[Sample(["bool[]"], {}, _sample), Sample(["bool[1]"], {}, _sample)],
)
