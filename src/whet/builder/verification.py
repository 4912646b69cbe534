"""Verification: are the kernels right, and is the network? Two questions, never mixed (see the design notes).

Kernels: each layer of the engine against the reference of that same layer on its actual inputs, in float64, within the tactic's
bound; exact for integers, where quantized outputs may differ by one in a tie. Network: against the source network in float64, at
most 4 times the error of the same network in FP32, or of an emulation that rounds where the engine rounds; with a floor of 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.builder.config import BuildConfig
from whet.builder.differences import difference, output_error, worst_error
from whet.builder.emulation import computes_tf32, emulate, reference_outputs
from whet.builder.images import MOST, NOWHERE, Images, NotPerImage, Places, batch_of, image_places, network_on_images
from whet.builder.positions import turned_differences
from whet.builder.progress import Noting
from whet.builder.ties import has_ties, nudged_outputs
from whet.engine.plan import Choice, EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.errors import BackendError
from whet.network import BF16, F16, Layer, Network
from whet.ops import run_network
from whet.runtime import Bound, WeightStore, bind

FLOOR = 1e-5  # network error that is always allowed
FACTOR = 4.0  # times the emulation's error
_UNIT = {F16.name: 2.0**-11, BF16.name: 2.0**-8}  # relative error of one rounding


@dataclass(frozen=True)
class Failure:
    """A layer whose outputs are off, or (layer "") the network."""

    layer: str
    tactic: str
    error: float
    bound: float
    what: str

    def __str__(self) -> str:
        return self.what


@dataclass
class Checked:
    """What verification found: failures first to last, the worst layer, errors of the network, outputs for the probe."""

    failures: list[Failure] = field(default_factory=list)
    layers: int = 0
    worst: tuple[str, float, float] = ("", 0.0, 0.0)  # layer, error, bound
    network_error: float = 0.0
    network_bound: float = FLOOR
    emulation_error: float | None = None
    images: tuple[int, ...] | None = None  # of the batch, compared with the reference; None: all
    turned: float = 0.0  # largest difference between an image's results at two places of the batch
    probe_outputs: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def probe_rtol(self) -> float:
        """What the probe allows elsewhere: the network's bound against this engine's own error."""
        return max(2 * self.network_bound, 1e-4)

    def report(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "worst_layer": {"layer": self.worst[0], "error": self.worst[1], "bound": self.worst[2]},
            "network_error": self.network_error,
            "network_bound": self.network_bound,
            "emulation_error": self.emulation_error,
            "failures": [str(f) for f in self.failures],
            "images": None if self.images is None else list(self.images),
            "turned_error": self.turned,
        }


def verify_engine(
    plan: EnginePlan, source: Network, machine: Any, inputs: Mapping[str, np.ndarray] | None, config: BuildConfig, tell: Noting
) -> Checked:
    """Runs both checks at the first profile's opt shapes. The network is not judged when a layer fails.

    Of a batch of more than a few images, where each layer keeps them apart, some are compared with the reference and all with
    themselves at other places of the batch: see builder/images.py and builder/positions.py.
    """
    tell.stage("verification", len(plan.network.layers) + 2)
    shapes = probe_shapes(plan)
    probe = probe_inputs(plan.network, config.seed, shapes)
    data = verification_inputs(plan, inputs, config)
    given = {k: v.shape for k, v in data.items()}
    store = WeightStore(machine)
    bound = bind(plan, machine, given, store=store)
    bound.feed(data)
    found = Checked()
    images, places = _few(plan, source, given, config, tell)
    found.images = None if images is None else images.at
    with np.errstate(all="ignore"):
        try:
            for layer, ins, outs in bound.walk(None if images is None else _reader(bound, places, images)):
                tell.step(layer.name)
                judged = images.all if images is not None and layer.name in places.fixed else images
                failure = check_layer(layer, plan.choices[layer.name], ins, outs, found, judged, places)
                if failure is not None:
                    found.failures.append(failure)
            if images is not None and not found.failures:
                _check_positions(plan, machine, bound, data, places, images, store, found, config, tell)
        except BackendError as e:
            name = plan.network.layers[min(found.layers, len(plan.network.layers) - 1)].name
            c = plan.choices[name]
            found.failures.append(Failure(name, c.tactic, np.inf, 0.0, f"'{name}' by {c.tactic} {c.implementation} fails at run time: {e}"))
        if not found.failures:
            tell.step("network")
            bound.feed(data)
            bound.run()
            got = bound.fetch()
            if images is not None:
                got = {n: images.take(a, places.axis[n]) if n in places.axis else a for n, a in got.items()}
            _check_network(plan, source, data, got, found, images)
    if not found.failures:
        if given != shapes:
            bound = bind(plan, machine, store=store)
        bound.feed(probe)
        bound.run()
        found.probe_outputs = bound.fetch()
    return found


def _few(
    plan: EnginePlan, source: Network, shapes: Mapping[str, tuple[int, ...]], config: BuildConfig, tell: Noting
) -> tuple[Images | None, Places]:
    """Which images of a large batch are judged, and where they stand in the engine's tensors; None: all of them."""
    batch = batch_of(shapes)
    if batch <= MOST:
        return None, NOWHERE
    try:
        image_places(source, shapes, batch)
        places = image_places(plan.network, shapes, batch)
    except NotPerImage as e:
        tell.note(f"verification compares all {batch} images with the reference, which takes its time: {e}")
        return None, NOWHERE
    return Images.of(batch, config.seed), places


