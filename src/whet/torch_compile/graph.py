"""torch.fx graphs of torch.compile: parameters as constants, sizes read off tensors, in-place operations, outputs that are no tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from whet.torch_compile.build import Ranges
from whet.torch_compile.module import LARGEST


@dataclass(frozen=True)
class Argument:
    """A placeholder of a graph: its position, whether it is a weight, and for tensors the (min, max) of dynamic axes (max None: no bound)."""

    index: int
    name: str
    weight: bool
    axes: Mapping[int, tuple[int, int | None]]


def list_arguments(gm: fx.GraphModule, examples: Sequence[Any]) -> list[Argument]:
    """The placeholders of a graph that torch.compile passes to a backend."""
    found = []
    for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        value = node.meta.get("example_value")
        example = examples[i] if i < len(examples) else None
        found.append(Argument(i, node.name, _is_weight(node, example), _find_dynamic_axes(value)))
    return found


def _is_weight(node: fx.Node, example: Any) -> bool:
    """True for a parameter or buffer of the module: its value is part of the engine."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    text = str(name() if callable(name) else name or node.target)
    return isinstance(example, torch.nn.Parameter) or any(part in text for part in ("._parameters[", "._buffers[", "_parameters_", "_buffers_"))


def _find_dynamic_axes(value: Any) -> dict[int, tuple[int, int | None]]:
    if not isinstance(value, torch.Tensor):
        return {}
    return {axis: _get_bounds(d) for axis, d in enumerate(value.shape) if isinstance(d, torch.SymInt)}


def _get_bounds(size: Any) -> tuple[int, int | None]:
    """The range of a symbolic size, as torch._dynamo.mark_dynamic(tensor, axis, min=, max=) set it."""
    try:
        found = size.node.shape_env.bound_sympy(size.node.expr)
        low, high = int(found.lower), int(found.upper)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 2, None
    return max(low, 1), high if high < 2**31 - 1 else None


def list_ranges(arguments: Sequence[Argument], tensors: Sequence[Any]) -> list[Ranges]:
    """Axis -> (min, opt, max) of each tensor; the engine is tuned for the present shapes."""
    return [
        {axis: (min(low, int(t.shape[axis])), int(t.shape[axis]), high or LARGEST * int(t.shape[axis])) for axis, (low, high) in a.axes.items()}
        for a, t in zip(arguments, tensors, strict=True)
    ]


def close_graph(gm: fx.GraphModule, arguments: Sequence[Argument], values: Sequence[Any]) -> fx.GraphModule:
    """A copy whose placeholders are the graph's tensors only: weights become constants, symbolic sizes are read off a tensor's shape.

    Other numbers become the constants that `values` has; the caller compares them at each call.
    """
    copy = fx.GraphModule(gm, fx.Graph())
    graph, env = fx.Graph(), {}
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    sizes: list[tuple[fx.Node, Any]] = []
    for node, argument, value in zip(nodes, arguments, values, strict=True):
        if isinstance(value, torch.Tensor) and not argument.weight:
            env[node] = graph.node_copy(node)
        elif isinstance(value, torch.Tensor):
            name = f"whet_weight_{argument.index}"
            copy.register_buffer(name, value.detach(), persistent=False)
            env[node] = graph.get_attr(name)
            env[node].meta = dict(node.meta)
        else:
            sizes.append((node, value))
    for node, value in sizes:
        env[node] = _make_size_node(graph, node, value, [(n, a) for n, a in zip(nodes, arguments, strict=True) if a.axes], env)
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda n: env[n])
    copy.graph = graph
    copy.recompile()
    return copy


def _make_size_node(graph: fx.Graph, node: fx.Node, value: Any, tensors: Sequence[tuple[fx.Node, Argument]], env: Mapping[fx.Node, Any]) -> Any:
    """tensor.size(axis) for a symbolic size that is one of a tensor's, else the number itself."""
    symbol = node.meta.get("example_value")
    if isinstance(symbol, torch.SymInt):
        for other, argument in tensors:
            if other not in env:
                continue
            shape = other.meta["example_value"].shape
            for axis in argument.axes:
                if str(shape[axis].node.expr) == str(symbol.node.expr):
                    size = graph.call_method("size", (env[other], axis))
                    size.meta = dict(node.meta)
                    return size
    return value


def find_unbound_numbers(gm: fx.GraphModule, arguments: Sequence[Argument]) -> list[int]:
    """Positions of arguments that are numbers and that `close_graph` makes constants."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = {str(n.meta["example_value"].shape[axis].node.expr) for n, a in zip(nodes, arguments, strict=True) if not a.weight for axis in a.axes}
    found = []
    for node, argument in zip(nodes, arguments, strict=True):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) and not (isinstance(value, torch.SymInt) and str(value.node.expr) in known):
            found.append(argument.index)
    return found


def find_in_place_change(gm: fx.GraphModule) -> str:
    """The name of the first operation that writes to one of its operands; "" if there is none."""
    for node in gm.graph.nodes:
        name = get_operation_name(node)
        if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
            return name
        if node.op == "call_function":
            inplace = name.endswith("_") and not name.startswith("_")
            if inplace or node.target in _WRITES or node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
                return name
    return ""


_WRITES = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.iand,
           operator.ior, operator.ixor, operator.ipow, operator.imatmul}  # fmt: skip


def get_operation_name(node: fx.Node) -> str:
    """The short name of a node's operation, such as softmax."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def is_tensor(node: Any) -> bool:
    """True if a node's value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)
