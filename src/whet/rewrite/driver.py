"""Runs passes over a network, phase by phase, and logs which fired, and which were skipped and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whet.errors import MemoryLimitError, NetworkError, UsageError
from whet.network import Layer, Network, Tensor, verify
from whet.ops import FoldBudget
from whet.registry import suggest_name
from whet.rewrite.graph import Graph
from whet.rewrite.rules import PASSES, Fired, Pass, Phase, Skip, order_passes

_MAX_ROUNDS = 50  # more rounds of one phase mean that two passes undo each other
_MAX_NAME_PARTS = 6  # a name with more parts is abbreviated to "first...last"
Objection = Callable[[Layer], "str | None"]


@dataclass
class PassLog:
    """(pass, layer, text) of each firing, the reasons of the skips that still hold at the end, by (pass, layer), and the number of layers
    that compute in f32 because the backend has no arithmetic for their 16-bit type."""

    fired: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    widened: int = 0
    notes: list[str] = field(default_factory=list)  # what a user should know about the passes

    def counts(self) -> dict[str, int]:
        """Firings per pass, in execution order."""
        counts = dict.fromkeys(self.order, 0)
        for name, _, _ in self.fired:
            counts[name] = counts.get(name, 0) + 1
        return counts


def select(level: int = 3, switches: Iterable[str] = ()) -> list[Pass]:
    """Passes for an optimization level and switches (`none`, `all`, `-name`, `+name`), in execution order.

    Raises UsageError for an unknown name and suggests the nearest one.
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
                raise UsageError(f"there is no pass {name!r}.{suggest_name(name, PASSES)} `whet passes` lists them.")
            (chosen.discard if s.startswith("-") else chosen.add)(name)
    return [p for p in order_passes() if p.name in chosen]


def run_passes(
    net: Network,
    passes: Iterable[Pass] | None = None,
    *,
    check: bool = False,
    keep: Objection | None = None,
    refuses: Objection | None = None,
    channel_alignment: int = 1,
    watch: Callable[[str], None] | None = None,
) -> PassLog:
    """Runs `passes` (default: all of level 3) on `net` in place, and on the regions of its If, Loop and Scan layers.

    `check` verifies the network after each firing and names the pass in the error. `keep(layer)` may give a reason why a layer must not be
    fused (`--noFuse`), and `refuses(layer)` why a new fused layer is useless (no tactic computes it): such a firing is undone and recorded
    as a skip. `channel_alignment` is the number of bytes of a pixel's channels that the machine's kernels read at once. `watch(pass name)` is
    called after each pass that fired.
    Raises NetworkError when a pass breaks the network or passes do not converge, MemoryLimitError for constants beyond the model's budget.
    """
    chosen = list(passes) if passes is not None else select()
    log = PassLog(order=[p.name for p in chosen])
    budget = FoldBudget.of(net)
    for part in (*_list_regions(net), net):
        _Run(part, net, log, check, keep, refuses, channel_alignment, budget, watch).run_phases(chosen)
    return log


def _list_regions(net: Network) -> list[Network]:
    """The regions of If, Loop and Scan layers, innermost first."""
    return [x for layer in net.layers if layer.op != "Fused" for r in layer.regions.values() for x in (*_list_regions(r), r)]


