"""The network: layers in SSA form between named inputs and outputs.

One class serves two stages. `source` is the model as imported (batch norms, Q/DQ and names intact): pruning, calibration
and `to_torch()` work there. `lowered` is the builder's form, for which tactics are selected: fused, typed, formatted.
A layer has any number of outputs and may hold regions: the branches of If, the body of a Loop, or the body of a fused layer
(fused means a body plus a composite kind, and can always be decomposed).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from whet.errors import NetworkError
from whet.network.dims import Dim
from whet.network.types import TensorType
from whet.network.weight import Origin, Weight

STAGES = ("source", "lowered")


class Tensor:
    """A value: computed by a layer, an input, or constant (`weight` is set).

    `shape_value` holds the elements of a small tensor (flat) as dims if they are known at build time, so that
    Shape -> Gather -> Concat -> Reshape chains fold for dynamic shapes too.
    """

    __slots__ = ("index", "maker", "name", "shape_value", "type", "weight")

    def __init__(self, name: str, type: TensorType, maker: Layer | None = None, index: int = 0, weight: Weight | None = None):
        self.name = name
        self.type = type
        self.maker = maker
        self.index = index
        self.weight = weight
        self.shape_value: tuple[Dim, ...] | None = None
        if weight is not None and weight.type.dtype.numpy in (np.int64, np.int32) and weight.type.rank <= 1 and weight.type.is_static_up_to(64):
            self.shape_value = tuple(int(v) for v in weight.array.reshape(-1))

    @property
    def shape(self):
        return self.type.shape

    @property
    def dtype(self):
        return self.type.dtype

    @property
    def is_constant(self) -> bool:
        return self.weight is not None

    def constant(self) -> Weight:
        """The weight of a constant. Raises NetworkError for a computed tensor."""
        if self.weight is None:
            raise NetworkError(f"%{self.name} is computed at run time; its values are not known before")
        return self.weight

    def array(self) -> np.ndarray:
        """The constant's values (read-only). Raises NetworkError for a computed tensor."""
        return self.constant().array

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


class Layer:
    """One operation: `outputs = op(inputs, **attrs)`. An absent optional input is None.

    `sources` names the originating nodes of the user's model; `regions` holds nested networks (see Network).
    """

    __slots__ = ("attrs", "inputs", "name", "op", "outputs", "regions", "sources")

    def __init__(
        self,
        op: str,
        name: str,
        inputs: Iterable[Tensor | None],
        attrs: Mapping[str, Any] | None = None,
        regions: Mapping[str, Network] | None = None,
        sources: Iterable[str] = (),
    ):
        self.op = op
        self.name = name
        self.inputs: tuple[Tensor | None, ...] = tuple(inputs)
        self.attrs: dict[str, Any] = dict(attrs or {})
        self.regions: dict[str, Network] = dict(regions or {})
        self.sources: tuple[str, ...] = tuple(sources)
        self.outputs: tuple[Tensor, ...] = ()

    @property
    def output(self) -> Tensor:
        """The only output. Raises NetworkError if there are several."""
        if len(self.outputs) != 1:
            raise NetworkError(f"{self.op} '{self.name}' has {len(self.outputs)} outputs, not one")
        return self.outputs[0]

    @property
    def composite(self) -> str:
        """The kind of a fused layer: its root operation ("Conv", "Gemm") or a composite ("ConvPool"); "" for a plain layer."""
        return self.attrs.get("composite", "") if self.op == "Fused" else ""

    def input(self, i: int) -> Tensor | None:
        """Input `i`, or None if it is absent."""
        return self.inputs[i] if i < len(self.inputs) else None

    def needs(self, i: int) -> Tensor:
        """The required input `i`. Raises NetworkError if it is absent."""
        t = self.input(i)
        if t is None:
            raise NetworkError(f"{self.op} '{self.name}' has no input {i}, which it needs")
        return t

    def required_inputs(self) -> tuple[Tensor, ...]:
        """All inputs, of an op without optional ones. Raises NetworkError if one is absent."""
        return tuple(self.needs(i) for i in range(len(self.inputs)))

    def __repr__(self) -> str:
        from whet.network.text import format_layer

        return format_layer(self)


