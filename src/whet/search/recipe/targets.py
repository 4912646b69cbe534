"""Targets and selection: missed targets, the Pareto set, and the choice of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.search.recipe.recipe import Target

Row = Mapping[str, Any]
SMALL_DROP = 0.01  # scale of a miss if no drop is allowed: a hundredth of the original's metric


@dataclass(frozen=True)
class Check:
    """One key of the target for one candidate: `miss` is 0 if it is met, else the relative distance; None if it was not measured."""

    name: str
    value: float | None
    limit: float | None
    miss: float | None
    text: str

    @property
    def met(self) -> bool:
        return self.miss == 0


def check_target(target: Target, row: Row, original: Row) -> list[Check]:
    """Target checks of a measured row; `original` is the FP32 row at the same batch."""
    result = []
    ratio = row["latency"]["ratio"]
    if target.latency is not None:
        relative = target.latency.relative
        result.append(_check_at_most("latency", ratio if relative else row["latency"]["median_ms"], target.latency.value, "x" if relative else " ms"))
    if target.throughput is not None:
        relative = target.throughput.relative
        value = 1 / ratio if relative else row["throughput"]
        limit = target.throughput.value
        text = f"throughput {value:.3g}{'x' if relative else '/s'} (at least {limit:g}{'x' if relative else '/s'})"
        result.append(Check("throughput", value, limit, max(0.0, limit / value - 1), text))
    for name, amount, of, unit, scale in (
        ("memory", target.memory, "memory_bytes", " MiB", 2.0**20),
        ("engine_size", target.engine_size, "engine_bytes", " MiB", 2.0**20),
    ):
        if amount is not None:
            most = amount.of(original[of])
            assert most is not None
            result.append(_check_at_most(name.replace("_", " "), row[of] / scale, most / scale, unit))
    for name, amount, of in (("energy", target.energy, "mj"), ("net energy", target.net_energy, "net_mj")):
        if amount is not None:
            mj, limit_mj = row["energy"].get(of), amount.of(original["energy"].get(of))
            if mj is None or limit_mj is None:
                result.append(Check(name, None, limit_mj, None, f"{name} not measurable"))  # the report gives the reason once, next to the table
            else:
                result.append(_check_at_most(name, mj, limit_mj, " mJ"))
    if target.accuracy_drop is not None:
        drop, allowed = row["drop"]["value"], target.accuracy_drop
        scale = allowed or abs(original["metric"]["value"]) * SMALL_DROP or 1.0
        text = f"drop {drop:.3g} (at most {allowed:g})"
        result.append(Check("accuracy drop", drop, allowed, max(0.0, (drop - allowed) / scale) if drop > allowed + 1e-9 else 0.0, text))
    return result


def _check_at_most(name: str, value: float, limit: float, unit: str) -> Check:
    return Check(name, value, limit, max(0.0, value / limit - 1), f"{name} {value:.3g}{unit} (at most {limit:.4g}{unit})")


def are_met(checked: Sequence[Check]) -> bool:
    """True if all targets are met; a target that cannot be measured is not met."""
    return all(c.met for c in checked)


def compute_distance(checked: Sequence[Check]) -> float:
    """Distance from the target: the sum of misses; unmeasured targets count as 0 for all candidates alike."""
    return sum(c.miss or 0.0 for c in checked)


def dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """True if (cost, loss) `a` is at least as good as `b` in both and better in one."""
    return a[0] <= b[0] and a[1] <= b[1] and a != b


def find_pareto_set(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the non-dominated points (cost, loss; lower is better), by ascending cost; the first of equal points."""
    order = sorted(range(len(points)), key=lambda i: (points[i], i))
    front: list[int] = []
    for i in order:
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


@dataclass(frozen=True)
class Measured:
    """A point (cost, loss; lower is better) with the 95 % intervals of both values."""

    point: tuple[float, float]
    cost: tuple[float, float]
    loss: tuple[float, float]

    def clearly_dominates(self, other: Measured) -> bool:
        """True if this point dominates the other, and the intervals of the cost or those of the loss do not overlap."""
        return dominates(self.point, other.point) and (self.cost[1] < other.cost[0] or self.loss[1] < other.loss[0])


def find_measured_pareto_set(points: Sequence[Measured]) -> list[int]:
    """As find_pareto_set, but a point that only noise separates from a better one belongs to the set."""
    order = sorted(range(len(points)), key=lambda i: (points[i].point, i))
    first = [i for n, i in enumerate(order) if not n or points[i].point != points[order[n - 1]].point]
    return [i for i in first if not any(points[k].clearly_dominates(points[i]) for k in first)]


def choose_candidate(candidates: Sequence[tuple[float, float, Sequence[Check]]], prefer: str) -> int:
    """Index of the chosen (cost, loss, checks): the fastest (or most accurate) that meets the target; else the nearest to it."""
    good = [i for i, (_, _, c) in enumerate(candidates) if are_met(c)]
    if good:
        return min(good, key=lambda i: candidates[i][:2] if prefer == "latency" else (candidates[i][1], candidates[i][0]))
    return min(range(len(candidates)), key=lambda i: (compute_distance(candidates[i][2]), candidates[i][0]))
