"""New weights in a built engine: constants are computed again from their origins; passes, formats and tactics stay, and nothing is timed.

A source weight is refittable if constants of the engine are expressions over it. Others were used for their values when the engine was built
(a bound that became an attribute, a factor of one that was removed, a duplicate), so that another value needs another build.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from whet.engine import EnginePlan, engine_bytes, make_probe, probe_differs, probe_inputs, probe_shapes, read_engine
from whet.engine.weights import iterate_constants
from whet.errors import EngineError, NetworkError
from whet.network import Network, Origin, Tensor, TensorType, Weight, get_dtype
from whet.ops import evaluate_origin, run_network
from whet.runtime.engine import Engine, Runtime

_RTOL = 1e-3  # of outputs, for engines that were built without verification


def list_refittable_weights(plan: EnginePlan) -> dict[str, TensorType | None]:
    """Source weights that constants are computed from, with their types; None for the type of one whose values the engine file does not have."""
    return {name: None if a is None else Weight(a).type for name, a in _collect_sources(plan).items()}


def list_missing_weights(plan: EnginePlan, names: Iterable[str]) -> list[str]:
    """Source weights that must be given too: a constant is computed from them and from a given one, and the engine file does not have them."""
    known, new = _collect_sources(plan), set(names)
    needed = {name for t in _iterate_constants(plan) if new & (own := _list_names(t)) for name in own}
    return sorted(name for name in needed - new if known[name] is None)


def read_refittable_weights(engine: Engine, network: Network) -> dict[str, np.ndarray]:
    """The values of the engine's refittable weights in a source network of the same structure. Raises EngineError for a missing one."""
    wanted = list_refittable_weights(engine.plan)
    if lacking := sorted(set(wanted) - set(network.constants)):
        raise EngineError(f"refit: the model has no weight {lacking[0]!r}, from which the engine was built. Build a new engine from it.")
    if [t.name for t in network.inputs] != list(engine.inputs) or [t.name for t in network.outputs] != list(engine.outputs):
        raise EngineError(
            f"refit: the model's inputs and outputs are {[t.name for t in network.inputs]} and {[t.name for t in network.outputs]}, the engine's "
            f"{list(engine.inputs)} and {list(engine.outputs)}. Build a new engine from it."
        )
    return {name: network.constants[name].array() for name in wanted}


def refit(engine: Engine, weights: Mapping[str, np.ndarray], *, like: Network | None = None) -> Engine:
    """A new engine with other values of source weights, by name; the given one is not changed.

    `like` is a source network with these weights: the new engine must compute what it computes, on the probe's inputs and within its bound. That
    finds differences of structure, and of weights whose old values the build has used.

    The kernels are those of `engine`: nothing is timed, and no layer becomes slower. Raises EngineError for a name that is not refittable, a wrong
    shape or type, a missing weight, values that break an assumption of the build (two weights that were equal, channels that were zero), and
    values that a selected kernel cannot use (a 2:4 kernel and weights that are not 2:4).
    """
    plan, sources = engine.plan, _collect_sources(engine.plan)
    for name, a in weights.items():
        _check_weight(name, np.asarray(a), sources, plan)
    if lacking := list_missing_weights(plan, weights):
        raise EngineError(f"refit: give also {', '.join(lacking)}: constants are computed from them too, and the engine has no values of them")
    values = {n: a for n, a in sources.items() if a is not None} | {n: np.asarray(a) for n, a in weights.items()}
    made = read_engine(engine_bytes(plan, packed_weights={}))
    made.source_weights = {n: values.get(n, a) for n, a in made.source_weights.items()}
    made.quantized_weights = [Weight(evaluate_origin(w.origin, values), w.origin) if set(w.origin.sources()) & set(weights) else w
                              for w in made.quantized_weights]  # fmt: skip
    done: dict[int, Weight] = {}
    for t in _iterate_constants(made):
        if _list_names(t) & set(weights):
            w = t.constant()
            if id(w) not in done:
                done[id(w)] = _recompute(t, w, values)
            t.weight = done[id(w)]
    made.probe = {}
    for part in made.others:
        part.probe = {}
    return _reopen(engine, made, like)


