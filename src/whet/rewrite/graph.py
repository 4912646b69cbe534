"""What a pass sees of a network: the network, who reads what, and changes whose cost does not grow with its size.

Layers that a pass leaves without readers stay in `net.layers` until `settle()`, which drops them, puts new layers where the old
ones stood and sorts. The driver calls it after each pass (in tests: after each firing).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from whet.network import Dim, Layer, Network, Tensor, Weight, symbols


class Graph:
    """A network being rewritten. Rules may `add` and `constant`; the driver and whole-network passes also `replace` and `bury`.

    `root` is the network whose region `net` is (default: `net` itself): its inputs give symbols their values. `line` is how many bytes of
    a pixel's channels the machine's kernels read at once (1: channels may come in any number).
    """

    _readers: dict[Tensor, dict[Layer, None]]
    _place: dict[Layer, float]
    _added: list[Layer]  # since the last settle()
    _stale: bool

    def __init__(self, net: Network, root: Network | None = None, line: int = 1):
        self.net = net
        self.line = line
        self.root = root if root is not None else net
        self.renew()

    # reading

    @property
    def layers(self) -> list[Layer]:
        """The living layers, in order (new ones at the end until `settle`)."""
        return [x for x in self.net.layers if x in self._place]

    def alive(self, layer: Layer) -> bool:
        return layer in self._place

    def maker(self, t: Tensor | None) -> Layer | None:
        """The layer of this network that makes `t`; None for inputs, constants, absent tensors and what a region captures."""
        if t is None or t.maker is None or t.maker not in self._place:
            return None
        return t.maker

    def readers(self, t: Tensor) -> list[Layer]:
        """The layers that read `t` (each once), captures of their regions included."""
        return list(self._readers.get(t, ()))

    def place(self, layer: Layer) -> float:
        """Where the layer stands in running order."""
        return self._place[layer]

    def is_output(self, t: Tensor) -> bool:
        return any(t is o for o in self.net.outputs)

    def shared(self, t: Tensor, *by: Layer) -> str | None:
        """Why `t` cannot disappear into its readers `by`: it is an output or has other readers; None when it can."""
        if self.is_output(t):
            return f"%{t.name} is an output of the network"
        others = [x for x in self._readers.get(t, ()) if x not in by]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            return f"%{t.name} is also read by '{others[0].name}'{more}"
        if any(t not in x.inputs for x in by):
            return f"%{t.name} is read inside a region"
        return None

    def is_sized(self, dims: Iterable[Dim]) -> bool:
        """Whether the inputs' shapes give all symbols in `dims` (not so for what a Loop carries, or sizes that depend on data)."""
        return set().union(*(symbols(d) for d in dims)) <= self.root.symbols()

    # adding

    def add(self, op: str, *inputs: Tensor | None, **more: Any) -> Any:
        """`Network.add`: adds a layer; returns its output, or a tuple when there are several."""
        start = len(self.net.layers)
        got = self.net.add(op, *inputs, **more)
        for layer in self.net.layers[start:]:
            self._place[layer] = len(self.net.layers)
            self._added.append(layer)
            self._enter(layer)
        return got

    def constant(self, weight: np.ndarray | Weight, name: str) -> Tensor:
        """`Network.constant`: a new constant tensor."""
        return self.net.constant(weight, name)

    # changing

    def replace(self, old: Tensor, new: Tensor, at: float, *, rename: bool = False) -> None:
        """Makes every reader of `old` read `new`. `at` is the place of what made `old`; `rename` hands its name on to `new`.

        An output of the network keeps its name; where `new` cannot take it (an input, a constant, another output), an Identity does.
        """
        if old is new:
            return
        for reader in self._readers.pop(old, {}):
            reader.inputs = tuple(new if t is old else t for t in reader.inputs)
            for region in reader.regions.values():
                region.replace(old, new)
            self._readers.setdefault(new, {})[reader] = None
        if self.is_output(old):
            if self.maker(new) is None or self.is_output(new):
                new = self.add("Identity", new)
                self._place[new.maker] = at  # type: ignore[index]
                copier, maker = new.maker, old.maker
                if copier is not None and maker is not None:
                    copier.sources = maker.sources
                    copier.name, maker.name = maker.name, copier.name
            old.name, new.name = new.name, old.name
            self.net.outputs = [new if t is old else t for t in self.net.outputs]
        elif rename:
            if new.weight is not None and self.net.constants.pop(new.name, None) is not None:
                self.net.constants[old.name] = new
            old.name, new.name = new.name, old.name

    def dying(self, seeds: Iterable[Layer], keep: Iterable[Tensor] = ()) -> list[Layer]:
        """The layers that nothing needs once `seeds` are gone (seeds included), in running order; `keep` tensors stay needed."""
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
        return sorted(gone, key=self._place.__getitem__)

    def bury(self, layers: Iterable[Layer]) -> None:
        """Takes layers out; nothing may read them any more."""
        for layer in layers:
            if layer not in self._place:
                continue
            del self._place[layer]
            self._stale = True
            for t in self.reads(layer):
                readers = self._readers.get(t)
                if readers is not None:
                    readers.pop(layer, None)
                    if not readers:
                        del self._readers[t]
                if t.weight is not None and t not in self._readers and self.net.constants.get(t.name) is t and not self.is_output(t):
                    del self.net.constants[t.name]

    def settle(self) -> None:
        """Drops buried layers, moves new ones to the places of what they replaced, and sorts."""
        if not self._added and not self._stale:
            return
        self.net.layers = sorted((x for x in self.net.layers if x in self._place), key=self._place.__getitem__)
        self.net.sort()
        self._place = {x: i for i, x in enumerate(self.net.layers)}
        self._added, self._stale = [], False

    def move(self, layer: Layer, at: float) -> None:
        """Says where a new layer belongs in running order."""
        self._place[layer] = at

    def renew(self) -> None:
        """Reads the network again, after something else changed it."""
        self._readers, self._place = {}, {}
        self._added, self._stale = [], False
        for i, layer in enumerate(self.net.layers):
            self._place[layer] = i
            self._enter(layer)

    def _enter(self, layer: Layer) -> None:
        for t in self.reads(layer):
            self._readers.setdefault(t, {})[layer] = None

    @staticmethod
    def reads(layer: Layer) -> list[Tensor]:
        """What a layer reads, captures of its regions included."""
        found = [t for t in layer.inputs if t is not None]
        for region in layer.regions.values():
            found += region.captures()
        return found
