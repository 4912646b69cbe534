"""The part of an engine that runs on the host after its kernels: layers with shapes that depend on the data, and all layers after them.

Their sizes are known only when the kernels have run (the boxes that NonMaxSuppression selects, the indices of NonZero), and an arena needs sizes in
advance. They run with symbols for those sizes, by CPU kernels that are planned at run time or by their NumPy references (whet.tactics.host_layers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.engine.json_data import Reader
from whet.engine.text import read_text
from whet.engine.weights import iterate_constants
from whet.errors import EngineError
from whet.network import Network, TensorType, Weight, format_network
from whet.ops import bind_symbols, run_network
from whet.tactics.host_layers import HostLayers


@dataclass(frozen=True)
class HostTail:
    """`network` reads inputs and outputs of the engine's network, by name. `outputs` are the names of all outputs for the user, in order, each of
    one of the two networks."""

    network: Network
    outputs: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the network and the outputs' names."""
        return hashlib.sha256("\0".join([format_network(self.network), *self.outputs]).encode()).hexdigest()

    def types(self, network: Network) -> dict[str, TensorType]:
        """The types of all outputs; `network` is the engine's."""
        known = {t.name: t.type for t in (*network.outputs, *self.network.outputs)}
        return {n: known[n] for n in self.outputs}

    def run(
        self, network: Network, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], layers: HostLayers
    ) -> dict[str, np.ndarray]:
        """All outputs for the user, from the inputs and outputs of the engine's network. `layers` computes the tail's layers.

        Raises NetworkError for values that a layer refuses, BackendError if a kernel fails.
        """
        env = bind_symbols([(t.name, t.type) for t in network.inputs], {n: np.shape(a) for n, a in inputs.items()})
        values = {**inputs, **outputs}
        values |= run_network(self.network, {t.name: values[t.name] for t in self.network.inputs}, env=env, compute=layers.compute)
        return {n: np.asarray(values[n], order="C") for n in self.outputs}


def check_tail(tail: HostTail, network: Network) -> None:
    """Raises EngineError unless the tail reads only what the engine's network gives, and the two have all outputs."""
    given = {t.name: t.type for t in (*network.inputs, *network.outputs)}
    for t in tail.network.inputs:
        if given.get(t.name) != t.type:
            raise EngineError(f"its layers on the host read '{t.name}' as {t.type}, the engine's network gives {given.get(t.name, 'no such value')}")
    known = {t.name for t in (*network.outputs, *tail.network.outputs)}
    if not set(tail.outputs) <= known or len(set(tail.outputs)) != len(tail.outputs) or not tail.outputs:
        raise EngineError(f"its outputs {', '.join(tail.outputs)} are not outputs of its networks: it is inconsistent")


def to_data(tail: HostTail) -> dict[str, Any]:
    """The section's JSON; its constants are in the index, after those of all other networks."""
    return {"network": format_network(tail.network), "constants": sum(1 for _ in iterate_constants(tail.network)), "outputs": list(tail.outputs)}


def from_data(r: Reader, weights: Sequence[Weight]) -> HostTail:
    """The tail of a file, with `weights` as its constants. Raises EngineError."""
    r.object("network", "constants", "outputs")
    if r["constants"].integer() != len(weights):
        raise EngineError(f"the layers on the host have {r['constants'].value} constants, the index {len(weights)}")
    text = r["network"].text(1 << 26)
    name = text.split(maxsplit=2)[1] if len(text.split(maxsplit=2)) > 2 else ""
    return HostTail(read_text(memoryview(text.encode()), weights, name, {}), tuple(o.text() for o in r["outputs"].rows()))
