"""whet.compile: a torch module as one engine, with the module's own arguments and results."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from whet.errors import UsageError
from whet.torch_compile.build import Ranges, build_call, log
from whet.torch_compile.engine_call import EngineCall
from whet.torch_compile.options import CompileOptions, Input

LARGEST = 4  # max of an unbounded dynamic axis, in multiples of the example's size


def compile(
    module: Any,
    example_inputs: Any = (),
    *,
    kwarg_inputs: Mapping[str, Any] | None = None,
    dynamic_batch: bool | tuple[int, int, int] = False,
    dynamic_shapes: Any = None,
    **options: Any,
) -> CompiledModule:
    """One engine of a torch.nn.Module (torch.export, then ONNX, then a build), as a module with the same arguments and results.

    `example_inputs` are the arguments of module(*example_inputs): a tensor, an `Input`, or a tuple in which tensors may be nested in lists
    and dicts; `kwarg_inputs` those passed by name. Other values (None, bool, int, ...) become constants. Shapes are static unless
    `dynamic_batch` is True, which makes the first axis of every tensor dynamic from 1 to 4 times the example's, or (min, opt, max); or unless
    `dynamic_shapes` is given as torch.export takes it: for each argument {axis: torch.export.Dim("N", min=1, max=64)}. `options` are the
    fields of `CompileOptions`: fp16, int8 with calibration, device, timing_cache, optimization_level, ...

    Arguments that the engine cannot take (another type or device, a shape outside the profile, another constant) run in the original module,
    with one warning per reason in the log "whet.torch_compile". Weights are copied: compile again after changing them. The result computes
    no gradients.

    Raises FrontendError and UnsupportedError, naming the op, if a part cannot be converted: torch.compile(module, backend="whet") runs
    such parts in torch. Raises UsageError for wrong options, and the errors of a build.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"whet.compile takes a torch.nn.Module, not {type(module).__name__}")
    chosen = CompileOptions.of(options)
    arguments = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    device = torch.device(chosen.device) if chosen.device is not None else _find_device(module)
    leaves, spec = pytree.tree_flatten((tuple(arguments), dict(kwarg_inputs or {})))
    given = {i: leaf.ranges() for i, leaf in enumerate(leaves) if isinstance(leaf, Input)}
    leaves = [leaf.example(device) if isinstance(leaf, Input) else leaf for leaf in leaves]
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in at]
    dims = _flatten_dims(module, spec, leaves, dynamic_shapes) if dynamic_shapes is not None else None
    ranges = [_select_ranges(leaves[i], given.get(i), dynamic_batch, dims[i] if dims is not None else None) for i in at]
    flat = _Flat(module, leaves, at, spec)
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        samples = [_sample(s, spec, at) for s in chosen.calibration] if chosen.calibration is not None else None
        call = build_call(flat, tensors, ranges, chosen, dims=[dims[i] for i in at] if dims is not None else None, samples=samples,
                          name=type(module).__name__)  # fmt: skip
    finally:
        for m, training in modes.items():
            m.training = training
    return CompiledModule(module, call, _Signature(spec, leaves, at), flat.results)


def _find_device(module: Any) -> Any:
    found = next((t.device for t in (*module.parameters(), *module.buffers())), None)
    return found if found is not None else torch.device("cpu")


def _select_ranges(tensor: Any, ranges: Ranges | None, dynamic_batch: bool | tuple[int, int, int], dims: Mapping[int, Any] | None) -> Ranges:
    """The dynamic axes of a tensor, by the first of: its Input, the torch.export dims, `dynamic_batch`."""
    if ranges is not None:
        return ranges
    if dims is not None:
        return {axis: _get_range(dim, int(tensor.shape[axis])) for axis, dim in dims.items()}
    if not dynamic_batch or not tensor.ndim:
        return {}
    n = int(tensor.shape[0])
    low, opt, high = dynamic_batch if isinstance(dynamic_batch, tuple) else (1, n, LARGEST * n)
    return {0: (low, opt, high)}


def _get_range(dim: Any, size: int) -> tuple[int, int, int]:
    """(min, opt, max) of a torch.export.Dim, or of a hint such as Dim.AUTO; `size` is the example's."""
    low, high = getattr(dim, "min", None), getattr(dim, "max", None)
    low = int(low) if isinstance(low, int) else 1
    return max(low, 1), size, int(high) if isinstance(high, int) and high < 2**31 else LARGEST * size