def _reader(bound: Bound, places: Places, images: Images) -> Callable[[Layer, str], np.ndarray]:
    """Reads the judged images of a layer's tensor, or all of one that has no image axis."""

    def read(layer: Layer, name: str) -> np.ndarray:
        axis = places.axis.get(name)
        if axis is None or layer.name in places.fixed:
            return bound.value(name)
        return bound.images(name, images.at) if axis == 0 else images.take(bound.value(name), axis)

    return read


def _check_positions(
    plan: EnginePlan,
    machine: Any,
    bound: Bound,
    data: Mapping[str, np.ndarray],
    places: Places,
    images: Images,
    store: WeightStore,
    found: Checked,
    config: BuildConfig,
    tell: Noting,
) -> None:
    """Every layer must give an image the same result wherever it stands in the batch, up to the layer's own bound."""
    try:
        other = bind(plan, machine, {k: v.shape for k, v in data.items()}, store=store)
    except BackendError as e:
        tell.note(f"only images {', '.join(map(str, images.at))} of {images.batch} were verified: there is no memory for a second run ({e})")
        return
    for layer, error in turned_differences(bound, other, data, places, images.batch, config.seed):
        c = plan.choices[layer.name]
        allowed = max((_layer_bound(layer, c, d) for t, (_, d) in zip(layer.outputs, c.outputs, strict=True) if t.dtype.is_float), default=0.0)
        found.turned = max(found.turned, error)
        if error > allowed:
            nodes = f" (from {', '.join(layer.sources[:4])})" if layer.sources else ""
            what = f"{layer.op} '{layer.name}'{nodes} by {c.tactic} {c.implementation}: an image's result depends on its place in the batch "
            what += f"of {images.batch} (error {error:.2g}, allowed is {allowed:.2g})"
            found.failures.append(Failure(layer.name, c.tactic, error, allowed, what))


def check_layer(
    layer: Layer,
    choice: Choice,
    ins: list,
    outs: list[np.ndarray],
    found: Checked,
    images: Images | None = None,
    places: Places = NOWHERE,
) -> Failure | None:
    """Compares one layer's outputs with the reference on its actual inputs (`ins` as stored; of some images where those are given)."""
    found.layers += 1
    if choice.tactic.rpartition("/")[2] == "numpy_reference":
        return None  # it is the reference itself
    want = reference_outputs(layer, choice, ins, images, places)
    for t, (_, dtype), got, ref in zip(layer.outputs, choice.outputs, outs, want, strict=True):
        error, why = difference(got, ref, t.dtype)
        bound = 0.0 if not t.dtype.is_float else _layer_bound(layer, choice, dtype)
        if bound and (found.worst[2] == 0 or error / bound > found.worst[1] / found.worst[2]):
            found.worst = (layer.name, error, bound)
        if error > bound:
            nodes = f" (from {', '.join(layer.sources[:4])})" if layer.sources else ""
            said = f"{why or f'error {error:.2g}'}, allowed is {bound:.2g}"
            what = f"{layer.op} '{layer.name}'{nodes} by {choice.tactic} {choice.implementation}: {said}"
            return Failure(layer.name, choice.tactic, error, bound, what)
    return None


