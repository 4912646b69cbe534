"""Facts about each layer of a plan at given shapes: bytes, operations, time, roofline bound, runner-up, refused candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.engine import display_names
from whet.engine.plan import Choice, EnginePlan
from whet.engine.report import Candidate
from whet.errors import UsageError
from whet.network import DTYPES, Layer, TensorType, evaluate, format_bytes
from whet.ops import bind_layer, bind_symbols
from whet.ops._cost import count_operations
from whet.registry import suggest_name

_LAUNCH_MS = 0.005  # layers up to this time are dominated by thread wake-up and call overhead
_BUSY = 0.35  # fraction of the best rate of this engine: a short layer below it is launch-bound


@dataclass(frozen=True)
class LayerFacts:
    """One layer. `bytes`: memory traffic, weights included. `flops`: a multiply-add counts as two. `ms`: None if the layer was not timed."""

    name: str
    layer: Layer  # static
    choice: Choice
    bytes: int
    weight_bytes: int
    flops: int
    ms: float | None
    bound: str | None = None
    candidates: tuple[Candidate, ...] = field(default=())
    cold_ms: tuple[float | None, ...] = ()  # of the first candidates, with weights out of the L2 cache

    def cold(self, c: Candidate | None) -> float | None:
        """Milliseconds of a candidate with cold weights (outside the L2 cache); None if not measured."""
        return None if c is None else next((ms for mine, ms in zip(self.candidates, self.cold_ms, strict=False) if mine is c), None)

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest timed candidate except the chosen one."""
        others = [c for c in self.candidates if c.ms is not None and not _is_choice(c, self.choice)]
        return min(others, key=lambda c: c.ms or 0.0) if others else None

    @property
    def chosen(self) -> Candidate | None:
        """The selected candidate."""
        return next((c for c in self.candidates if _is_choice(c, self.choice)), None)

    @property
    def refused(self) -> list[Candidate]:
        """Candidates that were not timed, with reasons; tactics without a signature for this layer come last."""
        refused = [c for c in self.candidates if c.ms is None and c.reason and not _is_choice(c, self.choice)]
        return sorted(refused, key=lambda c: not c.signature)


def _is_choice(c: Candidate, choice: Choice) -> bool:
    def show(o: tuple[str, str] | None) -> str:
        return "-" if o is None else f"{o[1]}:{o[0]}"

    signature = f"({','.join(map(show, choice.inputs))})->({','.join(map(show, choice.outputs))})"
    signature += "".join(f" in-place {i}->{o}" for i, o in choice.inplace)
    return (c.tactic, tuple(c.config), c.signature) == (choice.tactic, choice.config, signature)


def get_tuned_shapes(plan: EnginePlan, profile: int = 0) -> dict[str, tuple[int, ...]]:
    """The shapes that a profile's layers are tuned for; a batch of 1 for per-sample engines."""
    given: Mapping[str, tuple] = {}
    if plan.profiles:
        tuned = plan.profiles[profile]
        given = tuned.of_one_sample().shapes if plan.arenas[profile].concurrent_samples else tuned.shapes
    return {
        t.name: tuple(given[t.name][1]) if t.name in given else tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in plan.network.inputs
    }


def layer_facts(plan: EnginePlan, shapes: Mapping[str, tuple[int, ...]] | None = None) -> list[LayerFacts]:
    """Facts in execution order at `shapes` (default: opt shapes of profile 0). In per-sample engines shapes and times are those of one sample."""
    net = plan.network
    env = bind_symbols([(t.name, t.type) for t in net.inputs], shapes or get_tuned_shapes(plan))
    times = plan.report.layer_ms
    candidates = plan.report.candidates
    names = display_names(net)
    rows = []
    for layer in net.layers:
        static, choice = bind_layer(layer, env), plan.choices[layer.name]
        moved, weights = _count_traffic(static, choice, env)
        ms = times.get(layer.name)
        found = tuple(candidates.get(layer.name, ()))
        cold = tuple(plan.report.cold_ms.get(layer.name, ()))
        rows.append(LayerFacts(names[layer.name], static, choice, moved, weights, count_operations(static), ms, None, found, cold))
    return _with_bounds(rows, plan)


