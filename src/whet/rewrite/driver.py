"""Runs passes over a network, phase by phase, and keeps what fired and what was skipped and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whet.errors import NetworkError, UsageError
from whet.network import Layer, Network, Tensor, verify
from whet.rewrite.rules import PASSES, Did, Pass, Phase, Skip, ordered
from whet.rewrite.graph import Graph
from whet.registry import nearest

_ROUNDS = 50  # more rounds of one phase than this mean that two passes undo each other
_JOINED = 6  # a name joins at most so many; a longer one is "first...last"
Keep = Callable[[Layer], "str | None"]


@dataclass
class PassLog:
    """What the passes did: (pass, layer, text) of each firing, and the reasons of the skips that still hold at the end."""

    fired: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Firings per pass, in the order of running."""
        found = dict.fromkeys(self.order, 0)
        for name, _, _ in self.fired:
            found[name] = found.get(name, 0) + 1
        return found


def select(level: int = 3, switches: Iterable[str] = ()) -> list[Pass]:
    """Passes for an optimization level and switches (`none`, `all`, `-name`, `+name`), in running order.

    Raises UsageError for an unknown name, with the nearest.
    """
    chosen = {p.name for p in PASSES.values() if p.level <= level}
    for s in switches:
        if s == "none":
            chosen = set()
        elif s == "all":
            chosen = set(PASSES)
        else:
            name = s.lstrip("+-")
            if name not in PASSES:
                raise UsageError(f"there is no pass {name!r}.{nearest(name, PASSES)} `whet passes` lists them.")
            (chosen.discard if s.startswith("-") else chosen.add)(name)
    return [p for p in ordered() if p.name in chosen]


def run_passes(
    net: Network,
    passes: Iterable[Pass] | None = None,
    *,
    check: bool = False,
    keep: Keep | None = None,
    refuses: Keep | None = None,
    line: int = 1,
) -> PassLog:
    """Runs `passes` (default: all of level 3) on `net` in place, and on the regions of its If, Loop and Scan layers.

    `check` verifies after each firing and blames the pass by name. `keep(layer)` may give a reason why a layer must stay alone
    (`--noFuse`), and `refuses(layer)` why a new Fused layer is of no use (no tactic computes it): such a firing is undone and
    recorded as a skip. `line` is how many bytes of a pixel's channels the machine's kernels read at once.
    Raises NetworkError when a pass breaks the network or passes do not come to rest.
    """
    chosen = list(passes) if passes is not None else select()
    log = PassLog(order=[p.name for p in chosen])
    for part in (*_regions(net), net):
        _Run(part, net, log, check, keep, refuses, line).all(chosen)
    return log


def _regions(net: Network) -> list[Network]:
    """The regions of If, Loop and Scan layers, the innermost first."""
    return [x for layer in net.layers if layer.op != "Fused" for r in layer.regions.values() for x in (*_regions(r), r)]


