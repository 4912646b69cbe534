"""Verification of the kernels and of the whole network, as two separate checks (see the design notes).

Kernels: each layer of the engine against the reference of that same layer on its actual inputs, in float64, within the tactic's
bound; exact for integers, except that quantized outputs may differ by one in a tie. Network: against the source network in float64, at
most 4 times the error of the same network in FP32, or of an emulation that rounds like the engine; with a floor of 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.builder.batching.batch_items import MAX_ITEMS, NO_BATCH_AXES, BatchAxes, BatchItems, NotPerImage, find_batch_axes, get_common_batch
from whet.builder.candidates.enumerate import count_macs
from whet.builder.config import BuildConfig
from whet.builder.progress import ProgressLog
from whet.builder.verify.batch_positions import measure_rotation_differences
from whet.builder.verify.device_products import find_device_products
from whet.builder.verify.differences import compare_output
from whet.builder.verify.error_bounds import Checked, Compared, Failure, NetworkJudge, compare_layer, compute_layer_bound
from whet.builder.verify.failure_folder import save_failures
from whet.builder.verify.host_overlap import OverlappedWork
from whet.builder.verify.input_kinds import LARGE, Magnitude, list_tests, make_values
from whet.builder.verify.shape_extents import differ_in_batch, list_other_shapes, reads_sizes, run_items_again
from whet.engine.plan import Choice, EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.errors import BackendError, VerificationError
from whet.network import Layer, Network, static_shape
from whet.ops import bind_layer, bind_symbols
from whet.ops._products import products_by
from whet.runtime import BoundEngine, WeightStore, bind
from whet.runtime.memory import read_bytes

REPEATS = 1  # further runs of each layer on the same inputs
REPEATABLE = "repeatable"
NOT_REPEATABLE = "not repeatable: possible race or rounding tie"
_LARGE_SHARE = 0.4  # of a batch that is compared
SLOW_MACS = 2e9  # multiply-adds per batch item for which the NumPy reference takes seconds


def verify_engine(
    plan: EnginePlan,
    source: Network,
    backend: Backend,
    inputs: Mapping[str, np.ndarray] | None,
    config: BuildConfig,
    log: ProgressLog,
    slow_macs: float = SLOW_MACS,
) -> Checked:
    """Runs both checks at the first profile's opt shapes, and the check of the layers with inputs of other kinds (input_kinds.py), several times in
    a row, and at the profiles' other shapes (shape_extents.py). The network is not checked if a layer fails.

    In a large batch whose items are independent in every layer, some items are compared with the reference, and all with their own
    results at other batch indices: see builder/batching/batch_items.py and builder/verify/batch_positions.py. From `slow_macs` multiply-adds
    per batch item, the network as a whole is compared on one of them.
    """
    log.stage("verification", len(plan.network.layers) + 2)
    shapes = probe_shapes(plan)
    probe = probe_inputs(plan.network, config.seed, shapes)
    data = make_verification_inputs(plan, inputs, config)
    given = {k: v.shape for k, v in data.items()}
    store = WeightStore(backend)
    bound = bind(plan, backend, given, store=store)
    bound.feed(data)
    found = Checked()
    images, axes = _select_batch_items(plan, source, given, config, log)
    found.images = None if images is None else images.at
    few = get_common_batch(given) <= MAX_ITEMS or images is not None  # otherwise the arrays of several layers could exhaust the memory
    share = 1.0 if images is None else len(images.at) / images.batch
    products = find_device_products(backend, source, given, share, config.seed, log.note)
    with np.errstate(all="ignore"), products_by(products), OverlappedWork(backend.capabilities.overlapping_launches and few) as beside:
        whole = images if images is None else _select_network_items(images, source, given, slow_macs)
        found.network_items = None if whole is None else whole.at
        judge = NetworkJudge(plan, source, data, whole, beside)
        try:
            read = None if images is None else _make_reader(bound, axes, images)
            magnitudes: list[Magnitude] = []
            for i, (layer, ins, outs) in enumerate(bound.walk(read)):
                log.step(layer.name)
                found.layers += 1
                beside.schedule(partial(Magnitude.of, ins, outs), magnitudes.append)
                if unstable := _run_again(bound, i, layer, plan.choices[layer.name], outs, read, share):
                    found.failures.append(unstable)
                judged = images.all if images is not None and layer.name in axes.fixed else images
                beside.schedule(partial(compare_layer, layer, plan.choices[layer.name], ins, outs, judged, axes), found.take)
            beside.settle()
            if images is not None and not found.failures:
                _check_positions(plan, backend, bound, data, axes, images, store, found, config, log)
            found.failures = [_repeat(bound, f) for f in found.failures]
            if not found.failures:
                _check_kinds(bound, axes, images, magnitudes, found, config, log, beside)
            if not found.failures:
                _check_shapes(plan, source, backend, bound, data, store, found, config, log, beside)
        except BackendError as e:
            name = plan.network.layers[min(found.layers, len(plan.network.layers) - 1)].name
            beside.settle()
            c = plan.choices[name]
            found.failures.append(Failure(name, c.tactic, np.inf, 0.0, f"'{name}' by {c.tactic} {c.implementation} fails at run time: {e}"))
        if not found.failures:
            log.step("network")
            judge.judge(_copy_outputs(bound, data, whole, axes), found)
            if found.failures:  # one run more before a pass or a kernel is blamed
                error, found.failures = found.network_error, []
                judge.judge(_copy_outputs(bound, data, whole, axes), found)
                if found.failures:
                    found.failures = [replace(f, what=f"{f.what} ({REPEATABLE})") for f in found.failures]
                else:
                    what = f"the network's outputs were off by {error:.2g} against float64, and in a second run of the same engine on the same "
                    what += f"inputs by {found.network_error:.2g}, allowed is {found.network_bound:.2g} ({NOT_REPEATABLE})"
                    found.failures.append(Failure("", "", error, found.network_bound, what))
            elif np.isinf(found.network_error):
                log.note("the network's outputs have infinite or NaN values where float64 has finite ones: the model's own types overflow")
    if found.failures:
        saved = save_failures(plan, data, found.failures)
        found.failures = [replace(f, what=f.what + saved) for f in found.failures]
    else:
        if given != shapes:
            bound = bind(plan, backend, store=store)
        bound.feed(probe)
        bound.run()
        found.probe_outputs = bound.fetch()
    return found


def _copy_outputs(bound: BoundEngine, data: Mapping[str, np.ndarray], items: BatchItems | None, axes: BatchAxes) -> dict[str, np.ndarray]:
    """The outputs of a run of the whole engine, for the verified items."""
    bound.feed(data)
    bound.run()
    got = bound.fetch()
    return got if items is None else {n: items.take(a, axes.axis[n]) if n in axes.axis else a for n, a in got.items()}


def _select_batch_items(
    plan: EnginePlan, source: Network, shapes: Mapping[str, tuple[int, ...]], config: BuildConfig, log: ProgressLog
) -> tuple[BatchItems | None, BatchAxes]:
    """The batch items of a large batch that are compared, and their axes in the engine's tensors; None: all items."""
    batch = get_common_batch(shapes)
    if batch <= MAX_ITEMS:
        return None, NO_BATCH_AXES
    try:
        find_batch_axes(source, shapes, batch)
        axes = find_batch_axes(plan.network, shapes, batch)
    except NotPerImage as e:
        log.note(f"verification compares all {batch} images with the reference, which is slow: {e}")
        return None, NO_BATCH_AXES
    return BatchItems.of(batch, config.seed), axes


