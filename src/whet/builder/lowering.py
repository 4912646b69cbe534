"""From the source network to the lowered one that is built, and which pass is to blame when the two do not agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from whet.builder.candidates.regions import lift_captures
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import Permissions, no_float8, unwanted_integers
from whet.builder.verify.differences import relative_error
from whet.composites import unsupported_reason
from whet.network import DType, Layer, Network
from whet.ops import run_network
from whet.passes import PassLog, lower
from whet.tactics import Tactic, tactics_of


def lowered_network(net: Network, config: BuildConfig) -> tuple[Network, PassLog]:
    """The network after the passes that `config` asks for. Its outputs are made by layers: one that is an input is copied. What regions
    read of the network around them is an input of their layers."""
    tactics = tactics_of(config.backend)
    permissions = Permissions.of(config)
    permitted = {*permissions.allowed, *(kind for _, kind in permissions.demands)}
    computed = {kind for t in tactics for kind in t.composites}
    made, log = lower(
        net, level=config.optimization_level, switches=config.passes, no_fuse=config.no_fuse, forbids=unwanted_integers(config),
        refuses=lambda layer: unsupported_reason(layer, computed) or _keep_unfused(layer, tactics, permitted) or no_float8(layer, config),
        channel_alignment=max((t.channel_alignment for t in tactics), default=1),
    )  # fmt: skip
    lift_captures(made)
    for i, t in enumerate(made.outputs):
        twice = any(t is o for o in made.outputs[:i])
        if t.maker is not None and not twice:
            continue
        copied = made.add("Identity", t, name=f"{t.name}_copy")
        made.outputs[i] = copied
        if t.is_constant and not twice:
            del made.constants[t.name]
            copied.name, t.name = t.name, made.fresh(f"{t.name}_value")
            made.constants[t.name] = t
    return made, log


def _keep_unfused(layer: Layer, tactics: list[Tactic], permitted: Collection[DType]) -> str | None:
    """Why no tactic of this composite kind would compute a new fused layer; None when one would, or when no tactic names the kind."""
    reasons = [t.keeps_unfused(layer, permitted) for t in tactics if layer.composite in t.composites]
    return None if None in reasons else next(iter(reasons), None)


def blame_pass(source: Network, config: BuildConfig, inputs: Mapping[str, np.ndarray], bound: float) -> str:
    """One sentence on how the passes change what the network computes (in float64, beyond `bound`): which of them does. "" where none does."""
    with np.errstate(all="ignore"):
        truth = list(run_network(source, inputs, widen=True).values())
        made, log = lowered_network(source, config)
        if _agree(made, inputs, truth, bound):
            return ""
        for name in (n for n, count in log.counts().items() if count):
            without = dataclasses.replace(config, passes=(*config.passes, f"-{name}"))
            if _agree(lowered_network(source, without)[0], inputs, truth, bound):
                return f" The pass {name} changes the network's result. Build with --passes=-{name}, and please report it."
    return " The graph passes change the network's result, and no single one of them alone. Build with --passes=none, and please report it."


def _agree(net: Network, inputs: Mapping[str, np.ndarray], truth: list[np.ndarray], bound: float) -> bool:
    got = list(run_network(net, inputs, widen=True).values())
    return all(relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64))[0] <= bound for a, b in zip(got, truth, strict=True))
