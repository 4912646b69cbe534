"""Display names: a layer has the names of the user's nodes that it computes."""

from __future__ import annotations

from whet.network import Layer, Network


def display_names(net: Network) -> dict[str, str]:
    """Layer name -> the name in profiles and layer lists: its source nodes joined by " + ", made unique; the layer's own name if it has none."""
    taken: set[str] = set()
    found: dict[str, str] = {}
    for layer in net.layers:
        display = _display(layer)
        name, n = display, 1
        while name in taken:
            n += 1
            name = f"{display} ({n})"
        taken.add(name)
        found[layer.name] = name
    return found


def profile_suffix(profile: int) -> str:
    """The suffix of a layer's name in lists of profile `profile`, as in TensorRT: empty for the first."""
    return f" [profile {profile}]" if profile else ""


def _display(layer: Layer) -> str:
    if layer.op == "Reformat":
        return f"Reformat {layer.inputs[0].name if layer.inputs[0] else ''} to {layer.attrs.get('dtype')}:{layer.attrs.get('format')}"
    if not layer.sources:
        return layer.name
    if len(layer.sources) > 12:
        return " + ".join(layer.sources[:5]) + f" + ... {len(layer.sources) - 6} more + {layer.sources[-1]}"
    return " + ".join(layer.sources)
