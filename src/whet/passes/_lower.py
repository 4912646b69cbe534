"""The way from a `source` network to a `lowered` one: a clone, and the passes over it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from whet.errors import NetworkError, UsageError
from whet.network import Layer, Network
from whet.passes._driver import PassLog, run_passes, select
from whet.registry import nearest


def lower(
    net: Network,
    *,
    level: int = 3,
    switches: Iterable[str] = (),
    no_fuse: Sequence[str] = (),
    check: bool = False,
    refuses: Callable[[Layer], str | None] | None = None,
    forbids: Callable[[Layer], str | None] | None = None,
    line: int = 1,
) -> tuple[Network, PassLog]:
    """A lowered copy of the `source` network `net` (which stays as it is), and what the passes did.

    `level` is the builderOptimizationLevel, `switches` turn single passes on and off ("-fuse_silu", "none"), `no_fuse` names source
    nodes that stay alone (`*` as a wildcard), `check` verifies after each firing. `refuses(fused layer)` may say why no tactic of
    the machine computes it (its shapes may be symbolic); without it, attention and sums of convolutions stay in pieces, which every
    backend computes.
    `forbids(fused layer)` may say why the user does not want it (--layerPrecisions). `line` is how many bytes of a pixel's channels
    the machine's fast kernels read at once; channels that do not come so are filled (pad_channels).
    Raises UsageError for an unknown pass or node, NetworkError for a network that is lowered already.
    """
    if net.stage != "source":
        raise NetworkError(f"'{net.name}' is lowered already; passes run once, on the network as imported")
    made = net.clone("lowered")
    keep = _keep(made, no_fuse) if no_fuse else None
    useless = refuses or in_pieces
    unwanted = useless if forbids is None else lambda layer: forbids(layer) or useless(layer)
    return made, run_passes(made, select(level, switches), check=check, keep=keep, refuses=unwanted, line=line)


_PIECES = {
    "Attention": "no tactic is known that computes attention at once; its parts run one by one",
    "ConvPool": "no tactic here computes a convolution and its pooling at once",
    "ConvThenPointwise": "no tactic here computes a convolution and the product behind it at once",
    "ConvSum": "no tactic here computes two convolutions and their sum at once",
    "DepthwiseThenPointwise": "no tactic here computes a depthwise convolution and the product behind it at once",
    "DualOutputConv": "no tactic here computes two convolutions of one image at once",
    "HeadConvs": "no tactic here convolves pixels and writes the rows made of them at once",
    "QuantizeThenConv": "no tactic here makes an image's integers and computes a convolution of them at once",
    "ConcatInputConv": "no tactic here convolves two images' joined channels where they lie",
    "Moves": "no tactic here moves numbers and computes with them on the way",
    "PoolChain": "no tactic here computes poolings in a row and joins them at once",
    "PoolGemm": "no tactic here computes global pooling and a product at once",
    "QuantizedSum": "no tactic here computes two quantized convolutions and their sum at once",
    "PointwiseThenConv": "no tactic here computes a 1x1 convolution and the convolution behind it at once",
    "ResizedConv": "no tactic here convolves an enlarged image while it is small",
    "SqueezeExcite": "no tactic here computes squeeze and excitation at once",
    "Rearrange": "no tactic here cuts channels and moves them at once",
    "QuantizedTable": "no tactic here looks up functions of 8-bit integers; they are computed step by step",
}


def in_pieces(layer: Layer, computed: Collection[str] = ()) -> str | None:
    """Why a Fused layer of no backend's tactics stays in pieces; `computed` are composites that the machine has tactics for."""
    return None if layer.composite in computed else _PIECES.get(layer.composite)


def _keep(net: Network, patterns: Sequence[str]):
    """The `keep` of `run_passes` for --noFuse. Raises UsageError for a name that no node has."""
    names = {n for layer in _all_layers(net) for n in (layer.name, *layer.sources)}
    forms = [re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in patterns]
    for pattern, form in zip(patterns, forms, strict=True):
        if not any(form.fullmatch(n) for n in names):
            raise UsageError(f"--noFuse={pattern}: the network has no such node.{nearest(pattern, names)} `*` stands for anything.")

    def keep(layer: Layer) -> str | None:
        found = (n for n in (*layer.sources, layer.name) if any(form.fullmatch(n) for form in forms))
        return next((f"--noFuse names '{n}'" for n in found), None)

    return keep


def _all_layers(net: Network) -> list[Layer]:
    return [x for layer in net.layers for x in (layer, *(y for r in layer.regions.values() for y in _all_layers(r)))]