def _select_network_items(images: BatchItems, source: Network, shapes: Mapping[str, tuple[int, ...]], slow_macs: float) -> BatchItems:
    """The batch items for the check of the whole network: those of the layer checks, or one of them if the reference is slow. Independence of the
    batch index is checked per layer; the network check measures accumulated rounding, for which one large item suffices."""
    env = bind_symbols([(t.name, t.type) for t in source.inputs], shapes)
    if sum(count_macs(bind_layer(x, env)) for x in source.layers) < slow_macs * images.batch:
        return images
    return BatchItems(images.batch, images.at[len(images.at) // 2 :][:1])


def _make_reader(bound: BoundEngine, axes: BatchAxes, images: BatchItems) -> Callable[[Layer, str], np.ndarray]:
    """Reads the checked batch items of a layer's tensor, or the whole tensor if it has no batch axis."""

    def read(layer: Layer, name: str) -> np.ndarray:
        axis = axes.axis.get(name)
        if axis is None or layer.name in axes.fixed:
            return bound.value(name)
        return bound.samples(name, images.at, axis.block) if axis.is_outermost else images.take(bound.value(name), axis)

    return read


def _run_again(
    bound: BoundEngine, i: int, layer: Layer, choice: Choice, outs: list[np.ndarray], read: Callable[[Layer, str], np.ndarray] | None, share: float
) -> Failure | None:
    """A failure if a layer gives other results when it runs again on the same inputs. Layers that overwrite their inputs are not run again.

    Bytes as stored are compared first: reading a tensor in its logical layout takes longer, unless `read` takes a small `share` of the batch.
    """
    if choice.tactic.rpartition("/")[2] == "numpy_reference" or bound.overwrites_inputs(i):
        return None
    raw = bound.arena.array is not None or share > _LARGE_SHARE
    places = [bound.place(t.name) for t in layer.outputs]
    stored = [read_bytes(bound.backend, bound.arena, *p).copy() for p in places] if raw else []
    for _ in range(REPEATS):
        bound.run_step(i)
        if raw and all(np.array_equal(read_bytes(bound.backend, bound.arena, *p), a) for p, a in zip(places, stored, strict=True)):
            continue
        for t, (_, dtype), before in zip(layer.outputs, choice.outputs, outs, strict=True):
            now = bound.value(t.name) if read is None else read(layer, t.name)
            if now.tobytes() == before.tobytes():
                continue
            error, why = compare_output(now, before, t.dtype, choice.rtol)
            allowed = 2 * compute_layer_bound(layer, choice, dtype) if t.dtype.is_float else 0.0
            if error > allowed:
                what = f"{_format_title(layer, choice)}: results differ between runs on the same inputs ({why or f'error {error:.2g}'}, allowed is "
                what += f"{allowed:.2g}). Not repeatable: a race, or memory that the kernel does not initialize"
                return Failure(layer.name, choice.tactic, error, allowed, what)
    return None


def _format_title(layer: Layer, choice: Choice) -> str:
    nodes = f" (from {', '.join(layer.sources[:4])})" if layer.sources else ""
    return f"{layer.op} '{layer.name}'{nodes} by {choice.tactic} {choice.implementation}"


def _check_kinds(
    bound: BoundEngine,
    axes: BatchAxes,
    images: BatchItems | None,
    magnitudes: list[Magnitude],
    checked: Checked,
    config: BuildConfig,
    log: ProgressLog,
    beside: OverlappedWork,
) -> None:
    """Compares layers with the reference on inputs of other kinds, up to the first failure of each layer."""
    layers, choices = [s.layer for s in bound.shaped.steps], bound.shaped.plan.choices
    read = (lambda layer, name: bound.value(name)) if images is None else _make_reader(bound, axes, images)
    failed: set[int] = set()

    def take(i: int, compared: Compared) -> None:
        if compared.failure is not None and i not in failed:
            failed.add(i)
            checked.failures.append(compared.failure)

    for i, kind in list_tests(layers, choices, 1.0 if images is None else len(images.at) / images.batch):
        layer, rng = layers[i], np.random.RandomState([config.seed, i])
        if i in failed:
            continue
        log.step(f"{layer.name}: {kind} inputs", 0)
        for t, magnitude in zip(layer.inputs, magnitudes[i].inputs, strict=True):
            if t is not None and not t.is_constant:
                shape = static_shape(t.shape)
                bound.write_stored(t.name, make_values(kind, shape, bound.shaped.operands[t.name].dtype.numpy, magnitude, rng))
        ins = [None if t is None else t.array() if t.is_constant else read(layer, t.name) for t in layer.inputs]
        bound.run_step(i)
        outs = [read(layer, t.name) for t in layer.outputs]
        judged = images.all if images is not None and layer.name in axes.fixed else images
        least = [m * (LARGE if kind == "large" else 1.0) for m in magnitudes[i].outputs]
        checked.input_kinds += 1
        compare = partial(compare_layer, layer, choices[layer.name], ins, outs, judged, axes, f", with inputs of the kind '{kind}'", least)
        beside.schedule(compare, partial(take, i))
    beside.settle()
    checked.failures = [_repeat(bound, f) for f in checked.failures]


def _check_shapes(
    plan: EnginePlan,
    source: Network,
    backend: Backend,
    bound: BoundEngine,
    data: Mapping[str, np.ndarray],
    store: WeightStore,
    checked: Checked,
    config: BuildConfig,
    log: ProgressLog,
    beside: OverlappedWork,
) -> None:
    """Checks the layers at the profiles' other shapes: another batch against the verified items, other shapes against the reference."""
    given = {k: v.shape for k, v in data.items()}
    for shapes in list_other_shapes(plan, given):
        if any(0 in s for s in shapes.values()):
            continue
        try:
            other = bind(plan, backend, shapes, store=store)
        except BackendError as e:
            log.note(f"the shapes {_format_shapes(shapes)} were not verified: there is no memory for a second run ({e})")
            continue
        checked.shapes += (shapes,)
        try:
            axes = _find_common_axes(plan, given, shapes)
            if axes is not None:
                _compare_items(plan, bound, other, data, axes, shapes, checked)
            else:
                _compare_at(plan, source, other, shapes, checked, config, log, beside)
        except BackendError as e:
            checked.failures.append(Failure("", "", np.inf, 0.0, f"the engine fails at run time with the shapes {_format_shapes(shapes)}: {e}"))
        if checked.failures:
            return


def _find_common_axes(plan: EnginePlan, input_shapes: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> BatchAxes | None:
    """The batch axes, if two sets of shapes differ in the batch only and no layer mixes its items; else None."""
    sizes = [get_common_batch(s) for s in (input_shapes, shapes)]
    one_batch = all({x[:1] for x in s.values()} == {(n,)} for s, n in zip((input_shapes, shapes), sizes, strict=True))
    if not differ_in_batch(input_shapes, shapes) or max(sizes) < 2 or not one_batch or reads_sizes(plan.network, input_shapes, shapes):
        return None
    try:
        return find_batch_axes(plan.network, input_shapes if sizes[0] > sizes[1] else shapes, max(sizes))
    except NotPerImage:
        return None


def _compare_items(
    plan: EnginePlan,
    bound: BoundEngine,
    other: BoundEngine,
    data: Mapping[str, np.ndarray],
    axes: BatchAxes,
    shapes: Mapping[str, tuple[int, ...]],
    checked: Checked,
) -> None:
    batch, other_batch = next(iter(data.values())).shape[0], next(iter(shapes.values()))[0]
    for _, layer, pairs in run_items_again(bound, other, data, axes, batch, other_batch):
        choice = plan.choices[layer.name]
        for t, (_, dtype), (got, want) in zip(layer.outputs, choice.outputs, pairs, strict=False):
            if got.tobytes() == want.tobytes():
                continue
            error, why = compare_output(got, want, t.dtype, choice.rtol)
            allowed = 2 * compute_layer_bound(layer, choice, dtype) if t.dtype.is_float else 0.0
            if error > allowed:
                what = f"{_format_title(layer, choice)}: an item's result at batch {other_batch} differs from that at batch {batch}, "
                what += f"which is verified ({why or f'error {error:.2g}'}, allowed is {allowed:.2g})"
                checked.failures.append(Failure(layer.name, choice.tactic, error, allowed, what))
                break


def _compare_at(
    plan: EnginePlan,
    source: Network,
    other: BoundEngine,
    shapes: Mapping[str, tuple[int, ...]],
    checked: Checked,
    config: BuildConfig,
    log: ProgressLog,
    beside: OverlappedWork,
) -> None:
    def take(compared: Compared) -> None:
        if compared.failure is not None:
            checked.failures.append(compared.failure)

    other.feed(probe_inputs(plan.network, config.seed, shapes))
    images, axes = _select_batch_items(plan, source, shapes, config, log)
    for layer, ins, outs in other.walk(None if images is None else _make_reader(other, axes, images)):
        judged = images.all if images is not None and layer.name in axes.fixed else images
        context = f", with the shapes {_format_shapes(shapes)}"
        beside.schedule(partial(compare_layer, layer, plan.choices[layer.name], ins, outs, judged, axes, context), take)
        if checked.failures:
            break
    beside.settle()
    checked.failures = [_repeat(other, f) for f in checked.failures]


def _format_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{n}: {'x'.join(map(str, s))}" for n, s in shapes.items())


def _repeat(bound: BoundEngine, failure: Failure) -> Failure:
    """The failure with a note in its text: the layer runs once more on the same inputs, and fails again or does not."""
    evidence = failure.evidence
    if evidence is None:
        return failure
    i = next(i for i, x in enumerate(bound.network.layers) if x.name == failure.layer)
    layer, choice, items = bound.shaped.steps[i].layer, bound.shaped.plan.choices[failure.layer], evidence.images
    for t, a in zip(layer.inputs, evidence.inputs, strict=True):
        if t is not None and a is not None and not t.is_constant:
            axis = None if items is None else evidence.axes.axis.get(t.name)
            if items is not None and axis is not None and a.shape != static_shape(t.shape):  # the other items get the values of the first
                a = axis.take(a, [items.at.index(n) if n in items.at else 0 for n in range(items.batch)], len(items.at))
            bound.write_stored(t.name, a)
    bound.run_step(i)
    read = (lambda layer, name: bound.value(name)) if items is None else _make_reader(bound, evidence.axes, items)
    again = any(
        compare_output(read(layer, t.name), ref, t.dtype, choice.rtol)[0] > (compute_layer_bound(layer, choice, dtype) if t.dtype.is_float else 0.0)
        for t, (_, dtype), ref in zip(layer.outputs, choice.outputs, evidence.expected, strict=True)
    )
    return replace(failure, what=f"{failure.what} ({REPEATABLE if again else NOT_REPEATABLE})")


def _check_positions(
    plan: EnginePlan,
    backend: Backend,
    bound: BoundEngine,
    data: Mapping[str, np.ndarray],
    axes: BatchAxes,
    images: BatchItems,
    store: WeightStore,
    checked: Checked,
    config: BuildConfig,
    log: ProgressLog,
) -> None:
    """Checks that a batch item's result does not depend on its index, up to the layer's bound."""
    try:
        other = bind(plan, backend, {k: v.shape for k, v in data.items()}, store=store)
    except BackendError as e:
        log.note(f"only images {', '.join(map(str, images.at))} of {images.batch} were verified: there is no memory for a second run ({e})")
        return
    for layer, error in measure_rotation_differences(bound, other, data, axes, images.batch, config.seed):
        c = plan.choices[layer.name]
        allowed = max((compute_layer_bound(layer, c, d) for t, (_, d) in zip(layer.outputs, c.outputs, strict=True) if t.dtype.is_float), default=0.0)
        checked.turned = max(checked.turned, error)
        if error > allowed:
            nodes = f" (from {', '.join(layer.sources[:4])})" if layer.sources else ""
            what = f"{layer.op} '{layer.name}'{nodes} by {c.tactic} {c.implementation}: an image's result depends on its place in the batch "
            what += f"of {images.batch} (error {error:.2g}, allowed is {allowed:.2g})"
            checked.failures.append(Failure(layer.name, c.tactic, error, allowed, what))


def make_verification_inputs(plan: EnginePlan, inputs: Mapping[str, np.ndarray] | None, config: BuildConfig) -> dict[str, np.ndarray]:
    """The inputs of verification: the user's data, or the probe's."""
    if inputs is not None:
        return {k: np.asarray(v) for k, v in inputs.items()}
    return probe_inputs(plan.network, config.seed, probe_shapes(plan))


def ban_failures(search: Any, checked: Checked, best: Any, log: ProgressLog) -> None:
    """Bans the kernels that failed, so that the next search excludes them."""
    for f in checked.failures:
        if f.layer:
            ban(search, f.layer, best.chosen[f.layer], f"failed verification: {f}", log)


def ban_overflows(search: Any, checked: Checked, lowered: Network, built: Network) -> bool:
    """Bans the types that cannot hold the values of tensors of an engine's network `built`, whose error is too large; `lowered` is that network
    without its reformats. False if none is left to ban. Raises VerificationError for a layer without a kernel in another type."""
    originals = {x.name: x for x in lowered.layers}
    stored = {t.name: (originals[x.name], i) for x in built.layers if x.name in originals for i, t in enumerate(x.outputs)}
    banned = False
    for o in checked.overflows:
        maker, i = stored.get(o.tensor, (None, 0))  # outputs of the network have other names in front of a reformat
        name = o.tensor if maker is None else maker.outputs[i].name
        reason = f"{o}: the network's outputs were wrong with it"
        if search.bans.ban_storage(name, o.layer, o.dtype, reason):
            banned = True
            search.log.note(f"'{o.layer}' does not use {o.dtype}: {reason}")
    for layer in lowered.layers if banned else ():
        if not search.has_kernels(layer):
            what = f"'{layer.name}' has no kernel that stores another type. Leave out its --layerPrecisions or --layerOutputTypes, or allow --bf16."
            raise VerificationError(f"{checked.failures[0]} {what}")
    return banned


def ban_nearest(search: Any, checked: Checked, best: Any, log: ProgressLog) -> bool:
    """Bans the tactic of the layer nearest to its bound, if the network's error is too large although each layer is within its bound.

    Returns False if there is none to ban: reformats, exact layers and layers with a single kernel are excluded.
    """
    layer, error, bound = checked.worst
    if not error or layer not in search.kind_of:
        return False
    name = best.chosen[layer].tactic.name
    reason = f"the network is off by {checked.network_error:.2g}, allowed is {checked.network_bound:.2g}; of its layers '{layer}' by {name} is "
    reason += f"nearest to its bound, {error:.2g} of {bound:.2g}"
    found = bool(search.ban_tactic(layer, name, reason))
    if found:
        log.note(f"banned: {reason}")
    return found


def ban(search: Any, layer: str, option: Any, reason: str, log: ProgressLog) -> None:
    """Bans one option of a layer, or of all reformats if the layer is a reformat."""
    log.note(f"banned: {reason}")
    if layer in search.kind_of:
        search.ban(layer, option.ident, reason)
    else:
        search.reformats.ban(option.ident, reason)
        search.bans.listed.append((layer, f"{option.ident[0]} {option.ident[1]} {dict(option.ident[2])}", reason))
