"""Plans the kernel of a choice; if the choice cannot run on this machine, a safe kernel with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whet.backends import Backend, get_backend
from whet.engine.plan import Choice, EnginePlan
from whet.errors import BackendError, BuildError, EngineError, WhetError
from whet.network import DTYPES, FORMATS, Layer, format_fits, static_shape
from whet.ops import bind_layer, bind_symbols
from whet.runtime.safe import SafeKernel
from whet.tactics import TACTICS, Config, Kernel, Operand, Signature, Tactic, count_operand_bytes, get_tactic, list_tactics, load_tactic
from whet.tactics.host_layers import UNEXPECTED_ERRORS

_MAX_CONFIGS = 4  # configs of a tactic that a fallback tries


@dataclass(frozen=True)
class Planned:
    """A layer with static shapes and its kernel. `fell_back` is the reason why the stored choice cannot run, "" if it runs."""

    layer: Layer
    signature: Signature
    kernel: Kernel
    tactic: str
    fell_back: str = ""


def make_signature(choice: Choice, layer: Layer) -> Signature:
    """The operands of a choice. Raises EngineError if they do not match the layer."""
    if len(choice.inputs) != len(layer.inputs) or len(choice.outputs) != len(layer.outputs):
        raise EngineError(
            f"layer '{layer.name}' has {len(layer.inputs)} inputs and {len(layer.outputs)} outputs, its choice "
            f"{len(choice.inputs)} and {len(choice.outputs)}: the engine is inconsistent"
        )
    ins = tuple(None if o is None else _make_operand(o, layer, t) for o, t in zip(choice.inputs, layer.inputs, strict=True))
    for o, t in zip(ins, layer.inputs, strict=True):
        if o is None and t is not None and not t.is_constant:
            raise EngineError(f"layer '{layer.name}': the choice does not say how %{t.name} is stored")
    outs = tuple(_make_operand(o, layer, t) for o, t in zip(choice.outputs, layer.outputs, strict=True))
    for i, j in choice.inplace:
        if not (0 <= i < len(ins) and 0 <= j < len(outs)) or ins[i] is None:
            raise EngineError(f"layer '{layer.name}': in-place pair {i}->{j} names no operands")
    return Signature(ins, outs, tuple(choice.inplace))


def _make_operand(o: tuple[str, str], layer: Layer, t) -> Operand:
    fmt, dtype = o
    if t is None or fmt not in FORMATS or dtype not in DTYPES or not format_fits(fmt, t.type.rank):
        raise EngineError(f"layer '{layer.name}': {t} cannot be stored as {dtype}:{fmt}")
    return Operand(fmt, DTYPES[dtype])


def plan_layer(layer: Layer, choice: Choice, backend: Backend, refusal: str | None = None) -> Planned:
    """The kernel of `choice` for `layer` (static shapes); if it cannot run here, that of a safe tactic with the same operands.

    `refusal` is a reason why the choice must not be planned at all (see ConfigCheck). Raises EngineError if the choice does not match the
    layer, BackendError if no tactic can compute the layer here.
    """
    signature = make_signature(choice, layer)
    try:
        if refusal is not None:
            raise BuildError(refusal)
        return _check_sizes(Planned(layer, signature, _plan(choice, layer, signature, backend), choice.tactic))
    except (BuildError, BackendError) as e:
        return _fall_back(layer, choice, signature, backend, str(e))


class ConfigCheck:
    """Admits a stored config only if its tactic lists it: configs reach kernel sources, so an engine file cannot invent one.

    A tactic's list depends on the layer's shapes. The builder selects from the list at the opt shapes of a profile, and the config then serves
    all shapes of the profile; so the list at the opt shapes decides. Each layer is checked once.
    """

    def __init__(self) -> None:
        self._refusals: dict[Layer, str | None] = {}

    def explain_refusal(self, plan: EnginePlan, profile: int, layer: Layer, backend: Backend) -> str | None:
        """The reason why the config of `layer` (of the plan's network, possibly symbolic) is not admitted; None if it is."""
        if layer not in self._refusals:
            self._refusals[layer] = self._explain_refusal(plan, profile, layer, backend)
            backend.activate()  # listing for one thread has set the calling thread's count
        return self._refusals[layer]

    @staticmethod
    def _explain_refusal(plan: EnginePlan, profile: int, layer: Layer, backend: Backend) -> str | None:
        first: str | None = None
        for listing in _iterate_listing_backends(backend):
            for bound in _iterate_opt_layers(plan, profile, layer):
                reason = explain_config_refusal(bound, plan.choices[layer.name], listing)
                if reason is None:
                    return None
                first = first or reason
        return first


def _iterate_listing_backends(backend: Backend) -> Iterator[Backend]:
    """Backends whose lists are admitted: this one, and of a device with workers the one with one thread, for which samples are tuned."""
    yield backend.with_sources_to(lambda sources: None)  # only the stored config is compiled
    if backend.capabilities.workers and backend.threads != 1:
        yield get_backend(backend.name, threads=1)


def _iterate_opt_layers(plan: EnginePlan, profile: int, layer: Layer) -> Iterator[Layer]:
    """`layer` at the opt shapes of a profile, then of the others that share its choices."""
    order = [profile, *(k for k in range(len(plan.profiles)) if k != profile)] if plan.profiles else []
    for k in order or [0]:
        given = plan.profiles[k].shapes if plan.profiles else {}
        shapes = {t.name: tuple(given[t.name][1]) if t.name in given else static_shape(t.shape) for t in plan.network.inputs}
        env = bind_symbols([(t.name, t.type) for t in plan.network.inputs], shapes)
        yield bind_layer(layer, env) if env else layer


def explain_config_refusal(layer: Layer, choice: Choice, backend: Backend) -> str | None:
    """The reason why a tactic does not list the config of a choice for a layer of static shapes; None if it does or is unknown here."""
    _load(choice.tactic, backend)
    t = TACTICS.get(choice.tactic)
    if t is None or t.backend != backend.name:
        return None  # planning reports it
    signature = make_signature(choice, layer)
    try:
        reason = t.why_not(layer)
        if reason is None and signature not in t.signatures(layer, backend):
            reason = f"does not take {signature}"
        reason = reason or t.refuses(layer, signature, backend)
        if reason is not None:
            return f"{t.name} at the profile's opt shapes: {reason}"
        listed = [_add_value_types(c) for c in t.configs(layer, signature, backend)]
    except (WhetError, *UNEXPECTED_ERRORS) as e:  # a layer that the tactic does not expect: an engine file may contain anything
        return f"{t.name} does not understand the layer: {type(e).__name__} {e}"
    return (
        None
        if _add_value_types(choice.config) in listed
        else f"{t.name} does not list the stored config {str(dict(choice.config))[:200]} for this layer"
    )


def _add_value_types(config: Config) -> tuple[tuple[str, type, int | str], ...]:
    """A config that is equal to another one only if its values have the same types: True is not 1."""
    return tuple((name, type(value), value) for name, value in config)


def _load(name: str, backend: Backend) -> None:
    """Imports a tactic if it is one of this backend."""
    if name.partition("/")[0] == backend.name:
        load_tactic(name)


def _plan(choice: Choice, layer: Layer, signature: Signature, backend: Backend) -> Kernel:
    _load(choice.tactic, backend)
    t = get_tactic(choice.tactic)
    if t.backend != backend.name:
        raise BackendError(f"{choice.tactic} is for the backend {t.backend}, this is {backend.name}")
    return _plan_first(t, layer, signature, choice.config, backend)


def _plan_first(t: Tactic, layer: Layer, signature: Signature, config: Config | None, backend: Backend) -> Kernel:
    """The kernel of one tactic (config None: the first that plans). Raises BuildError with the tactic's reason, BackendError."""
    try:
        if reason := t.why_not(layer):
            raise BuildError(f"{t.name}: {reason}")
        if signature not in t.signatures(layer, backend):
            raise BuildError(f"{t.name} does not take {signature}")
        if reason := t.refuses(layer, signature, backend):
            raise BuildError(f"{t.name}: {reason}")
        if config is not None:
            return t.plan(layer, signature, config, backend)
        for c in t.configs(layer, signature, backend)[:_MAX_CONFIGS]:
            try:
                return t.plan(layer, signature, c, backend)
            except BuildError:
                continue
    except UNEXPECTED_ERRORS as e:  # a layer or config that the tactic does not expect: an engine file may contain anything
        raise BuildError(f"{t.name} does not understand the layer or its config: {type(e).__name__} {e}") from e
    raise BuildError(f"{t.name} has no config that runs here")


def _fall_back(layer: Layer, choice: Choice, signature: Signature, backend: Backend, why: str) -> Planned:
    """A kernel with the same operands: another config of the same tactic, a library's tactic, whet's own, an opt-in one, one that
    computes on the host; on backends with host memory also the reference in any format."""

    def order(t: Tactic) -> tuple[bool, bool, bool, bool, str]:
        return t.name != choice.tactic, "numpy" in t.name or "host_" in t.name, t.opt_in, not t.library, t.name

    for t in sorted(list_tactics(backend.name), key=order):
        try:
            return _check_sizes(Planned(layer, signature, _plan_first(t, layer, signature, None, backend), t.name, why))
        except WhetError:
            continue
    if not backend.capabilities.host_memory:
        raise BackendError(f"no tactic of {backend.name} computes layer '{layer.name}' as the engine stores it: {why}. Build the engine again here.")
    return Planned(layer, signature, SafeKernel(layer, signature), "safe reference", why)


def _check_sizes(p: Planned) -> Planned:
    """Refuses a kernel if its operand sizes differ from those of the formats, because offsets in the arena would be wrong."""
    for kind, tensors, operands, sizes in (
        ("input", p.layer.inputs, p.signature.inputs, p.kernel.inputs),
        ("output", p.layer.outputs, p.signature.outputs, p.kernel.outputs),
    ):
        for i, (t, o, size) in enumerate(zip(tensors, operands, sizes, strict=True)):
            want = count_operand_bytes(t, o) if t is not None and o is not None else 0
            if size not in (want, 0 if o is None else want):
                raise BuildError(f"{p.tactic} takes {size} bytes for {kind} {i} of '{p.layer.name}', its format has {want}")
    return p


def list_library_versions(choices: Mapping[str, Choice], backend: Backend) -> dict[str, str]:
    """Versions of the selected tactics' libraries, by tactic; tactics that are not installed are omitted.

    The builder stores them as `plan.machine["libraries"]`; at load a difference is reported and the probe runs.
    """
    names = {c.tactic for c in choices.values()}
    for name in names:
        _load(name, backend)
    versions = {n: TACTICS[n].library_version() for n in sorted(names) if n in TACTICS}
    return {n: v for n, v in versions.items() if v}