class _Run:
    """Applies passes to one network or region. `check` is the network that is verified after a firing: the root of the region."""

    def __init__(
        self, net: Network, root: Network, log: PassLog, check: bool, keep: Objection | None, refuses: Objection | None, channel_alignment: int,
        budget: FoldBudget, watch: Callable[[str], None] | None = None,
    ):  # fmt: skip
        self.graph, self.log = Graph(net, root, channel_alignment, budget), log
        self.check = root if check else None
        self.keep, self.refuses, self.watch = keep, refuses, watch
        self.skips: dict[tuple[str, Layer | str], str] = {}

    def run_phases(self, chosen: Sequence[Pass]) -> None:
        for phase in sorted({p.phase for p in chosen}):
            group = [p for p in chosen if p.phase is phase]
            for _ in range(_MAX_ROUNDS):
                if not any([self.run_pass(p) for p in group]):
                    break
            else:
                raise NetworkError(f"passes of phase {phase.name} do not converge: {', '.join(p.name for p in group)}")
        layers = self.graph.net.layers
        names = {x.name for layer in layers for x in (layer, *(y for r in layer.regions.values() for y in r.layers))}
        for (name, where), reason in self.skips.items():
            if where in names or where == "":
                self.log.skipped[name, where] = reason
            elif isinstance(where, Layer) and self.graph.alive(where):
                self.log.skipped[name, where.name] = reason

    def run_pass(self, p: Pass) -> bool:
        """Runs one pass once over the network. Returns True if it fired."""
        before = len(self.log.fired)
        try:
            if p.ops is None:
                self.run_network_pass(p)
            else:
                self.run_rule(p)
            self.graph.commit()
            if self.check is not None and len(self.log.fired) > before:
                verify(self.check)
        except NetworkError as e:
            raise NetworkError(f"pass {p.name}: {e}") from e
        except MemoryError as e:
            raise MemoryLimitError(f"pass {p.name} needs more memory than this machine has: {e or 'MemoryError'}. Lower the shapes.") from e
        fired = len(self.log.fired) > before
        if fired and self.watch is not None:
            self.watch(p.name)
        return fired

    def run_network_pass(self, p: Pass) -> None:
        for note in p.run(self.graph):
            if isinstance(note, Fired):
                self.log.fired.append((p.name, note.layer, note.what))
            else:
                self.skips[p.name, note.layer] = note.reason

    def run_rule(self, p: Pass) -> None:
        """Offers each layer to the rule, including the layers that its firings add."""
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
            answer = p.run(g, layer)
            added = g.net.layers[start:]
            if answer is not None and not isinstance(answer, Skip):
                if not isinstance(answer, Mapping):
                    answer = dict(zip(layer.outputs, [answer] if isinstance(answer, Tensor) else answer, strict=True))
                answer = self.fire(p, layer, answer, added)
            elif added:
                raise NetworkError(f"it added layers but returned no replacement for '{layer.name}'")
            if isinstance(answer, Skip):
                self.skips[p.name, layer] = answer.reason
                continue
            self.skips.pop((p.name, layer), None)
            if not g.alive(layer):
                count += 1
                if count > limit:
                    raise NetworkError(f"it does not converge (last at '{layer.name}')")
                if self.check is not None:
                    g.commit()
                    verify(self.check)
                waiting += [x for x in added if g.alive(x)]

    def fire(self, p: Pass, layer: Layer, replacement: Mapping[Tensor, Tensor], added: list[Layer]) -> Skip | None:
        """Replaces the old tensors (outputs of the layer, and possibly of others) by the new ones, unless a layer must not be fused."""
        g, news = self.graph, list(replacement.values())
        removed = g.find_dead(dict.fromkeys([layer, *(t.maker for t in replacement if t.maker is not None)]), keep=news)
        if reason := self.find_objection(p, removed, added):
            g.remove(added)
            return Skip(reason)
        at = g.position(layer)
        for i, x in enumerate(added):
            g.set_position(x, at - 1e-6 * (len(added) - 1 - i))  # the last one takes the position of the replaced layer
        for old, new in replacement.items():
            g.replace(old, new, at, rename=new.maker in added or (new.is_constant and not g.readers(new)))
        g.remove(removed)
        g.remove(reversed([x for x in added if not any(g.readers(t) or g.is_output(t) for t in x.outputs)]))
        self.pass_on_sources(removed, added)
        root = next((t.maker for t in news if t.maker in added), None)
        if root is not None:
            root.name, layer.name = (layer.name, root.name) if p.phase is Phase.CLEAN else (self.join_names(removed), root.name)
        text = f"{layer.op} -> {', '.join(f'%{t.name}' for t in news)}" + (f" = {root.op}" if root is not None else "")
        self.log.fired.append((p.name, layer.name if root is None else root.name, text))
        return None

    @staticmethod
    def pass_on_sources(removed: list[Layer], added: list[Layer]) -> None:
        """Gives the added layers the source nodes of the removed ones.

        Where a rewrite moves Q/DQ past another layer, each kind keeps its own nodes: else the next layer, which absorbs the Q/DQ, would claim to
        compute the layer that it was moved past.
        """
        claimed = {s for x in added for s in x.sources}

        def unclaimed(layers: list[Layer]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(s for x in layers for s in x.sources if s not in claimed))

        if {_is_rounding(x) for x in added} == {_is_rounding(x) for x in removed} == {True, False}:
            for kind in (True, False):
                sources = unclaimed([x for x in removed if _is_rounding(x) is kind])
                for x in added:
                    if _is_rounding(x) is kind:
                        x.sources = x.sources or sources
            return
        sources = unclaimed(removed)
        for x in added:
            x.sources = x.sources or sources

    def find_objection(self, p: Pass, removed: list[Layer], added: list[Layer]) -> str | None:
        """Why a firing is undone: it removes a layer that must not be fused, or adds a fused layer that no tactic computes."""
        if self.keep is not None and p.phase > Phase.CLEAN and len(removed) > 1:
            reason = next((r for x in removed if (r := self.keep(x))), None)
            if reason:
                return reason
        if self.refuses is not None:
            return next((r for x in added if x.op == "Fused" and (r := self.refuses(x))), None)
        return None

    def join_names(self, layers: list[Layer]) -> str:
        """The name of a layer that replaces several. Q/DQ layers do not contribute, so that a layer keeps its name when it is quantized."""
        names = [x.name for x in layers if not _is_rounding(x)] or [x.name for x in layers]
        if len(names) == 1:
            return names[0]
        parts = [part for name in names for part in name.split(" + ")]
        return self.graph.net.fresh(" + ".join(names) if len(parts) <= _MAX_NAME_PARTS else f"{parts[0]}...{parts[-1]}")


def _is_rounding(layer: Layer) -> bool:
    """True for Q/DQ layers."""
    return layer.op in ("QuantizeLinear", "DequantizeLinear")