class _Run:
    """One network's way through the passes. `check` is what is verified after a firing: the whole that the network belongs to."""

    def __init__(self, net: Network, root: Network, log: PassLog, check: bool, keep: Keep | None, refuses: Keep | None, line: int):
        self.graph, self.log = Graph(net, root, line), log
        self.check = root if check else None
        self.keep, self.refuses = keep, refuses
        self.skips: dict[tuple[str, Layer | str], str] = {}

    def all(self, chosen: Sequence[Pass]) -> None:
        for phase in sorted({p.phase for p in chosen}):
            group = [p for p in chosen if p.phase is phase]
            for _ in range(_ROUNDS):
                if not any([self.one(p) for p in group]):
                    break
            else:
                raise NetworkError(f"passes of phase {phase.name} do not come to rest: {', '.join(p.name for p in group)}")
        layers = self.graph.net.layers
        names = {x.name for layer in layers for x in (layer, *(y for r in layer.regions.values() for y in r.layers))}
        for (name, where), reason in self.skips.items():
            if where in names or where == "":
                self.log.skipped[name, where] = reason
            elif isinstance(where, Layer) and self.graph.alive(where):
                self.log.skipped[name, where.name] = reason

    def one(self, p: Pass) -> bool:
        """Runs one pass once over the network; whether it fired."""
        before = len(self.log.fired)
        try:
            if p.ops is None:
                self.whole(p)
            else:
                self.rule(p)
            self.graph.settle()
            if self.check is not None and len(self.log.fired) > before:
                verify(self.check)
        except NetworkError as e:
            raise NetworkError(f"pass {p.name}: {e}") from e
        return len(self.log.fired) > before

    def whole(self, p: Pass) -> None:
        for note in p.run(self.graph):
            if isinstance(note, Did):
                self.log.fired.append((p.name, note.layer, note.what))
            else:
                self.skips[p.name, note.layer] = note.reason

    def rule(self, p: Pass) -> None:
        g = self.graph
        ops = p.ops or ()
        limit = 10 * len(g.net.layers) + 1000
        count = 0
        waiting = list(g.net.layers)
        at = 0
        while at < len(waiting):
            layer = waiting[at]
            at += 1
            if not g.alive(layer) or not (ops == ("*",) or layer.op in ops):
                continue
            start = len(g.net.layers)
            got = p.run(g, layer)
            added = g.net.layers[start:]
            if got is not None and not isinstance(got, Skip):
                if not isinstance(got, Mapping):
                    got = dict(zip(layer.outputs, [got] if isinstance(got, Tensor) else got, strict=True))
                got = self.fire(p, layer, got, added)
            elif added:
                raise NetworkError(f"it added layers and then gave up at '{layer.name}'")
            if isinstance(got, Skip):
                self.skips[p.name, layer] = got.reason
                continue
            self.skips.pop((p.name, layer), None)
            if not g.alive(layer):
                count += 1
                if count > limit:
                    raise NetworkError(f"it never comes to rest (last at '{layer.name}')")
                if self.check is not None:
                    g.settle()
                    verify(self.check)
                waiting += [x for x in added if g.alive(x)]

    def fire(self, p: Pass, layer: Layer, instead: Mapping[Tensor, Tensor], added: list[Layer]) -> Skip | None:
        """Puts `instead` in the place of outputs (the layer's, and maybe others'), unless that would take a layer that must stay alone."""
        g, news = self.graph, list(instead.values())
        gone = g.dying(dict.fromkeys([layer, *(t.maker for t in instead if t.maker is not None)]), keep=news)
        if reason := self.objection(p, gone, added):
            g.bury(added)
            return Skip(reason)
        at = g.place(layer)
        for i, x in enumerate(added):
            g.move(x, at - 1e-6 * (len(added) - 1 - i))  # the last one just where the layer stood
        for old, new in instead.items():
            g.replace(old, new, at, rename=new.maker in added or (new.is_constant and not g.readers(new)))
        g.bury(gone)
        g.bury(reversed([x for x in added if not any(g.readers(t) or g.is_output(t) for t in x.outputs)]))
        claimed = {s for x in added for s in x.sources}
        sources = tuple(dict.fromkeys(s for x in gone for s in x.sources if s not in claimed))
        for x in added:
            x.sources = x.sources or sources
        root = next((t.maker for t in news if t.maker in added), None)
        if root is not None:
            root.name, layer.name = (layer.name, root.name) if p.phase is Phase.CLEAN else (self.joined(gone), root.name)
        text = f"{layer.op} -> {', '.join(f'%{t.name}' for t in news)}" + (f" = {root.op}" if root is not None else "")
        self.log.fired.append((p.name, layer.name if root is None else root.name, text))
        return None

    def objection(self, p: Pass, gone: list[Layer], added: list[Layer]) -> str | None:
        """Why a firing is not wanted: it takes a layer that must stay alone, or makes a Fused layer that is of no use."""
        if self.keep is not None and p.phase > Phase.CLEAN and len(gone) > 1:
            reason = next((r for x in gone if (r := self.keep(x))), None)
            if reason:
                return reason
        if self.refuses is not None:
            return next((r for x in added if x.op == "Fused" and (r := self.refuses(x))), None)
        return None

    def joined(self, layers: list[Layer]) -> str:
        """The name of a layer that does the work of several."""
        own = [x.name for x in layers if x.op not in ("QuantizeLinear", "DequantizeLinear")]
        names = own or [x.name for x in layers]  # a layer keeps its name when it is quantized
        if len(names) == 1:
            return names[0]
        parts = [part for name in names for part in name.split(" + ")]
        return self.graph.net.fresh(" + ".join(names) if len(parts) <= _JOINED else f"{parts[0]}...{parts[-1]}")