def _flatten_dims(module: Any, spec: Any, leaves: Sequence[Any], dynamic_shapes: Any) -> list[dict[int, Any]]:
    """The dynamic axes of each leaf, from torch.export's `dynamic_shapes`: a dict by argument, or a sequence in their order."""
    args, kwargs = pytree.tree_unflatten(list(range(len(leaves))), spec)
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as e:
        raise UsageError(f"whet.compile: the example does not fit {type(module).__name__}.forward: {e}") from e
    by_name = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else dict(zip(bound, dynamic_shapes, strict=False))
    dims: list[dict[int, Any]] = [{} for _ in leaves]
    for name, wanted in by_name.items():
        if name not in bound:
            raise UsageError(f"dynamic_shapes: {type(module).__name__} has no argument {name!r} in the example; it has {', '.join(bound)}")
        _assign(bound[name], wanted, dims, name)
    return dims


def _assign(index: Any, wanted: Any, dims: list[dict[int, Any]], where: str) -> None:
    """Writes the axes of `wanted`, nested as the argument `index` (which holds positions of leaves), into `dims`."""
    if wanted is None:
        return
    if isinstance(index, int):
        axes = wanted if isinstance(wanted, Mapping) else dict(enumerate(wanted))
        dims[index] = {int(k): d for k, d in axes.items() if d is not None and not isinstance(d, int) and str(d) != "_DimHint.STATIC"}
    elif isinstance(index, Mapping) and isinstance(wanted, Mapping):
        for k, w in wanted.items():
            _assign(index[k], w, dims, f"{where}[{k!r}]")
    elif isinstance(index, list | tuple) and isinstance(wanted, list | tuple):
        for i, w in zip(index, wanted, strict=False):
            _assign(i, w, dims, where)
    else:
        raise UsageError(f"dynamic_shapes: the entry of {where} is not nested as the argument")


def _sample(sample: Any, spec: Any, at: Sequence[int]) -> list[Any]:
    """The tensors of one calibration sample: a tensor, a tuple of arguments, or a dict of arguments by name."""
    if isinstance(sample, Mapping):
        args, kwargs = (), dict(sample)
    else:
        args, kwargs = (tuple(sample) if isinstance(sample, list | tuple) else (sample,)), {}
    leaves, found = pytree.tree_flatten((args, kwargs))
    if found != spec:
        raise UsageError("calibration: a sample is not nested as the example inputs: give the same arguments, in tuples")
    return [leaves[i] for i in at]


class _Flat(torch.nn.Module):
    """The module over flat tensors, with the other arguments as constants; returns its distinct result tensors."""

    def __init__(self, module: Any, leaves: Sequence[Any], at: Sequence[int], spec: Any):
        super().__init__()
        self.module = module
        self._leaves, self._at, self._spec = list(leaves), list(at), spec
        self.results = _Results()

    def forward(self, *tensors: Any) -> Any:
        """The distinct tensors among the results; `results` keeps how to rebuild the module's own."""
        leaves = list(self._leaves)
        for i, t in zip(self._at, tensors, strict=True):
            leaves[i] = t
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        flat, spec = pytree.tree_flatten(self.module(*args, **kwargs))
        distinct: list[Any] = []
        sources: list[Any] = []
        for value in flat:
            if not isinstance(value, torch.Tensor):
                if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                    raise NotImplementedError("the module returns a number that depends on a dynamic shape; return tensors only")
                sources.append(_Constant(value))
                continue
            position = next((i for i, t in enumerate(distinct) if t is value), None)
            if position is None:
                position = len(distinct)
                distinct.append(value)
            sources.append(position)
        if not distinct:
            raise NotImplementedError("the module returns no tensor")
        self.results.set(spec, sources)
        return tuple(distinct)


class _Constant:
    """A result that is no tensor."""

    def __init__(self, value: Any):
        self.value = value


class _Results:
    """Rebuilds a module's results from the engine's outputs. An object of its own, because torch.export restores a module's attributes."""

    def __init__(self) -> None:
        self.spec: Any = None
        self.sources: list[Any] = []
        self.one_tensor = False

    def set(self, spec: Any, sources: Sequence[Any]) -> None:
        """Stores the structure of the results, and for each leaf its number among the outputs or a `_Constant`."""
        self.spec, self.sources = spec, list(sources)
        self.one_tensor = spec.is_leaf() and self.sources == [0]

    def of(self, outputs: Sequence[Any]) -> Any:
        """The module's results, nested as the module returns them."""
        if self.one_tensor:
            return outputs[0]
        return pytree.tree_unflatten([s.value if isinstance(s, _Constant) else outputs[s] for s in self.sources], self.spec)