def _layer_bound(layer: Layer, choice: Choice, dtype: str) -> float:
    """The kernel's bound, and one rounding to a smaller storage type."""
    if layer.op == "Reformat":
        return 2 * _UNIT.get(dtype, 0.0)
    return max(choice.rtol, 2 * _UNIT.get(dtype, 0.0))


def _check_network(
    plan: EnginePlan,
    source: Network,
    inputs: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
    found: Checked,
    images: Images | None = None,
) -> None:
    """The outputs against the source network in float64.

    FP32 is judged by the source network's own error in FP32, which no pass can touch. Where the engine stores smaller types, the
    lowered network must first pass that same test in float64; then the emulation's own roundings are allowed for on top.
    """
    truth = list(_reference(source, inputs, images, widen=True).values())
    # By place: an output that is an input has another name in the engine.
    names = [t.name for t in plan.network.outputs]
    errors = dict(zip(names, (output_error(got[n], t) for n, t in zip(names, truth, strict=True)), strict=True))
    found.network_error = max(errors.values(), default=0.0)
    if found.network_error <= FLOOR:
        return
    found.emulation_error = worst_error(_reference(source, inputs, images).values(), truth)
    found.network_bound = max(FLOOR, FACTOR * found.emulation_error)
    if found.network_error <= found.network_bound:
        return
    if any(computes_tf32(c) or any(d in _UNIT for _, d in c.outputs) for c in plan.choices.values()):
        lowered = list(_reference(plan.network, inputs, images, widen=True).values())
        if worst_error(lowered, truth) <= found.network_bound:
            found.emulation_error = worst_error(emulate(plan, inputs, images).values(), lowered)
            found.network_bound = max(found.network_bound, FACTOR * found.emulation_error)
    if found.network_error > found.network_bound and has_ties(source):
        def run(net: Network) -> dict[str, np.ndarray]:
            return _reference(net, inputs, images, widen=True)

        ties = max(worst_error(outputs, truth) for outputs in nudged_outputs(source, inputs, run))
        found.emulation_error = max(found.emulation_error, ties)
        found.network_bound = max(found.network_bound, FACTOR * found.emulation_error)
    if found.network_error > found.network_bound:
        worst = max(errors, key=lambda n: errors[n])
        what = (
            f"the network's output '{worst}' is off by {errors[worst]:.2g} against float64, allowed is {found.network_bound:.2g} "
            f"(4 times an emulation's {found.emulation_error:.2g}), though every layer is within its own bound. Nearest to its bound: "
            f"'{found.worst[0]}' with {found.worst[1]:.2g} of {found.worst[2]:.2g}."
        )
        found.failures.append(Failure("", "", found.network_error, found.network_bound, what))


def _reference(net: Network, inputs: Mapping[str, np.ndarray], images: Images | None, *, widen: bool = False) -> dict[str, np.ndarray]:
    """Outputs of a network by the reference, of the judged images where not all are."""
    return run_network(net, inputs, widen=widen) if images is None else network_on_images(net, inputs, images, widen=widen)


def verification_inputs(plan: EnginePlan, inputs: Mapping[str, np.ndarray] | None, config: BuildConfig) -> dict[str, np.ndarray]:
    """What verification feeds: the user's data, or the probe's."""
    if inputs is not None:
        return {k: np.asarray(v) for k, v in inputs.items()}
    return probe_inputs(plan.network, config.seed, probe_shapes(plan))


def ban_failures(search: Any, checked: Checked, best: Any, tell: Noting) -> None:
    """Bans the kernels that failed, so that the next search leaves them out."""
    for f in checked.failures:
        if f.layer:
            ban(search, f.layer, best.chosen[f.layer], f"failed verification: {f}", tell)


def ban(search: Any, layer: str, option: Any, reason: str, tell: Noting) -> None:
    """Bans one option of a layer, or of all reformats when the layer is one."""
    tell.note(f"banned: {reason}")
    if layer in search.kind_of:
        search.ban(layer, option.ident, reason)
    else:
        search.reformats.ban(option.ident, reason)
        search.banned.append((layer, f"{option.ident[0]} {option.ident[1]} {dict(option.ident[2])}", reason))
