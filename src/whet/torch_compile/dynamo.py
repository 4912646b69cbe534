"""The backend "whet" of torch.compile: an engine for each graph, or for the parts of it that whet supports; torch runs the rest."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import register_backend

from whet.errors import UsageError, WhetError
from whet.torch_compile.build import build_call, log
from whet.torch_compile.engine_call import EngineCall
from whet.torch_compile.graph import (
    close_graph,
    find_in_place_change,
    find_unbound_numbers,
    get_operation_name,
    is_tensor,
    list_arguments,
    list_ranges,
)
from whet.torch_compile.options import CompileOptions
from whet.torch_compile.partition import log_unsupported, split_graph

_MAX_VERSIONS = 4  # sets of weights and numbers that one graph has engines for


@register_backend(name="whet")
def whet_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Compiles one graph of torch.compile(model, backend="whet", options={...}); `options` are the fields of CompileOptions.

    The engine is built when the graph is first called. Dynamic axes are those that torch marks (dynamic=True, or
    torch._dynamo.mark_dynamic(tensor, axis, min=1, max=64)); without a bound the engine takes up to 4 times the first size. A graph runs in
    torch, and the log "whet.torch_compile" says why, if gradients are needed, shapes are outside the profile, it writes to its inputs, or none
    of its operations can be converted; operations that whet does not support run in torch between engines.
    """
    return GraphCall(gm, example_inputs, CompileOptions.of(options or {}))


