"""Lowering: from a `source` network to a `lowered` one, by passes over a copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from whet.composites import why_unfused
from whet.errors import NetworkError, UsageError
from whet.network import DType, Layer, Network
from whet.passes._widen import widen_floats
from whet.registry import suggest_name
from whet.rewrite.driver import PassLog, run_passes, select


def lower(
    net: Network,
    *,
    level: int = 3,
    switches: Iterable[str] = (),
    no_fuse: Sequence[str] = (),
    check: bool = False,
    refuses: Callable[[Layer], str | None] | None = None,
    forbids: Callable[[Layer], str | None] | None = None,
    channel_alignment: int = 1,
    widened: Collection[DType] = (),
    watch: Callable[[str, Network], None] | None = None,
) -> tuple[Network, PassLog]:
    """A lowered copy of the `source` network `net` (which stays unchanged), and the log of the passes.

    `level` is the builderOptimizationLevel. `switches` turn single passes on and off ("-fuse_silu", "none"). `no_fuse` names source nodes
    that must not be fused (`*` is a wildcard). `check` verifies the network after each firing.
    `refuses(fused layer)` may give a reason why no tactic of the machine computes it (its shapes may be symbolic). Without it only composites
    that every backend computes are created. `forbids(fused layer)` may give a reason why the user does not want it (--layerPrecisions).
    `channel_alignment` is the number of bytes of a pixel's channels that the machine's fast kernels read at once; other numbers of channels
    are padded (pad_channels). `widened` are the 16-bit float types that the machine has no arithmetic for: their layers compute in f32.
    `watch(pass name, network)` is called after each pass that fired.
    Raises UsageError for an unknown pass or node, NetworkError for a network that is lowered already.
    """
    if net.stage != "source":
        raise NetworkError(f"'{net.name}' is lowered already; passes run once, on the network as imported")
    lowered, count = widen_floats(net.clone("lowered"), widened)
    keep = _keep(lowered, no_fuse) if no_fuse else None
    useless = refuses or why_unfused
    unwanted = useless if forbids is None else lambda layer: forbids(layer) or useless(layer)
    log = run_passes(
        lowered, select(level, switches), check=check, keep=keep, refuses=unwanted, channel_alignment=channel_alignment,
        watch=None if watch is None else lambda name: watch(name, lowered),
    )  # fmt: skip
    log.widened = count
    return lowered, log


def _keep(net: Network, patterns: Sequence[str]) -> Callable[[Layer], str | None]:
    """The `keep` of `run_passes` for --noFuse. Raises UsageError for a name that no node has."""
    names = {n for layer in _all_layers(net) for n in (layer.name, *layer.sources)}
    expressions = [re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in patterns]
    for pattern, expression in zip(patterns, expressions, strict=True):
        if not any(expression.fullmatch(n) for n in names):
            raise UsageError(f"--noFuse={pattern}: the network has no such node.{suggest_name(pattern, names)} `*` stands for anything.")

    def keep(layer: Layer) -> str | None:
        named = (n for n in (*layer.sources, layer.name) if any(e.fullmatch(n) for e in expressions))
        return next((f"--noFuse names '{n}'" for n in named), None)

    return keep


def _all_layers(net: Network) -> list[Layer]:
    return [x for layer in net.layers for x in (layer, *(y for r in layer.regions.values() for y in _all_layers(r)))]
