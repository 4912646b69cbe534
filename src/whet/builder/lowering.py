"""Lowering the source network by the passes, and finding the pass that changed the result if verification fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np

from whet.backends import Capabilities, get_backend, get_capabilities
from whet.builder.candidates.regions import lift_captures
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import Permissions, explain_missing_float8, make_integer_ban
from whet.builder.verify.differences import compute_relative_error
from whet.composites import why_unfused
from whet.errors import BackendError
from whet.network import BF16, F16, DType, Layer, Network, Tensor
from whet.ops import run_network
from whet.passes import PassLog, lower
from whet.sparsity import TwoFourGuard
from whet.tactics import Tactic, list_tactics


def lower_network(net: Network, config: BuildConfig, watch: Callable[[str, Network], object] | None = None) -> tuple[Network, PassLog]:
    """The network after the passes selected by `config`, and their log. Every output is written by a layer of its own (inputs and repeated
    outputs are copied), and values that regions capture are inputs of their layers. With `config.verify`, 2:4 weights are checked after every
    pass, and the log notes the first one that breaks them. `watch(pass name, network)` is called after each pass that fired."""
    tactics = list_tactics(config.backend)
    permissions = Permissions.of(config)
    permitted = {*permissions.allowed, *(kind for _, kind in permissions.demands)}
    computed = {kind for t in tactics for kind in t.composites}
    guard, broken = TwoFourGuard(net) if config.verify else None, dict[str, str]()  # layer -> sentence

    def check(name: str, changed: Network) -> None:
        if watch is not None:
            watch(name, changed)
        for x in guard.check(changed) if guard is not None else ():
            broken.setdefault(x.layer, f"The pass {name} breaks the 2:4 weights of {x}")

    lowered, log = lower(
        net, level=config.optimization_level, switches=config.passes, no_fuse=config.no_fuse, forbids=make_integer_ban(config),
        refuses=lambda layer: (
            why_unfused(layer, computed) or _keep_unfused(layer, tactics, permitted) or explain_missing_float8(layer, config)
        ),
        channel_alignment=max((t.channel_alignment for t in tactics), default=1), widened=_list_widened_types(config),
        watch=check if watch is not None or (guard is not None and guard.nodes) else None,
    )  # fmt: skip
    left = {x.layer for x in guard.check(lowered)} if guard is not None and broken else set()
    log.notes += [f"{text}: no sparse kernel can run it. --passes=-PASS turns a pass off." for layer, text in broken.items() if layer in left]
    lift_captures(lowered)
    seen: set[Tensor] = set()
    for i, t in enumerate(lowered.outputs):
        repeated = t in seen
        if t.maker is not None and not repeated:
            seen.add(t)
            continue
        copied = lowered.add("Identity", t, name=f"{t.name}_copy")
        lowered.outputs[i] = copied
        seen.add(copied)
        if t.is_constant and not repeated:
            del lowered.constants[t.name]
            copied.name, t.name = t.name, lowered.fresh(f"{t.name}_value")
            lowered.constants[t.name] = t
    return lowered, log


def describe_widening(log: PassLog, config: BuildConfig) -> list[str]:
    """A note if the model has layers in a 16-bit type that the backend cannot compute in."""
    if not log.widened:
        return []
    widened = _list_widened_types(config)
    types, stored = " and ".join(t.name for t in widened), F16.name not in _find_capabilities(config).unsupported_types
    has_hint = F16 in widened and stored and not {"fp16", "best"} & set(config.precisions)
    return [
        f"{log.widened} layers of the model are in 16 bits. {config.backend} has no arithmetic in {types} for all of them: they compute in f32, and "
        f"inputs and outputs are converted.{' --fp16 permits kernels in FP16 where they are faster.' if has_hint else ''}"
    ]


def _list_widened_types(config: BuildConfig) -> list[DType]:
    """The 16-bit float types in which the backend does not compute all layers."""
    capabilities = _find_capabilities(config)
    return [t for t in (F16, BF16) if t.name in capabilities.unsupported_types | capabilities.widened_types]


def _find_capabilities(config: BuildConfig) -> Capabilities:
    """The capabilities of the backend's device, or the general ones if there is no such device here."""
    capabilities = get_capabilities(config.backend)
    if capabilities.executes:
        try:
            capabilities = get_backend(config.backend, threads=config.threads).capabilities
        except BackendError:
            pass
    return capabilities


def _keep_unfused(layer: Layer, tactics: list[Tactic], permitted: Collection[DType]) -> str | None:
    """The reason why all tactics of a composite kind refuse a new fused layer; None if one accepts it or no tactic names the kind."""
    reasons = [t.keeps_unfused(layer, permitted) for t in tactics if layer.composite in t.composites]
    return None if None in reasons else next(iter(reasons), None)


def blame_pass(source: Network, config: BuildConfig, inputs: Mapping[str, np.ndarray], bound: float) -> str:
    """A sentence that names the pass that changes the network's float64 result by more than `bound`; empty if no pass does."""
    with np.errstate(all="ignore"):
        truth = list(run_network(source, inputs, widen=True).values())
        lowered, log = lower_network(source, config)
        if _outputs_agree(lowered, inputs, truth, bound):
            return ""
        for name in (n for n, count in log.counts().items() if count):
            without = dataclasses.replace(config, passes=(*config.passes, f"-{name}"))
            if _outputs_agree(lower_network(source, without)[0], inputs, truth, bound):
                return f" The pass {name} changes the network's result. Build with --passes=-{name}, and please report it."
    return " The graph passes change the network's result, and no single one of them alone. Build with --passes=none, and please report it."


def _outputs_agree(net: Network, inputs: Mapping[str, np.ndarray], truth: list[np.ndarray], bound: float) -> bool:
    got = list(run_network(net, inputs, widen=True).values())
    return all(compute_relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64))[0] <= bound for a, b in zip(got, truth, strict=True))