def _reopen(engine: Engine, plan: EnginePlan, like: Network | None) -> Engine:
    """The engine of the refitted plan on the same backend, with new probes. Raises EngineError if a kernel cannot use the new weights."""
    opened = Runtime(engine.backend).load(plan)
    for k in range(max(len(plan.profiles), 1)):
        with opened.create_context(k) as context:
            part, number = plan.part(k)
            shapes = probe_shapes(dataclasses.replace(part, profiles=part.profiles[number : number + 1]))
            inputs = probe_inputs(part.network, 0, shapes)
            outputs = context.run(inputs)
        old = engine.plan.by_profile()[k if plan.others else 0].probe
        if like is not None and k == 0:
            expected = make_probe(part, run_network(like, inputs), rtol=old["rtol"] if old else _RTOL)
            if reason := probe_differs(expected, outputs):
                raise EngineError(
                    f"refit: the engine with the new weights does not compute what the model does: {reason}. The model has another structure, "
                    "or other values of constants that the build has used. Build a new engine from it."
                )
        if number == 0 and old:
            part.probe = make_probe(part, outputs, seed=0, rtol=old["rtol"])
    before = engine.describe()["fell_back"]
    if lost := {n: why for n, why in opened.describe()["fell_back"].items() if n not in before}:
        name, why = next(iter(lost.items()))
        raise EngineError(f"refit: the kernel of layer '{name}' cannot use the new weights ({why}). Build the engine again with them.")
    return opened


def _iterate_constants(plan: EnginePlan) -> Iterator[Tensor]:
    for part in plan.by_profile():
        yield from (t for t in iterate_constants(part.network) if t.weight is not None)


def _list_names(t: Tensor) -> set[str]:
    return {name for name in t.constant().origin.sources() if name}


def _collect_sources(plan: EnginePlan) -> dict[str, np.ndarray | None]:
    """Values of all named source weights that constants are computed from; None where the engine has no values."""
    found: dict[str, np.ndarray | None] = {}
    for t in _iterate_constants(plan):
        origin = t.constant().origin
        for name in _list_names(t):
            values = t.array() if origin.op == "source" else plan.source_weights.get(name)
            if found.get(name) is None:
                found[name] = values
    return found


def _check_weight(name: str, a: np.ndarray, sources: Mapping[str, np.ndarray | None], plan: EnginePlan) -> None:
    if name not in sources:
        parts = (o for t in _iterate_constants(plan) for o in _iterate_parts(t.constant().origin))
        equal = next((n for o in parts for n in o.assumes if n == f"equal to {name}"), None)
        used = "its values were used when the engine was built, or it is unused"
        reason = "it was equal to another weight, and both are one constant" if equal else used
        known = ", ".join(sorted(sources)[:8]) + ", ..." * (len(sources) > 8)
        raise EngineError(f"refit: {name!r} cannot be replaced: {reason}. Build the engine again. Weights that can: {known}")
    old = sources[name]
    if old is not None and (old.shape != a.shape or get_dtype(old) != get_dtype(a)):
        raise EngineError(f"refit: {name!r} is {Weight(old).type} in the engine, the new values are {Weight(a).type}; they must agree")


def _recompute(t: Tensor, w: Weight, values: Mapping[str, np.ndarray]) -> Weight:
    """The constant of new source weights. Raises EngineError if an assumption of the build no longer holds."""
    try:
        for origin in _iterate_parts(w.origin):
            for assumed in origin.assumes:
                _check_assumption(t, origin, assumed, values)
        array = evaluate_origin(w.origin, values)
    except NetworkError as e:
        raise EngineError(f"refit: %{t.name} cannot be computed from the new weights: {e}. Build the engine again.") from e
    if array.shape != w.array.shape or get_dtype(array) != get_dtype(w.array):
        raise EngineError(f"refit: %{t.name} becomes {Weight(array).type} instead of {w.type}. Build the engine again.")
    return Weight(array, w.origin)


def _iterate_parts(origin: Origin) -> Iterator[Origin]:
    waiting, seen = [origin], {id(origin)}
    while waiting:
        o = waiting.pop()
        yield o
        new = [a for a in o.args if a is not None and id(a) not in seen]
        seen |= {id(a) for a in new}
        waiting += new


def _check_assumption(t: Tensor, origin: Origin, assumed: str, values: Mapping[str, np.ndarray]) -> None:
    if assumed.startswith("equal to "):
        other = values.get(assumed.removeprefix("equal to "))
        holds = other is not None and np.array_equal(evaluate_origin(origin, values), other)
    elif assumed.endswith("channels are zero") and origin.op == "Gather" and origin.args[0] is not None and origin.args[1] is not None:
        whole, kept = evaluate_origin(origin.args[0], values), evaluate_origin(origin.args[1], values)
        holds = not np.delete(whole, kept.reshape(-1), axis=dict(origin.attrs).get("axis", 0)).any()
    else:
        holds = False
    if not holds:
        raise EngineError(f"refit: the engine was built on the fact that %{t.name} is {assumed}, which the new weights are not. Build it again.")