class _Signature:
    """The structure of the arguments, and those that are constants."""

    def __init__(self, spec: Any, leaves: Sequence[Any], at: Sequence[int]):
        self.spec, self.at = spec, list(at)
        self.constants = {i: leaf for i, leaf in enumerate(leaves) if i not in set(at)}
        args, kwargs = pytree.tree_unflatten([None] * len(leaves), spec)
        self._names, self._positional = tuple(kwargs), len(args)
        self._flat = len(args) + len(kwargs) == len(leaves)  # nothing is nested
        self.plain = not kwargs and not self.constants and self._flat  # only positional tensors

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], str]:
        """The tensors among the arguments, and why the arguments do not fit ("" if they do)."""
        if self._flat and len(args) == self._positional and tuple(kwargs) == self._names:
            leaves, spec = [*args, *kwargs.values()], self.spec
        else:
            leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.spec:
            return (), "the arguments are not nested, or not named, as the example inputs"
        for i, constant in self.constants.items():
            if type(leaves[i]) is not type(constant) or leaves[i] != constant:
                return (), f"an argument is {leaves[i]!r}, and the engine was built for {constant!r}"
        tensors = [leaves[i] for i in self.at]
        if not all(isinstance(t, torch.Tensor) for t in tensors):
            return (), "an argument is no tensor, and the example has one there"
        return tensors, ""


class CompiledModule(torch.nn.Module):
    """A module that runs an engine; arguments that do not fit the engine run in the original module.

    `engine` is the whet.runtime.Engine, `plan` its EnginePlan (for whet.write_engine and whet.inspector), `fallbacks` the number of calls that
    the original module ran.
    """

    def __init__(self, module: Any, call: EngineCall, signature: _Signature, results: _Results):
        super().__init__()
        object.__setattr__(self, "original", module)  # not a submodule: train() and to() do not change what the engine computes
        self.engine_call, self._signature, self._results = call, signature, results
        count = len(signature.at) if signature.plain else -1  # of arguments, if all are tensors
        # one attribute for all that a call reads: a module's attributes are slow, as torch.nn.Module has __getattr__
        self._prepared = call, count, results.one_tensor, self._forward_hooks, self._forward_pre_hooks
        self.fallbacks = 0
        self._warned: set[str] = set()
        self.eval()

    @property
    def engine(self) -> Any:
        """The loaded engine."""
        return self.engine_call.engine

    @property
    def plan(self) -> Any:
        """The engine's plan."""
        return self.engine_call.engine.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`. The common case, tensors only and no hooks, comes first: torch's dispatch of hooks takes longer than the rest of a call."""
        call, count, one_tensor, hooks, pre_hooks = self._prepared
        has_hooks = hooks or pre_hooks or modules._global_forward_hooks or modules._global_forward_pre_hooks
        if count == len(args) and not kwargs and not has_hooks:
            latest = call.latest
            if latest.matches(*args):
                outputs = latest.run_matching(args)
                return outputs[0] if one_tensor else self._results.of(outputs)
            try:
                signature = call.signature(args)
            except AttributeError:  # an argument is no tensor
                return self.forward(*args)
            if not signature.why_unfit:
                outputs = signature.run(args)
                return outputs[0] if one_tensor else self._results.of(outputs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results for these arguments."""
        tensors, why = self._signature.tensors(args, kwargs)
        if why:
            return self._eager(why, args, kwargs)
        signature = self.engine_call.signature(tensors)
        if signature.why_unfit:
            return self._eager(signature.why_unfit, args, kwargs)
        return self._results.of(signature.run(tensors))

    def _eager(self, why: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.fallbacks += 1
        if why not in self._warned:
            self._warned.add(why)
            log.warning("%s runs in torch for these arguments: %s", type(self.original).__name__, why)
        return self.original(*args, **kwargs)

    def extra_repr(self) -> str:
        """The original module's name and the engine."""
        return f"{type(self.original).__name__}, {self.engine_call.engine!r}"
