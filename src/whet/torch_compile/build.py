"""A module over flat tensors -> an engine: torch.export, torch.onnx, the network, its profile, the build."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from whet.builder import BuildConfig, Calibration, build_float8, build_int8
from whet.builder.build import build
from whet.engine.plan import EnginePlan
from whet.errors import UsageError
from whet.frontends.torch import export_program, from_exported
from whet.network import Expr, Network
from whet.torch_compile.engine_call import EngineCall, convert_to_array
from whet.torch_compile.options import CompileOptions

log = logging.getLogger("whet.torch_compile")

Ranges = Mapping[int, tuple[int, int, int]]  # axis -> (min, opt, max)
Profile = tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]


def build_call(
    module: Any,
    tensors: Sequence[Any],
    ranges: Sequence[Ranges],
    options: CompileOptions,
    *,
    dims: Sequence[Mapping[int, Any]] | None = None,
    samples: Sequence[Sequence[Any]] | None = None,
    name: str = "module",
) -> EngineCall:
    """The engine of `module(*tensors) -> tuple of tensors`. `ranges` are the dynamic axes of each tensor, `dims` their torch.export.Dim
    (default: torch finds which are equal), `samples` the tensors of each calibration sample.

    Raises FrontendError and UnsupportedError if torch or whet cannot convert the module, and the errors of a build.
    """
    if not tensors:
        raise UsageError(f"{name} takes no tensors, so there is nothing to bind to an engine")
    net = read_module(module, tensors, ranges, dims)
    plan = build_plan(net, tensors, ranges, options, samples, name)
    return EngineCall(plan)


def read_module(module: Any, tensors: Sequence[Any], ranges: Sequence[Ranges], dims: Sequence[Mapping[int, Any]] | None = None) -> Network:
    """The network of a module over flat tensors; its inputs are in the order of `tensors`. Raises FrontendError, UnsupportedError."""
    if dims is None:
        dims = [dict.fromkeys(r, torch.export.Dim.AUTO) for r in ranges]
    arguments = tuple(_enlarge(t, r) for t, r in zip(tensors, ranges, strict=True))
    program = export_program(module, arguments, (tuple(dict(d) for d in dims),) if any(dims) else None)  # modules here take *tensors
    return from_exported(program)


def _enlarge(tensor: Any, axes: Ranges) -> Any:
    """The tensor with two entries along dynamic axes of one: torch specializes sizes of 0 and 1 to constants."""
    for axis in axes:
        if tensor.shape[axis] == 1:
            tensor = torch.cat([tensor, tensor], axis)
    return tensor


def build_plan(
    net: Network, tensors: Sequence[Any], ranges: Sequence[Ranges], options: CompileOptions, samples: Sequence[Sequence[Any]] | None, name: str
) -> EnginePlan:
    """The engine plan of a network whose inputs are `tensors`."""
    names = [t.name for t in net.inputs]
    config = options.build_config(select_backend(tensors, options), make_profiles(net, tensors, ranges))
    started = perf_counter()
    plan = _build(net, config, options, _make_arrays(names, tensors), [_make_arrays(names, s) for s in samples] if samples is not None else None)
    log.info("%s: built an engine of %d layers in %.1f s", name, len(plan.network.layers), perf_counter() - started)
    for note in plan.report.notes:
        log.info("%s: %s", name, note)
    return plan


def _build(
    net: Network, config: BuildConfig, options: CompileOptions, inputs: dict[str, np.ndarray], samples: list[dict[str, np.ndarray]] | None
) -> EnginePlan:
    builder = next((f for p, f in (("int8", build_int8), ("fp8", build_float8)) if p in config.precisions), None)
    if builder is None:
        return build(net, config, inputs=inputs)
    source = (lambda: iter(samples)) if samples is not None else None
    return builder(net, config, Calibration(samples=source, cache=options.calibration_cache), inputs=inputs)


def _make_arrays(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, np.ndarray]:
    return {n: convert_to_array(t) for n, t in zip(names, tensors, strict=True)}


def select_backend(tensors: Sequence[Any], options: CompileOptions) -> str:
    """The backend for the tensors' device, or for `options.device`. Raises UsageError if they differ, or for several devices."""
    devices = {t.device.type for t in tensors}
    wanted = torch.device(options.device).type if options.device is not None else next(iter(devices))
    if devices != {wanted}:
        raise UsageError(f"the engine is for the device {wanted}, and tensors are on {', '.join(sorted(devices))}: move them to one device")
    if wanted not in ("cpu", "cuda"):
        raise UsageError(f"whet has no backend for torch's device {wanted!r}; it has cpu and cuda")
    return wanted


def make_profiles(net: Network, tensors: Sequence[Any], ranges: Sequence[Ranges]) -> tuple[Profile, ...]:
    """One profile of the network's dynamic inputs; none for a static network."""
    low, opt, high = {}, {}, {}
    for t, tensor, axes in zip(net.inputs, tensors, ranges, strict=True):
        if not any(isinstance(d, Expr) for d in t.shape):
            continue
        dynamic = {i: axes[i] for i, d in enumerate(t.shape) if isinstance(d, Expr)}
        shapes = [tuple(dynamic[i][k] if i in dynamic else int(n) for i, n in enumerate(tensor.shape)) for k in range(3)]
        low[t.name], opt[t.name], high[t.name] = shapes
    return ((low, opt, high),) if low else ()
