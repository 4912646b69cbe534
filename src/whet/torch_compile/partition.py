"""Splits a graph into runs of operations that whet supports and the rest, which torch runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from whet.errors import WhetError
from whet.torch_compile.build import log, read_module
from whet.torch_compile.graph import get_operation_name, is_tensor
from whet.torch_compile.options import CompileOptions

_reasons: dict[tuple[Any, ...], str] = {}  # signature of an operation -> why whet cannot compute it, "" if it can


def split_graph(gm: fx.GraphModule, options: CompileOptions) -> tuple[fx.GraphModule, list[str], dict[str, str]]:
    """The graph as calls of sub-modules, the names of those that whet supports, and why the other operations are unsupported, by name.

    A sub-module is a run of consecutive operations. Runs of fewer than `min_block_size` supported operations join the unsupported ones.
    """
    reasons: dict[str, str] = {}
    blocks: list[tuple[bool, list[fx.Node]]] = []
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        supported = _is_supported(gm, node, options, reasons)
        if not blocks or blocks[-1][0] != supported:
            blocks.append((supported, []))
        blocks[-1][1].append(node)
    number: dict[fx.Node, int] = {}
    engines: list[int] = []
    last_supported: bool | None = None
    count = -1
    for supported, nodes in blocks:
        kept = supported and sum(n.target is not operator.getitem for n in nodes) >= options.min_block_size
        if kept or last_supported is not False:
            count += 1
            if kept:
                engines.append(count)
        last_supported = kept
        number |= dict.fromkeys(nodes, count)
    if not engines:
        return gm, [], reasons
    whole = split_module(gm, gm, lambda node: number[node], keep_original_order=True)
    return whole, [f"submod_{i}" for i in engines], reasons


def _is_supported(gm: fx.GraphModule, node: fx.Node, options: CompileOptions, reasons: dict[str, str]) -> bool:
    """True if whet computes the operation. getitem belongs to the operation that made its tuple."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and not is_tensor(node.args[0]):
        return _is_supported(gm, node.args[0], options, reasons)
    name = get_operation_name(node)
    if name in options.torch_executed_ops:
        reasons.setdefault(name, "torch_executed_ops names it")
        return False
    if not (is_tensor(node) or isinstance(node.meta.get("example_value"), tuple | list)):
        return False  # a number: torch computes sizes
    key = (node.op, str(node.target), *(_make_key(v) for v in _iterate_flat(node)))
    if key not in _reasons:
        _reasons[key] = _try(gm, node)
    if _reasons[key]:
        reasons.setdefault(name, _reasons[key])
    return not _reasons[key]


def _iterate_flat(node: fx.Node) -> Iterator[Any]:
    leaves: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    yield from leaves


def _make_key(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return str(value)
    example = value.meta.get("example_value")
    return (str(example.dtype), tuple(map(str, example.shape))) if isinstance(example, torch.Tensor) else str(example)


class _OneOperation(torch.nn.Module):
    """One node as a module over its tensors."""

    def __init__(self, gm: fx.GraphModule, node: fx.Node, tensors: list[fx.Node]):
        super().__init__()
        self._gm, self._node, self._tensors = (gm,), node, tensors

    def forward(self, *values: Any) -> Any:
        env = dict(zip(self._tensors, values, strict=True))

        def load(n: fx.Node) -> Any:
            return env[n] if n in env else _get_present_value(n.meta.get("example_value"))

        args, kwargs = fx.node.map_arg(self._node.args, load), fx.node.map_arg(self._node.kwargs, load)
        target: Any = self._node.target
        if self._node.op == "call_function":
            got = target(*args, **kwargs)
        elif self._node.op == "call_method":
            got = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            got = self._gm[0].get_submodule(target)(*args, **kwargs)
        return tuple(v for v in got if isinstance(v, torch.Tensor)) if isinstance(got, tuple | list) else (got,)


def _try(gm: fx.GraphModule, node: fx.Node) -> str:
    """Why the operation cannot be converted at its shapes; "" if it can."""
    tensors = [n for n in dict.fromkeys(node.all_input_nodes) if is_tensor(n)]
    if not tensors:
        return "it takes no tensor"
    try:
        read_module(_OneOperation(gm, node, tensors), [_make_example(n) for n in tensors], [{}] * len(tensors))
    except WhetError as e:
        return str(e)
    return ""


def _make_example(node: fx.Node) -> Any:
    value = node.meta["example_value"]
    shape = [_get_present_value(d) for d in value.shape]
    return torch.ones(shape, dtype=value.dtype)


def _get_present_value(value: Any) -> Any:
    """A symbolic number's present value."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def log_unsupported(reasons: dict[str, str], log_line: Callable[..., None] = log.warning) -> None:
    """Logs one line for each unsupported operation."""
    for name, why in reasons.items():
        log_line("torch runs %s: %s", name, why)