class GraphCall:
    """A graph of torch.compile. Called with the graph's arguments: weights, symbolic sizes and tensors, in torch's order."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions):
        self._gm, self._options = gm, options
        self._arguments = list_arguments(gm, example_inputs)
        self._weights = [a.index for a in self._arguments if a.weight]
        self._numbers = find_unbound_numbers(gm, self._arguments)
        self._runs: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()
        self._warned: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            self._warn("its gradients are needed, and an engine computes none: call the model under torch.no_grad() or torch.inference_mode()")
            return self._gm(*args)
        key = (*[(id(args[i]), _get_version(args[i])) for i in self._weights], *[args[i] for i in self._numbers])
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._compile(args) if len(self._runs) < _MAX_VERSIONS else self._out_of_versions()
        return run(*args)

    def _out_of_versions(self) -> Callable[..., Any]:
        self._warn(f"its weights or numbers changed {_MAX_VERSIONS} times, and each change needs another engine")
        self._runs.clear()
        return self._gm

    def _compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The graph as engines at these weights and shapes; the graph itself if there is no engine."""
        held = [args[i] for i in self._weights]  # their ids are in the key, so they must stay alive
        try:
            run = self._build_whole_graph(args)
        except UsageError:
            raise
        except WhetError as e:
            if self._options.require_full_compilation:
                raise
            log.info("the graph of %d operations is split: %s", len(self._gm.graph.nodes), e)
            try:
                run = self._build_parts(args, e)
            except WhetError as e:
                if self._options.pass_through_build_failures:
                    raise
                self._warn(str(e))
                run = self._gm
        return _Holding(run, held)

    def _build_whole_graph(self, args: Sequence[Any]) -> Callable[..., Any]:
        """One engine for the graph. Raises WhetError if a part of it cannot be converted."""
        closed = close_graph(self._gm, self._arguments, args)
        if kept := {get_operation_name(n) for n in closed.graph.nodes} & set(self._options.torch_executed_ops):
            raise _NoEngine(f"torch_executed_ops keeps {', '.join(sorted(kept))} in torch")
        at = [a.index for a in self._arguments if isinstance(args[a.index], torch.Tensor) and not a.weight]
        outputs = list(fx.node.map_arg(next(n for n in closed.graph.nodes if n.op == "output").args[0], lambda n: n))
        inner = [n for n in closed.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        sources = _find_output_sources(outputs, [n for n in closed.graph.nodes if n.op == "placeholder"], at)
        if not inner or not any(isinstance(s, int) for s in sources):
            raise _NoEngine("it computes no tensor")
        flat = _FlatGraph(closed, sources)
        tensors = [args[i] for i in at]
        samples = _read_samples(self._options, len(tensors))
        call = build_call(flat, tensors, list_ranges([self._arguments[i] for i in at], tensors), self._options, samples=samples, name="graph")
        return _WholeGraph(call, at, sources, self._gm, self._warn)

    def _build_parts(self, args: Sequence[Any], why: WhetError) -> Callable[..., Any]:
        """The graph with engines for its supported parts. Raises WhetError if there are none."""
        if name := find_in_place_change(self._gm):
            raise _NoEngine(f"{why} The graph cannot be split, because {name} changes a tensor in place")
        if "int8" in self._options.precisions:
            raise _NoEngine(f"{why} An INT8 graph is not split, because the calibration samples are inputs of the whole graph")
        closed = close_graph(self._gm, self._arguments, args)
        whole, engines, reasons = split_graph(closed, self._options)
        log_unsupported({n: r for n, r in reasons.items() if n not in self._warned})
        self._warned |= set(reasons)
        if not engines:
            raise _NoEngine(f"no run of {self._options.min_block_size} operations (min_block_size) is supported. {why}")
        for name in engines:
            part = getattr(whole, name)
            setattr(whole, name, PartCall(part, self._options, name))
        at = [a.index for a in self._arguments if isinstance(args[a.index], torch.Tensor) and not a.weight]
        return lambda *values: whole(*[values[i] for i in at])

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            log.warning("a graph of %d operations runs in torch: %s", len(self._gm.graph.nodes), why)


class _NoEngine(WhetError):
    """A graph, or what is left of it, that torch runs."""


class _Holding:
    """A callable that keeps objects alive."""

    def __init__(self, run: Callable[..., Any], objects: Sequence[Any]):
        self._run, self._objects = run, objects

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


def _get_version(tensor: Any) -> int:
    """A number that changes when a weight is written to."""
    return -1 if tensor.is_inference() else tensor._version


def _read_samples(options: CompileOptions, count: int) -> list[list[Any]] | None:
    if options.calibration is None:
        return None
    samples = [list(s) if isinstance(s, list | tuple) else [s] for s in options.calibration]
    if any(len(s) != count for s in samples):
        raise _NoEngine(f"a calibration sample has not the {count} tensors that the graph takes: a graph break may have split the model")
    return samples


class _Argument:
    """An output that is one of the graph's arguments."""

    def __init__(self, index: int):
        self.index = index


class _Value:
    """An output that is a constant."""

    def __init__(self, value: Any):
        self.value = value


def _find_output_sources(outputs: Sequence[Any], placeholders: Sequence[fx.Node], at: Sequence[int]) -> list[Any]:
    """For each output its number among the engine's, or an argument or constant. Raises WhetError for a computed number."""
    distinct: dict[Any, int] = {}
    sources: list[Any] = []
    for o in outputs:
        if not isinstance(o, fx.Node):
            sources.append(_Value(o))
        elif o in placeholders:
            sources.append(_Argument(at[placeholders.index(o)]))
        elif is_tensor(o) and o.op != "get_attr":
            sources.append(distinct.setdefault(o, len(distinct)))
        else:
            raise _NoEngine(f"the output {o.name} is no computed tensor")
    return sources


class _FlatGraph(torch.nn.Module):
    """A graph whose outputs are the distinct computed tensors alone."""

    def __init__(self, gm: fx.GraphModule, sources: Sequence[Any]):
        super().__init__()
        self.gm = gm
        self._first = [sources.index(k) for k in range(1 + max((s for s in sources if isinstance(s, int)), default=-1))]

    def forward(self, *tensors: Any) -> Any:
        outputs = self.gm(*tensors)
        return tuple(outputs[i] for i in self._first)


class _WholeGraph:
    """One engine for a graph, with the graph itself for tensors that do not fit."""

    def __init__(self, call: EngineCall, at: Sequence[int], sources: Sequence[Any], gm: fx.GraphModule, warn: Callable[[str], None]):
        self._call, self._at, self._sources, self._gm, self._warn = call, list(at), list(sources), gm, warn

    def __call__(self, *args: Any) -> Any:
        tensors = [args[i] for i in self._at]
        signature = self._call.signature(tensors)
        if why := signature.why_unfit:
            self._warn(re.sub(r" Build the engine.*", "", why))
            return self._gm(*args)
        outputs = signature.run(tensors)
        return [outputs[s] if isinstance(s, int) else args[s.index] if isinstance(s, _Argument) else s.value for s in self._sources]


class PartCall(torch.nn.Module):
    """A supported part of a graph: its engine is built at the first call; arguments that do not fit run in torch."""

    def __init__(self, part: fx.GraphModule, options: CompileOptions, name: str):
        super().__init__()
        object.__setattr__(self, "part", part)
        self._options, self._name = options, name
        self._call: EngineCall | None = None
        self._constants: dict[int, Any] = {}
        self._at: list[int] = []
        self._warned: set[str] = set()
        self._failed = False
        self._single = isinstance(next(n for n in part.graph.nodes if n.op == "output").args[0], fx.Node)

    def forward(self, *args: Any) -> Any:
        """The part's outputs."""
        if self._call is None and not self._failed:
            self._build(args)
        if self._call is None:
            return self.part(*args)
        why = next((f"{args[i]} is given where the engine was built for {v}" for i, v in self._constants.items() if args[i] != v), "")
        tensors = [args[i] for i in self._at]
        signature = self._call.signature(tensors)
        if why := why or signature.why_unfit:
            return self._eager(why, args)
        outputs = signature.run(tensors)
        return outputs[0] if self._single else tuple(outputs)

    def _eager(self, why: str, args: Sequence[Any]) -> Any:
        if why not in self._warned:
            self._warned.add(why)
            log.warning("a part of a graph (%s) runs in torch: %s", self._name, why)
        return self.part(*args)

    def _build(self, args: Sequence[Any]) -> None:
        self._at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        self._constants = {i: a for i, a in enumerate(args) if i not in self._at}
        arguments = list_arguments(self.part, args)
        tensors = [args[i] for i in self._at]
        try:
            flat = _FlatPart(self.part, self._constants, len(args))
            self._call = build_call(flat, tensors, list_ranges([arguments[i] for i in self._at], tensors), self._options, name=self._name)
        except UsageError:
            raise
        except WhetError as e:
            if self._options.pass_through_build_failures:
                raise
            self._failed = True
            log.warning("a part of a graph (%s) runs in torch: %s", self._name, e)


class _FlatPart(torch.nn.Module):
    """A part over its tensors, with its other arguments as constants."""

    def __init__(self, part: fx.GraphModule, constants: dict[int, Any], count: int):
        super().__init__()
        self.part = part
        self._constants, self._count = constants, count

    def forward(self, *tensors: Any) -> Any:
        rest = iter(tensors)
        got = self.part(*[self._constants[i] if i in self._constants else next(rest) for i in range(self._count)])
        return (got,) if isinstance(got, torch.Tensor) else tuple(got)