def _count_traffic(layer: Layer, choice: Choice, env: Mapping[str, int]) -> tuple[int, int]:
    """(bytes of all operands, bytes of the weights among them). A packed weight counts in the layer's storage type."""
    total = weights = 0
    stored = next((o[1] for o in (*choice.inputs, *choice.outputs) if o is not None), "f32")
    for t, o in (*zip(layer.inputs, choice.inputs, strict=True), *zip(layer.outputs, choice.outputs, strict=True)):
        if t is None:
            continue
        if o is not None:
            n = evaluate(format_bytes(t.type.with_dtype(DTYPES[o[1]]), o[0]), env)
        else:
            storage = DTYPES[stored] if t.dtype.is_float and DTYPES[stored].is_float else t.dtype
            n = evaluate(TensorType(storage, t.shape).nbytes, env)
        total += n
        weights += n if t.is_constant else 0
    return total, weights


def _with_bounds(rows: list[LayerFacts], plan: EnginePlan) -> list[LayerFacts]:
    """Adds each layer's bound (compute, memory or launch) by the machine's peak rates, or by the highest rates among the engine's layers."""
    from dataclasses import replace

    flops, moved, _ = find_rates(rows, plan)
    if flops is None or moved is None:
        return rows
    bounded = []
    for r in rows:
        if not r.ms:
            bounded.append(r)
            continue
        compute, memory = 1e3 * r.flops / flops, 1e3 * r.bytes / moved
        if r.ms <= _LAUNCH_MS and max(compute, memory) < _BUSY * r.ms:
            bound = "launch"
        else:
            bound = "compute" if compute >= memory else "memory"
        bounded.append(replace(r, bound=bound))
    return bounded


def find_rates(rows: list[LayerFacts], plan: EnginePlan) -> tuple[float | None, float | None, str]:
    """(operations a second, bytes a second, their source): the machine's peak rates, else the highest rates among the engine's layers.

    None if no layer was timed and the machine's rates are unknown.
    """
    flops, moved = plan.machine.get("peak_flops_per_s"), plan.machine.get("bytes_per_s")
    if flops and moved:
        return flops, moved, "peak rates of the machine"
    timed = [r for r in rows if r.ms]
    if not timed:
        return flops, moved, "peak rates of the machine"
    flops = flops or max(r.flops / r.ms for r in timed if r.ms) * 1e3 or 1.0
    moved = moved or max(r.bytes / r.ms for r in timed if r.ms) * 1e3 or 1.0
    return flops, moved, "highest rates among the engine's layers"


def find_layer(rows: list[LayerFacts], wanted: str) -> LayerFacts:
    """The layer with a display name, short name (as tables show it), layer name, source node or output of this name.

    Raises UsageError for an unknown name, with the nearest one, and for a short name of several layers.
    """
    from whet.inspector.summary import is_short_name
    for match in (
        lambda r: wanted in (r.name, r.layer.name),
        lambda r: wanted in r.layer.sources,
        lambda r: wanted in {t.name for t in r.layer.outputs},
    ):
        hits = [r for r in rows if match(r)]
        if hits:
            return hits[0]
    hits = [r for r in rows if is_short_name(wanted, r.name)]
    if len(hits) > 1:
        raise UsageError(f"'{wanted}' is short for {len(hits)} layers: {', '.join(r.name for r in hits[:4])}{', ...' if len(hits) > 4 else ''}")
    if hits:
        return hits[0]
    names = {r.name for r in rows} | {r.layer.name for r in rows} | {s for r in rows for s in r.layer.sources}
    raise UsageError(f"the engine has no layer '{wanted}'.{suggest_name(wanted, names)} `whet explain ENGINE` lists them.")
