"""Checks a plan's arenas against the network: tensors are within bounds, and live tensors do not overlap.

Sizes are derived from formats and shapes and compared with the stored ones. Independent of the planner's code.
"""

from __future__ import annotations

from whet.backends import BACKENDS
from whet.engine.host_tail import check_tail
from whet.engine.intersections import Rectangle, list_intersections
from whet.engine.plan import ArenaPlan, Choice, EnginePlan
from whet.errors import EngineError, WhetError
from whet.network import BF16, DTYPES, F16, F32, FORMATS, Layer, Network, Tensor, TensorType, evaluate, format_bytes, format_fits, static_shape
from whet.network.formats import has_same_bytes
from whet.ops import bind_symbols, why_samples_touch

#: ops that change no byte in place, so that input and output may both be live
_VIEWS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Concat", "Slice", "Split", "Dropout", "Transpose"})
_ALSO_F32 = frozenset({F16, BF16})  # storage types of f32 tensors besides f32; any other type is stored as itself
_SLACK = 1 << 16  # bytes per tensor added by alignment and spacing


def check_plan(plan: EnginePlan) -> None:
    """Raises EngineError (naming layer or tensor) if choices, profiles or arenas do not match the network."""
    if len(plan.arenas) != max(len(plan.profiles), 1):
        raise EngineError(f"the engine has {len(plan.profiles)} profiles and {len(plan.arenas)} arenas: it is inconsistent")
    if plan.others:
        _check_others(plan)
    if plan.tail is not None:
        check_tail(plan.tail, plan.network)
    stored = _get_storage(plan)
    for k, arena in enumerate(plan.arenas):
        part, _ = plan.part(k)
        try:
            shapes = _get_largest_shapes(plan, k)
            if arena.concurrent_samples:
                _check_samples(part, arena, shapes)
                shapes = {n: (1, *s[1:]) for n, s in shapes.items()}
            env = bind_symbols([(t.name, t.type) for t in plan.network.inputs], shapes)
            _check_arena(part, arena, stored if part is plan else _get_storage(part), env)
        except EngineError as e:
            raise EngineError(f"profile {k}: {e}") from e
        except WhetError as e:
            raise EngineError(f"profile {k} does not fit the network: {e}") from e


def _check_samples(plan: EnginePlan, arena: ArenaPlan, shapes: dict[str, tuple[int, ...]]) -> None:
    """Checks again that the samples are independent and that the backend supports sample-parallel execution."""
    backend = BACKENDS.get(plan.backend)
    if backend is None or not backend.capabilities.workers:
        raise EngineError(f"its samples run separately, which the backend '{plan.backend}' does not support")
    why = why_samples_touch(plan.network, shapes)
    if why is not None:
        raise EngineError(f"its samples run separately, but they may depend on each other: {why}")
    bind_symbols([(t.name, t.type) for t in plan.network.inputs], shapes)  # one batch for all inputs


def _check_others(plan: EnginePlan) -> None:
    """Plans of the profiles after the first: one per profile, with the same inputs, outputs and machine."""

    def list_inputs_and_outputs(p: EnginePlan) -> list[tuple[str, str]]:
        return [(t.name, str(t.type)) for t in (*p.network.inputs, *p.network.outputs)]

    if len(plan.others) != len(plan.profiles) - 1:
        raise EngineError(f"the engine has {len(plan.profiles)} profiles and {len(plan.others)} plans of further profiles: it is inconsistent")
    for k, other in enumerate(plan.others, 1):
        if (other.profiles, other.arenas, other.others) != ([plan.profiles[k]], [plan.arenas[k]], []):
            raise EngineError(f"profile {k} and its own plan have other shapes or arenas: the engine is inconsistent")
        if list_inputs_and_outputs(other) != list_inputs_and_outputs(plan):
            raise EngineError(f"the network of profile {k} has other inputs or outputs than that of profile 0")
        if (other.backend, other.machine_key, other.threads) != (plan.backend, plan.machine_key, plan.threads):
            raise EngineError(f"profile {k} was tuned on another machine or number of threads than profile 0")


