"""Splits a network at its first layers with sizes that depend on the data: the engine computes the layers before them, the host the rest."""

from __future__ import annotations

from collections import Counter

from whet.engine.host_tail import HostTail
from whet.network import Layer, Network, Tensor
from whet.ops import is_data_sized

_HEAVY = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "RNN"})


def split_host_tail(net: Network) -> tuple[Network, HostTail | None]:
    """The network without the layers that run on the host, and those; (net, None) if every size is known in advance."""
    names = _find_host_layers(net)
    if not names:
        return net, None
    main, rest = net.clone(), net.clone("lowered")
    rest.name = "host"
    rest.layers = [x for x in rest.layers if x.name in names]
    computed = {t for x in rest.layers for t in x.outputs}
    read = {t.name: t for x in rest.layers for t in (*x.inputs, *(c for r in x.regions.values() for c in r.captures())) if t is not None}
    rest.inputs = []
    for t in read.values():
        if t not in computed and not t.is_constant:
            rest.replace(t, given := Tensor(t.name, t.type))
            given.shape_value = t.shape_value
            rest.inputs.append(given)
    rest.outputs = [t for t in rest.outputs if t in computed]
    rest.prune_dead()
    outputs, on_host = tuple(t.name for t in net.outputs), {t.name for t in rest.outputs}
    main.layers = [x for x in main.layers if x.name not in names]
    main.outputs = [t for t in main.outputs if t.name not in on_host]
    inputs = {t.name for t in main.inputs}
    wanted = {t.name for t in rest.inputs} - inputs - {t.name for t in main.outputs}
    main.outputs += [t for t in main.tensors() if t.name in wanted]
    if not main.outputs:  # everything runs on the host
        main.mark_output(main.add("Identity", main.inputs[0], name="unused"))
    main.prune_dead()
    return main, HostTail(rest, outputs)


def describe_host_tail(tail: HostTail) -> str:
    """The note of a build about the layers on the host."""
    counts = Counter(x.op for x in tail.network.layers)
    sized = [x for x in tail.network.layers if _is_data_sized(x)]
    heavy = sorted(op for op in counts if op in _HEAVY)
    slow = f" {', '.join(heavy)} among them run unfused, with kernels that are not timed." if heavy else ""
    return (
        f"'{sized[0].name}' ({sized[0].op}) has a size that depends on the data: it and the layers that depend on it ({sum(counts.values())} in all) "
        f"run on the host after the engine's kernels, and the engine's times are without them.{slow}"
    )


def _find_host_layers(net: Network) -> set[str]:
    """Names of the layers with sizes that depend on the data, and of all that depend on them."""
    found: set[Layer] = set()
    for layer in net.layers:
        reads = [*layer.inputs, *(t for r in layer.regions.values() for t in r.captures())]
        if _is_data_sized(layer) or any(t is not None and t.maker in found for t in reads):
            found.add(layer)
    return {x.name for x in found}


def _is_data_sized(layer: Layer) -> bool:
    return is_data_sized(layer) or any(_is_data_sized(x) for r in layer.regions.values() for x in r.layers)