class Network:
    """Layers in execution order between inputs and outputs.

    Build one with `add_input`, `constant`, `add` and `mark_output`. `captures` are tensors of an outer network that a region
    reads (If branches); a fused body has none: everything it reads is an input.
    """

    def __init__(self, name: str = "network", stage: str = "source"):
        if stage not in STAGES:
            raise NetworkError(f"a network's stage is one of {', '.join(STAGES)}, not {stage!r}")
        self.name = name
        self.stage = stage
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.layers: list[Layer] = []
        self.constants: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        self._names: set[str] = set()
        self._counters: dict[str, int] = {}

    def __repr__(self) -> str:
        ins, outs = (", ".join(f"{t.name}: {t.type}" for t in ts) for ts in (self.inputs, self.outputs))
        return f"<Network {self.name!r}, {self.stage}: {len(self.layers)} layers, {ins} -> {outs}; print() shows them>"

    # building

    def add_input(self, name: str, type: TensorType) -> Tensor:
        """A new input. Users refer to its name, so a duplicate raises NetworkError."""
        if name in self._names:
            raise NetworkError(f"the name {name!r} is taken; inputs and outputs need names of their own")
        self._names.add(name)
        t = Tensor(name, type)
        self.inputs.append(t)
        return t

    def constant(self, array: np.ndarray | Weight, name: str = "const") -> Tensor:
        """A constant tensor; a plain array becomes a source weight of that name."""
        name = self.fresh(name)
        weight = array if isinstance(array, Weight) else Weight(np.asarray(array), Origin("source", name))
        t = Tensor(name, weight.type, weight=weight)
        self.constants[name] = t
        return t

    def add(
        self,
        op: str,
        *inputs: Tensor | None,
        name: str = "",
        outputs: Iterable[str] = (),
        regions: Mapping[str, Network] | None = None,
        sources: Iterable[str] = (),
        at: int | None = None,
        **attrs: Any,
    ) -> Any:
        """Adds a layer and infers its types; returns its output, or a tuple of several.

        `outputs` are preferred names; `at` is the index in `layers` (default: the end).
        Raises UnsupportedError for an unknown op, NetworkError for invalid inputs.
        """
        layer = self.add_layer(op, inputs, attrs, name=name, outputs=outputs, regions=regions, sources=sources, at=at)
        return layer.outputs[0] if len(layer.outputs) == 1 else layer.outputs

    def add_layer(self, op, inputs, attrs=None, *, name="", outputs=(), regions=None, sources=(), at=None) -> Layer:
        """As `add`, with inputs and attributes in the form of Layer; returns the layer."""
        from whet.ops import get_op, infer_layer

        wished = list(outputs)
        layer = Layer(op, name or (wished[0] if wished and wished[0] else op.lower()), inputs, attrs, regions, sources)
        if get_op(op).data_sized is not None:  # the symbols of its sizes have its name
            layer.name = self.fresh(layer.name)
            types, shape_values = infer_layer(layer)
        else:
            types, shape_values = infer_layer(layer)
            layer.name = self.fresh(layer.name)
        tensors = []
        for i, type_ in enumerate(types):
            wish = wished[i] if i < len(wished) and wished[i] else (layer.name if len(types) == 1 else f"{layer.name}_{i}")
            out = Tensor(wish if wish == layer.name and i == 0 else self.fresh(wish), type_, layer, i)
            out.shape_value = shape_values[i]
            tensors.append(out)
        layer.outputs = tuple(tensors)
        self.layers.insert(len(self.layers) if at is None else at, layer)
        return layer

    def mark_output(self, t: Tensor, name: str | None = None) -> None:
        """Makes `t` an output; with `name`, renames it (an input or constant gets an Identity of that name)."""
        if name is not None and name != t.name:
            if t.maker is None or any(t is o for o in self.outputs):
                t = self.add("Identity", t, name=name)
            if t.name != name:
                if name in self._names:
                    self._release(name)
                t.name = name
                self._names.add(name)
        self.outputs.append(t)

    def fresh(self, wish: str) -> str:
        """Reserves and returns `wish`, or `wish_1`, `wish_2`, ... if taken."""
        name = wish
        while name in self._names:
            self._counters[wish] = self._counters.get(wish, 0) + 1
            name = f"{wish}_{self._counters[wish]}"
        self._names.add(name)
        return name

    def reserve(self, *names: str) -> None:
        """Keeps `fresh` from returning these names."""
        self._names.update(names)

    def _release(self, name: str) -> None:
        """Renames the tensor called `name`. Raises NetworkError for an input or output."""
        if any(t.name == name for t in (*self.inputs, *self.outputs)):
            raise NetworkError(f"the name {name!r} is taken by an input or output")
        for layer in self.layers:
            for t in layer.outputs:
                if t.name == name:
                    t.name = self.fresh(name + "_inner")
        if name in self.constants:
            t = self.constants.pop(name)
            t.name = self.fresh(name + "_inner")
            self.constants[t.name] = t

    # reading

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor: inputs, constants, then each layer's outputs in order."""
        yield from self.inputs
        yield from self.constants.values()
        for layer in self.layers:
            yield from layer.outputs

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`. Raises NetworkError."""
        for t in self.tensors():
            if t.name == name:
                return t
        raise NetworkError(f"there is no tensor {name!r}")

    def users(self) -> dict[Tensor, list[tuple[Layer, int]]]:
        """Consumers of each tensor, as (layer, input index) pairs. Captures of a region count for the outer layer with index -1."""
        users: dict[Tensor, list[tuple[Layer, int]]] = {}
        for layer in self.layers:
            for i, t in enumerate(layer.inputs):
                if t is not None:
                    users.setdefault(t, []).append((layer, i))
            for region in layer.regions.values():
                for t in region.captures():
                    users.setdefault(t, []).append((layer, -1))
        return users

    def captures(self) -> list[Tensor]:
        """Tensors of the outer network used in this region, in order of first use."""
        own = set(self.tensors())
        captures: dict[Tensor, None] = {}
        for layer in self.layers:
            for t in layer.inputs:
                if t is not None and t not in own:
                    captures.setdefault(t)
            for region in layer.regions.values():
                for t in region.captures():
                    if t not in own:
                        captures.setdefault(t)
        for t in self.outputs:
            if t not in own:
                captures.setdefault(t)
        return list(captures)

    def symbols(self) -> set[str]:
        """Names of the symbols in the inputs' shapes."""
        return set().union(*(t.type.symbols() for t in self.inputs)) if self.inputs else set()

    # changing

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Replaces `old` by `new` in all consumers; an output of the network keeps its name (moved to `new`)."""
        if old is new:
            return
        for layer in self.layers:
            if any(t is old for t in layer.inputs):
                layer.inputs = tuple(new if t is old else t for t in layer.inputs)
            for region in layer.regions.values():
                region.replace(old, new)
        for i, t in enumerate(self.outputs):
            if t is old:
                name = old.name
                if new.maker is None or any(new is o for o in self.outputs) or new in self.inputs:
                    new = self.add("Identity", new, name=name + "_copy")
                old.name = self.fresh(name + "_old")
                new.name = name
                self.outputs[i] = new

    def remove(self, layer: Layer) -> None:
        """Removes `layer`; it must have no consumers (checked by verify())."""
        self.layers.remove(layer)

    def prune_dead(self) -> int:
        """Dead-code elimination of layers and constants; returns the number of removed layers."""
        live: set[Tensor] = set(self.outputs)
        kept: list[Layer] = []
        for layer in reversed(self.layers):
            if any(t in live for t in layer.outputs):
                live.update(t for t in layer.inputs if t is not None)
                for region in layer.regions.values():
                    live.update(region.captures())
                kept.append(layer)
        gone = len(self.layers) - len(kept)
        self.layers = kept[::-1]
        self.constants = {n: t for n, t in self.constants.items() if t in live}
        return gone

    def sort(self) -> None:
        """Sorts the layers topologically (stable).

        Raises NetworkError on a cycle.
        """
        order: list[Layer] = []
        state: dict[int, int] = {}
        position = {id(layer): i for i, layer in enumerate(self.layers)}
        for root in self.layers:
            stack = [(root, 0)]
            while stack:
                layer, phase = stack.pop()
                if phase == 1:
                    state[id(layer)] = 2
                    order.append(layer)
                    continue
                if state.get(id(layer)) == 2:
                    continue
                if state.get(id(layer)) == 1:
                    raise NetworkError(f"layer '{layer.name}' depends on itself")
                state[id(layer)] = 1
                stack.append((layer, 1))
                reads = [t for t in layer.inputs if t is not None]
                for region in layer.regions.values():
                    reads.extend(region.captures())
                for t in reversed(reads):
                    if t.maker is not None and id(t.maker) in position and state.get(id(t.maker)) != 2:
                        stack.append((t.maker, 0))
        self.layers = order

    def clone(self, stage: str | None = None) -> Network:
        """An independent copy (weights are shared: they are immutable)."""
        return copy_into(self, Network(self.name, stage or self.stage), {})

    def to_torch(self, **options: Any) -> Any:
        """This source network as a trainable torch.nn.Module of the same graph (whet.training.NetworkModule documents the `options`).

        Raises BackendError without torch (pip install 'whet[train]'), UnsupportedError naming the layers that cannot be trained.
        """
        from whet.training import to_torch

        return to_torch(self, **options)

    def __str__(self) -> str:
        from whet.network.text import format_network

        return format_network(self)


def copy_into(src: Network, dst: Network, outer: dict[Tensor, Tensor]) -> Network:
    """Copies all of `src` into the empty `dst`; `outer` maps captured tensors to their copies."""
    seen = dict(outer)
    for t in (*src.inputs, *src.constants.values()):
        seen[t] = twin = Tensor(t.name, t.type, weight=t.weight)
        twin.shape_value = t.shape_value
    dst.inputs = [seen[t] for t in src.inputs]
    dst.constants = {t.name: seen[t] for t in src.constants.values()}
    for layer in src.layers:
        regions = {k: copy_into(r, Network(r.name, dst.stage), seen) for k, r in layer.regions.items()}
        new = Layer(layer.op, layer.name, [None if t is None else seen.get(t, t) for t in layer.inputs], layer.attrs, regions, layer.sources)
        outs = []
        for t in layer.outputs:
            seen[t] = twin = Tensor(t.name, t.type, new, t.index)
            twin.shape_value = t.shape_value
            outs.append(twin)
        new.outputs = tuple(outs)
        dst.layers.append(new)
    dst.outputs = [seen.get(t, t) for t in src.outputs]
    dst.metadata = dict(src.metadata)
    dst._names = set(src._names)
    dst._counters = dict(src._counters)
    return dst