def _get_largest_shapes(plan: EnginePlan, k: int) -> dict[str, tuple[int, ...]]:
    """The largest shapes of a profile, checked."""
    given = plan.profiles[k].shapes if plan.profiles else {}
    unknown = set(given) - {t.name for t in plan.network.inputs}
    if unknown:
        raise EngineError(f"it names the input '{sorted(unknown)[0]}', which is not an input of the network")
    checked = {}
    for t in plan.network.inputs:
        if t.name not in given:
            checked[t.name] = static_shape(t.shape)
            continue
        low, opt, high = given[t.name]
        if not len(low) == len(opt) == len(high) == t.type.rank:
            raise EngineError(f"its shapes of '{t.name}' are not of rank {t.type.rank}")
        if not all(0 <= a <= b <= c for a, b, c in zip(low, opt, high, strict=True)):
            raise EngineError(f"its shapes of '{t.name}' are not in order: min {low}, opt {opt}, max {high}")
        checked[t.name] = tuple(high)
    return checked


def _get_storage(plan: EnginePlan) -> dict[str, tuple[str, str]]:
    """(format, dtype) of every tensor in the arena. Every layer must have a matching choice."""
    net = plan.network
    names = {layer.name for layer in net.layers}
    if names != set(plan.choices):
        odd = sorted(names ^ set(plan.choices))[0]
        raise EngineError(f"'{odd}' has a layer but no choice, or a choice but no layer: the engine is inconsistent")
    storage: dict[str, tuple[str, str]] = {}
    for layer in net.layers:
        c = plan.choices[layer.name]
        if len(c.inputs) != len(layer.inputs) or len(c.outputs) != len(layer.outputs):
            raise EngineError(f"the choice of '{layer.name}' has another number of inputs or outputs than the layer")
        for t, o in zip(layer.inputs, c.inputs, strict=True):
            if t is None:
                if o is not None:
                    raise EngineError(f"the choice of '{layer.name}' stores an input that is absent")
                continue
            if o is None:
                if not t.is_constant:
                    raise EngineError(f"the choice of '{layer.name}' does not say how %{t.name} is stored")
                continue
            _check_operand(layer, t, o)
            if not t.is_constant and storage.setdefault(t.name, o) != o:
                raise EngineError(f"'{layer.name}' reads %{t.name} as {o}, but it is stored as {storage[t.name]}")
        for t, o in zip(layer.outputs, c.outputs, strict=True):
            _check_operand(layer, t, o)
            storage[t.name] = o
        for i, j in c.inplace:
            source = layer.inputs[i] if 0 <= i < len(layer.inputs) else None
            if source is None or source.is_constant or not 0 <= j < len(layer.outputs):
                raise EngineError(f"the choice of '{layer.name}' has an in-place pair {i}->{j} without operands")
        if layer.op == "Reformat":
            a = layer.attrs
            stated = (a["source_format"], a["source_dtype"]), (a["format"], a["dtype"])
            if (c.inputs[0], c.outputs[0]) != stated:
                raise EngineError(f"'{layer.name}' reformats {stated[0]} to {stated[1]}, its choice {c.inputs[0]} to {c.outputs[0]}")
    for t in net.inputs:
        storage.setdefault(t.name, ("linear", t.dtype.name))
    return storage


def _check_operand(layer: Layer, t: Tensor, o: tuple[str, str]) -> None:
    fmt, dtype = o
    known = fmt in FORMATS and dtype in DTYPES and format_fits(fmt, t.type.rank) and dtype != "string"
    if not known or (dtype != t.dtype.name and (t.dtype != F32 or DTYPES[dtype] not in _ALSO_F32)):
        raise EngineError(f"the choice of '{layer.name}' stores %{t.name} ({t.type}) as {dtype}:{fmt}, which is not supported")


