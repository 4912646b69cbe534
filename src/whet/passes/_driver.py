"""Runs passes over a network, phase by phase, and keeps what fired and what was skipped and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from whet.errors import NetworkError, UsageError
from whet.network import Layer, Network, Tensor, verify
from whet.passes._base import PASSES, Did, Pass, Skip, ordered
from whet.registry import nearest

_ROUNDS = 50  # more rounds of one phase than this mean that two passes undo each other


@dataclass
class PassLog:
    """What the passes did: (pass, layer, text) of each firing, and the skips of the final state."""

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
    keep: Callable[[Layer], str | None] | None = None,
) -> PassLog:
    """Runs `passes` (default: all of level 3) on `net` in place.

    `check` verifies after each firing and blames the pass by name. `keep(layer)` may give a reason why a layer must not be
    fused or rewritten (`--noFuse`), which is recorded as a skip.
    """
    chosen = list(passes) if passes is not None else select()
    log = PassLog(order=[p.name for p in chosen])
    for phase in sorted({p.phase for p in chosen}):
        group = [p for p in chosen if p.phase is phase]
        for _ in range(_ROUNDS):
            if not any([_run_one(net, p, log, check, keep) for p in group]):
                break
        else:
            raise NetworkError(f"passes of phase {phase.name} do not come to rest: {', '.join(p.name for p in group)}")
    return log


def _run_one(net: Network, p: Pass, log: PassLog, check: bool, keep) -> bool:
    before = len(log.fired)
    try:
        if p.ops is None:
            for note in p.run(net):
                if isinstance(note, Did):
                    log.fired.append((p.name, note.layer, note.what))
                else:
                    log.skipped[p.name, note.layer] = note.reason
            if len(log.fired) > before:
                net.sort()
        else:
            _run_rule(net, p, log, keep)
        if check and len(log.fired) > before:
            verify(net)
    except NetworkError as e:
        raise NetworkError(f"pass {p.name}: {e}") from e
    return len(log.fired) > before


def _run_rule(net: Network, p: Pass, log: PassLog, keep) -> None:
    for layer in list(net.layers):
        if not ((layer.op in p.ops) or (layer.op == "Fused" and layer.attrs["hint"] in p.ops)):
            continue
        if not any(layer is x for x in net.layers):
            continue  # went with an earlier firing
        if keep is not None and (reason := keep(layer)):
            log.skipped[p.name, layer.name] = reason
            continue
        start = len(net.layers)
        got = p.run(net, layer)
        if got is None or isinstance(got, Skip):
            if len(net.layers) != start:
                raise NetworkError(f"pass {p.name} added layers and then gave up at '{layer.name}'")
            if isinstance(got, Skip):
                log.skipped[p.name, layer.name] = got.reason
            continue
        news = [got] if isinstance(got, Tensor) else list(got)
        added = net.layers[start:]
        before = net.layers[:start]
        for old, new in zip(layer.outputs, news, strict=True):
            net.replace(old, new)
        log.skipped.pop((p.name, layer.name), None)
        log.fired.append((p.name, layer.name, f"{layer.op} -> {', '.join('%' + t.name for t in news)}"))
        net.prune_dead()
        # What dies with the layer lives on in what was added: the profile speaks the user's names.
        dead = [x for x in before if not any(x is y for y in net.layers)]
        sources = tuple(dict.fromkeys(s for x in dead for s in x.sources))
        for x in added:
            x.sources = x.sources or sources
        net.sort()

