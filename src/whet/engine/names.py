"""Display names: a layer has the names of the user's nodes that it computes."""

from __future__ import annotations

from collections.abc import Iterator

from whet.network import Layer, Network


def display_names(net: Network) -> dict[str, str]:
    """Layer name -> the name in profiles and layer lists: its source nodes joined by " + ", made unique; the layer's own name if it has none.

    The nodes of a fused layer's root operation come first, the others in execution order.
    """
    taken: set[str] = set()
    names: dict[str, str] = {}
    for layer in net.layers:
        display = _display(layer)
        name, n = display, 1
        while name in taken:
            n += 1
            name = f"{display} ({n})"
        taken.add(name)
        names[layer.name] = name
    return names


def profile_suffix(profile: int) -> str:
    """The suffix of a layer's name in lists of profile `profile`, as in TensorRT: empty for the first."""
    return f" [profile {profile}]" if profile else ""


def _display(layer: Layer) -> str:
    if layer.op == "Reformat":
        return f"Reformat {layer.inputs[0].name if layer.inputs[0] else ''} to {layer.attrs.get('dtype')}:{layer.attrs.get('format')}"
    if not layer.sources:
        return layer.name
    root = find_root(layer)
    first = () if root is None else tuple(s for s in root.sources if s in layer.sources)
    sources = tuple(dict.fromkeys((*first, *layer.sources)))
    if len(sources) > 12:
        return " + ".join(sources[:5]) + f" + ... {len(sources) - 6} more + {sources[-1]}"
    return " + ".join(sources)


def find_root(layer: Layer) -> Layer | None:
    """The root operation of a fused layer: the one that its composite kind names, else its first convolution or matrix product, if any."""
    if layer.op != "Fused":
        return None
    leaves = list(_list_leaves(layer))
    named = (x for x in leaves if x.op == layer.composite)
    heavy = (x for x in leaves if x.op in ("Conv", "ConvTranspose", "Gemm", "MatMul"))
    return next(named, None) or next(heavy, None)


def _list_leaves(layer: Layer) -> Iterator[Layer]:
    for x in layer.regions["body"].layers:
        if x.op == "Fused":
            yield from _list_leaves(x)
        else:
            yield x
