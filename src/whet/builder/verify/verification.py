"""Verification of the kernels and of the whole network, as two separate checks (see the design notes).

Kernels: each layer of the engine against the reference of that same layer on its actual inputs, in float64, within the tactic's
bound; exact for integers, except that quantized outputs may differ by one in a tie. Network: against the source network in float64, at
most 4 times the error of the same network in FP32, or of an emulation that rounds like the engine; with a floor of 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.builder.batching.batch_items import MAX_ITEMS, NO_BATCH_AXES, BatchAxes, BatchItems, NotPerImage, batch_of, find_batch_axes
from whet.builder.candidates.enumerate import macs
from whet.builder.config import BuildConfig
from whet.builder.progress import ProgressLog
from whet.builder.verify.batch_positions import rotation_differences
from whet.builder.verify.error_bounds import Checked, Failure, NetworkJudge, compare_layer, layer_bound
from whet.builder.verify.host_overlap import Beside
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.errors import BackendError
from whet.network import Layer, Network
from whet.ops import bind_layer, bind_symbols
from whet.runtime import BoundEngine, WeightStore, bind

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
    """Runs both checks at the first profile's opt shapes. The network is not checked if a layer fails.

    In a large batch whose items are independent in every layer, some items are compared with the reference, and all with their own
    results at other batch indices: see builder/batching/batch_items.py and builder/verify/batch_positions.py. From `slow_macs` multiply-adds
    per batch item, the network as a whole is compared on one of them.
    """
    log.stage("verification", len(plan.network.layers) + 2)
    shapes = probe_shapes(plan)
    probe = probe_inputs(plan.network, config.seed, shapes)
    data = verification_inputs(plan, inputs, config)
    given = {k: v.shape for k, v in data.items()}
    store = WeightStore(backend)
    bound = bind(plan, backend, given, store=store)
    bound.feed(data)
    found = Checked()
    images, axes = _few(plan, source, given, config, log)
    found.images = None if images is None else images.at
    few = batch_of(given) <= MAX_ITEMS or images is not None  # otherwise the arrays of several layers could exhaust the memory
    with np.errstate(all="ignore"), Beside(backend.capabilities.overlapping_launches and few) as beside:
        whole = images if images is None else _for_the_network(images, source, given, slow_macs)
        found.network_items = None if whole is None else whole.at
        judge = NetworkJudge(plan, source, data, whole, beside)
        try:
            for layer, ins, outs in bound.walk(None if images is None else _reader(bound, axes, images)):
                log.step(layer.name)
                found.layers += 1
                judged = images.all if images is not None and layer.name in axes.fixed else images
                beside.then(partial(compare_layer, layer, plan.choices[layer.name], ins, outs, judged, axes), found.take)
            beside.settle()
            if images is not None and not found.failures:
                _check_positions(plan, backend, bound, data, axes, images, store, found, config, log)
        except BackendError as e:
            name = plan.network.layers[min(found.layers, len(plan.network.layers) - 1)].name
            beside.settle()
            c = plan.choices[name]
            found.failures.append(Failure(name, c.tactic, np.inf, 0.0, f"'{name}' by {c.tactic} {c.implementation} fails at run time: {e}"))
        if not found.failures:
            log.step("network")
            bound.feed(data)
            bound.run()
            got = bound.fetch()
            if whole is not None:
                got = {n: whole.take(a, axes.axis[n]) if n in axes.axis else a for n, a in got.items()}
            judge.judge(got, found)
    if not found.failures:
        if given != shapes:
            bound = bind(plan, backend, store=store)
        bound.feed(probe)
        bound.run()
        found.probe_outputs = bound.fetch()
    return found


def _few(
    plan: EnginePlan, source: Network, shapes: Mapping[str, tuple[int, ...]], config: BuildConfig, log: ProgressLog
) -> tuple[BatchItems | None, BatchAxes]:
    """The batch items of a large batch that are compared, and their axes in the engine's tensors; None: all items."""
    batch = batch_of(shapes)
    if batch <= MAX_ITEMS:
        return None, NO_BATCH_AXES
    try:
        find_batch_axes(source, shapes, batch)
        axes = find_batch_axes(plan.network, shapes, batch)
    except NotPerImage as e:
        log.note(f"verification compares all {batch} images with the reference, which is slow: {e}")
        return None, NO_BATCH_AXES
    return BatchItems.of(batch, config.seed), axes


def _for_the_network(images: BatchItems, source: Network, shapes: Mapping[str, tuple[int, ...]], slow_macs: float) -> BatchItems:
    """The batch items for the check of the whole network: those of the layer checks, or one of them if the reference is slow. Independence of the
    batch index is checked per layer; the network check measures accumulated rounding, for which one large item suffices."""
    env = bind_symbols([(t.name, t.type) for t in source.inputs], shapes)
    if sum(macs(bind_layer(x, env)) for x in source.layers) < slow_macs * images.batch:
        return images
    return BatchItems(images.batch, images.at[len(images.at) // 2 :][:1])


def _reader(bound: BoundEngine, axes: BatchAxes, images: BatchItems) -> Callable[[Layer, str], np.ndarray]:
    """Reads the checked batch items of a layer's tensor, or the whole tensor if it has no batch axis."""

    def read(layer: Layer, name: str) -> np.ndarray:
        axis = axes.axis.get(name)
        if axis is None or layer.name in axes.fixed:
            return bound.value(name)
        return bound.samples(name, images.at) if axis == 0 else images.take(bound.value(name), axis)

    return read


def _check_positions(
    plan: EnginePlan,
    backend: Backend,
    bound: BoundEngine,
    data: Mapping[str, np.ndarray],
    axes: BatchAxes,
    images: BatchItems,
    store: WeightStore,
    found: Checked,
    config: BuildConfig,
    log: ProgressLog,
) -> None:
    """Checks that a batch item's result does not depend on its index, up to the layer's bound."""
    try:
        other = bind(plan, backend, {k: v.shape for k, v in data.items()}, store=store)
    except BackendError as e:
        log.note(f"only images {', '.join(map(str, images.at))} of {images.batch} were verified: there is no memory for a second run ({e})")
        return
    for layer, error in rotation_differences(bound, other, data, axes, images.batch, config.seed):
        c = plan.choices[layer.name]
        allowed = max((layer_bound(layer, c, d) for t, (_, d) in zip(layer.outputs, c.outputs, strict=True) if t.dtype.is_float), default=0.0)
        found.turned = max(found.turned, error)
        if error > allowed:
            nodes = f" (from {', '.join(layer.sources[:4])})" if layer.sources else ""
            what = f"{layer.op} '{layer.name}'{nodes} by {c.tactic} {c.implementation}: an image's result depends on its place in the batch "
            what += f"of {images.batch} (error {error:.2g}, allowed is {allowed:.2g})"
            found.failures.append(Failure(layer.name, c.tactic, error, allowed, what))


def verification_inputs(plan: EnginePlan, inputs: Mapping[str, np.ndarray] | None, config: BuildConfig) -> dict[str, np.ndarray]:
    """The inputs of verification: the user's data, or the probe's."""
    if inputs is not None:
        return {k: np.asarray(v) for k, v in inputs.items()}
    return probe_inputs(plan.network, config.seed, probe_shapes(plan))


def ban_failures(search: Any, checked: Checked, best: Any, log: ProgressLog) -> None:
    """Bans the kernels that failed, so that the next search excludes them."""
    for f in checked.failures:
        if f.layer:
            ban(search, f.layer, best.chosen[f.layer], f"failed verification: {f}", log)


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
