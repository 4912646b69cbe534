"""A network being rewritten: an index of readers and positions, and edits whose cost does not grow with the network.

Removed layers stay in `net.layers` until `commit()`, which drops them, moves new layers to the positions of the layers that they replace and
sorts. The driver commits after each pass (when it verifies: after each firing).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from whet.network import Dim, Layer, Network, Tensor, Weight, find_symbols
from whet.ops import FoldBudget


class Graph:
    """A network being rewritten. Rules may call `add` and `constant`; the driver and whole-network passes also `replace` and `remove`.

    `root` is the network that `net` is a region of (default: `net` itself): its inputs give symbols their values. `channel_alignment` is
    the number of bytes of a pixel's channels that the machine's kernels read at once (1: any number of channels). `budget` limits the
    constants that rules compute; the graphs of a model's regions share it.
    """

    _readers: dict[Tensor, dict[Layer, list[int]]]  # the indices of a reader's inputs; empty for captures of its regions
    _ordered: dict[Tensor, list[tuple[float, int, Layer]]]  # readers by position, since the last commit(); some may be gone
    _position: dict[Layer, float]
    _added: list[Layer]  # since the last commit()
    _stale: bool

    def __init__(self, net: Network, root: Network | None = None, channel_alignment: int = 1, budget: FoldBudget | None = None):
        self.net = net
        self.channel_alignment = channel_alignment
        self.root = root if root is not None else net
        self.budget = budget or FoldBudget.of(self.root)
        self.reindex()

    # queries

    @property
    def layers(self) -> list[Layer]:
        """The layers that were not removed, in order (new ones are last until `commit`)."""
        return [x for x in self.net.layers if x in self._position]

    def alive(self, layer: Layer) -> bool:
        """True if the layer is in the network and was not removed."""
        return layer in self._position

    def maker(self, t: Tensor | None) -> Layer | None:
        """The layer of this network that produces `t`; None for inputs, constants, absent tensors and tensors captured by a region."""
        if t is None or t.maker is None or t.maker not in self._position:
            return None
        return t.maker

    def readers(self, t: Tensor) -> list[Layer]:
        """The layers that read `t` (each once), including by captures of their regions."""
        return list(self._readers.get(t, ()))

    def later_readers(self, t: Tensor, layer: Layer) -> Iterator[Layer]:
        """The layers after `layer` that read `t`, in execution order; without the new ones that have no position yet."""
        if t not in self._ordered:
            self._ordered[t] = sorted((self._position[x], id(x), x) for x in self._readers.get(t, ()))
        ordered = self._ordered[t]
        for k in range(bisect_right(ordered, (self._position[layer], id(layer), layer)), len(ordered)):
            reader = ordered[k][2]
            if reader in self._position and reader in self._readers.get(t, ()):
                yield reader

    def position(self, layer: Layer) -> float:
        """The layer's position in execution order."""
        return self._position[layer]

    def is_output(self, t: Tensor) -> bool:
        """True if `t` is an output of the network."""
        return any(t is o for o in self.net.outputs)

    def escapes(self, t: Tensor, *readers: Layer) -> str | None:
        """Why `t` is needed outside `readers`: it is an output or has other readers. None when only they read it, as direct inputs."""
        if self.is_output(t):
            return f"%{t.name} is an output of the network"
        others = [x for x in self._readers.get(t, ()) if x not in readers]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            return f"%{t.name} is also read by '{others[0].name}'{more}"
        if any(t not in x.inputs for x in readers):
            return f"%{t.name} is read inside a region"
        return None

    def is_sized(self, dims: Iterable[Dim]) -> bool:
        """True if the inputs' shapes determine all symbols in `dims` (values carried by a Loop and data-dependent sizes are not determined)."""
        return set().union(*(find_symbols(d) for d in dims)) <= self.root.symbols()

    # additions

    def add(self, op: str, *inputs: Tensor | None, **more: Any) -> Any:
        """`Network.add`: adds a layer; returns its output, or a tuple when there are several."""
        start = len(self.net.layers)
        outputs = self.net.add(op, *inputs, **more)
        for layer in self.net.layers[start:]:
            self._position[layer] = len(self.net.layers)
            self._added.append(layer)
            self._index(layer)
        return outputs

    def constant(self, weight: np.ndarray | Weight, name: str) -> Tensor:
        """`Network.constant`: a new constant tensor. Raises MemoryLimitError when all new constants together exceed the model's budget."""
        self.budget.spend(weight.array.nbytes if isinstance(weight, Weight) else weight.nbytes)
        return self.net.constant(weight, name)

    # changes

    def replace(self, old: Tensor, new: Tensor, at: float, *, rename: bool = False) -> None:
        """Makes every reader of `old` read `new`. `at` is the position of the maker of `old`; with `rename`, `new` takes the name of `old`.

        An output of the network keeps its name. When `new` cannot take it (an input, a constant, another output), an Identity copies `new`.
        """
        if old is new:
            return
        self._ordered.pop(old, None)
        self._ordered.pop(new, None)
        for reader, slots in self._readers.pop(old, {}).items():
            inputs = list(reader.inputs)
            for i in slots:
                inputs[i] = new
            reader.inputs = tuple(inputs)
            for region in reader.regions.values():
                region.replace(old, new)
            self._readers.setdefault(new, {}).setdefault(reader, []).extend(slots)
        if self.is_output(old):
            if self.maker(new) is None or self.is_output(new):
                copied: Tensor = self.add("Identity", new)
                identity, maker = copied.maker, old.maker
                if identity is not None:
                    self._position[identity] = at
                if identity is not None and maker is not None:
                    identity.sources = maker.sources
                    identity.name, maker.name = maker.name, identity.name
                new = copied
            old.name, new.name = new.name, old.name
            self.net.outputs = [new if t is old else t for t in self.net.outputs]
        elif rename:
            if new.weight is not None and self.net.constants.pop(new.name, None) is not None:
                self.net.constants[old.name] = new
            old.name, new.name = new.name, old.name

    def replace_all(self, replacements: Mapping[Tensor, Tensor]) -> None:
        """`replace` for many tensors that are no outputs of the network, none of which replaces another. A layer that reads many of them gets its
        inputs once."""
        changed: dict[Layer, list[Tensor | None]] = {}
        for old, new in replacements.items():
            self._ordered.pop(old, None)
            self._ordered.pop(new, None)
            for reader, slots in self._readers.pop(old, {}).items():
                inputs = changed.setdefault(reader, [])
                if not inputs:
                    inputs.extend(reader.inputs)
                for i in slots:
                    inputs[i] = new
                for region in reader.regions.values():
                    region.replace(old, new)
                self._readers.setdefault(new, {}).setdefault(reader, []).extend(slots)
        for reader, inputs in changed.items():
            reader.inputs = tuple(inputs)

    def find_dead(self, seeds: Iterable[Layer], keep: Iterable[Tensor] = ()) -> list[Layer]:
        """The layers that are dead once `seeds` are removed (seeds included), in execution order; `keep` tensors stay live."""
        gone = dict.fromkeys(seeds)
        kept = {*self.net.outputs, *keep}
        waiting = list(gone)
        while waiting:
            for t in self.reads(waiting.pop()):
                m = self.maker(t)
                if m is None or m in gone:
                    continue
                if not any(o in kept or any(r not in gone for r in self._readers.get(o, ())) for o in m.outputs):
                    gone[m] = None
                    waiting.append(m)
        return sorted(gone, key=self._position.__getitem__)

    def remove(self, layers: Iterable[Layer]) -> None:
        """Removes layers whose outputs have no readers, and constants that lose their last reader."""
        for layer in layers:
            if layer not in self._position:
                continue
            del self._position[layer]
            self._stale = True
            for t in self.reads(layer):
                readers = self._readers.get(t)
                if readers is not None:
                    readers.pop(layer, None)
                    if not readers:
                        del self._readers[t]
                if t.weight is not None and t not in self._readers and self.net.constants.get(t.name) is t and not self.is_output(t):
                    del self.net.constants[t.name]

    def commit(self) -> None:
        """Drops removed layers, moves new ones to their positions, and sorts."""
        if not self._added and not self._stale:
            return
        self.net.layers = sorted((x for x in self.net.layers if x in self._position), key=self._position.__getitem__)
        self.net.sort()
        self._position = {x: i for i, x in enumerate(self.net.layers)}
        self._added, self._stale, self._ordered = [], False, {}

    def set_position(self, layer: Layer, at: float) -> None:
        """Sets the position of a new layer in execution order."""
        self._position[layer] = at
        for t in self.reads(layer):
            if t in self._ordered:
                insort(self._ordered[t], (at, id(layer), layer))

    def reindex(self) -> None:
        """Rebuilds the index after the network was changed from outside."""
        self._readers, self._position, self._ordered = {}, {}, {}
        self._added, self._stale = [], False
        for i, layer in enumerate(self.net.layers):
            self._position[layer] = i
            self._index(layer)

    def _index(self, layer: Layer) -> None:
        for i, t in enumerate(layer.inputs):
            if t is not None:
                self._readers.setdefault(t, {}).setdefault(layer, []).append(i)
        for region in layer.regions.values():
            for t in region.captures():
                self._readers.setdefault(t, {}).setdefault(layer, [])

    @staticmethod
    def reads(layer: Layer) -> list[Tensor]:
        """The tensors that a layer reads, including captures of its regions."""
        tensors = [t for t in layer.inputs if t is not None]
        for region in layer.regions.values():
            tensors += region.captures()
        return tensors