def _check_arena(plan: EnginePlan, arena: ArenaPlan, stored: dict[str, tuple[str, str]], env: dict[str, int]) -> None:
    sizes = {}
    for t in plan.network.tensors():
        if t.name in stored:
            fmt, dtype = stored[t.name]
            static = TensorType(DTYPES[dtype], tuple(evaluate(d, env) for d in t.shape))
            sizes[t.name] = evaluate(format_bytes(static, fmt), env)
    if any(n < 0 for n in sizes.values()):
        raise EngineError("a tensor has a negative size at the largest shapes")
    if set(arena.offsets) != set(sizes) or set(arena.sizes) != set(sizes):
        odd = sorted(set(arena.offsets) ^ set(sizes) | set(arena.sizes) ^ set(sizes))[0]
        raise EngineError(f"the arena and the network do not hold the same tensors: '{odd}'")
    if min(arena.total, arena.scratch_offset, arena.scratch_bytes) < 0:
        raise EngineError("the arena has a negative size")
    if arena.total > sum(sizes.values()) + arena.scratch_bytes + _SLACK * (len(sizes) + 1):
        raise EngineError(f"the arena has {arena.total} bytes, far more than its tensors and scratch need")
    for name, size in sizes.items():
        if arena.sizes[name] != size:
            raise EngineError(f"%{name} takes {size} bytes, the engine says {arena.sizes[name]}")
        if not 0 <= arena.offsets[name] <= arena.total - size:
            raise EngineError(f"%{name} is at {arena.offsets[name]}, outside of the arena of {arena.total} bytes")
    if arena.scratch_offset + arena.scratch_bytes > arena.total:
        raise EngineError("the scratch is outside of the arena")
    _check_overlaps(plan.network, plan.choices, arena, sizes, env)


def _check_overlaps(net: Network, choices: dict[str, Choice], arena: ArenaPlan, sizes: dict[str, int], env: dict[str, int]) -> None:
    lives = [life for life in _list_live_rectangles(net, arena, sizes) if life.end > life.at]
    shared = _find_views(net, choices, env)
    pairs = {
        (layer.needs(i).name, layer.outputs[j].name): k
        for k, layer in enumerate(net.layers)
        for i, j in choices[layer.name].inplace
    }
    if arena.scratch_bytes:
        lives.append(Rectangle("the scratch", arena.scratch_offset, arena.scratch_offset + arena.scratch_bytes, -1, len(net.layers)))
    for a, b in list_intersections(lives):
        if shared.get(a.name, a.name) == shared.get(b.name, b.name):
            continue
        early, late = (a, b) if a.first <= b.first else (b, a)
        step = pairs.get((early.name, late.name))
        if step is None or early.last > step:
            raise EngineError(f"%{early.name} and %{late.name} overlap in the arena while both are live")
    for (source, made), k in pairs.items():
        at, start, size = arena.offsets[source], arena.offsets[made], min(sizes[source], sizes[made])
        outer = source if sizes[source] >= sizes[made] else made
        if size and not arena.offsets[outer] <= max(at, start) <= arena.offsets[outer] + sizes[outer] - size:
            raise EngineError(f"layer '{net.layers[k].name}' works in place, but %{source} and %{made} do not share their bytes")


def _list_live_rectangles(net: Network, arena: ArenaPlan, sizes: dict[str, int]) -> list[Rectangle]:
    first = {t.name: -1 for t in net.inputs}
    last = {t.name: -1 for t in net.inputs}
    for k, layer in enumerate(net.layers):
        reads = [t for t in layer.inputs if t is not None]
        for region in layer.regions.values():
            reads.extend(region.captures())
        for t in reads:
            last[t.name] = k
        for t in layer.outputs:
            first[t.name] = last[t.name] = k
    for t in net.outputs:
        last[t.name] = len(net.layers)
    return [Rectangle(n, arena.offsets[n], arena.offsets[n] + s, first[n], last[n]) for n, s in sizes.items()]


def _find_views(net: Network, choices: dict[str, Choice], env: dict[str, int]) -> dict[str, str]:
    """Tensors that are views of the same bytes -> one of them."""
    root: dict[str, str] = {}

    def find(n: str) -> str:
        while root.get(n, n) != n:
            root[n] = root.get(root[n], root[n])  # path halving
            n = root[n]
        return n

    for layer in net.layers:
        if layer.op in _VIEWS and _keeps_bytes(layer, choices[layer.name], env):
            for i, j in choices[layer.name].inplace:
                root[find(layer.outputs[j].name)] = find(layer.needs(i).name)
    return {n: find(n) for n in list(root)}


def _keeps_bytes(layer: Layer, choice: Choice, env: dict[str, int]) -> bool:
    """True unless a Transpose moves elements in the formats of its choice."""
    source, target = choice.inputs[0], choice.outputs[0]
    if layer.op != "Transpose":
        return True
    shape = tuple(evaluate(d, env) for d in layer.needs(0).shape)
    return source is not None and target is not None and has_same_bytes(source[0], target[0], shape, layer.attrs["perm"])
