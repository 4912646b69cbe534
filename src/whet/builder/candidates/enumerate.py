"""Listing the candidates of a layer: every tactic, signature and configuration, planned or refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from whet.backends import Backend
from whet.builder.candidates.compile_ahead import list_configs_with_texts
from whet.builder.precision.permissions import Permissions
from whet.engine.report import Candidate
from whet.errors import BackendError, NetworkError, NoTacticError
from whet.measure.option import Option
from whet.measure.timing_key import format_layer_text
from whet.network import Layer
from whet.tactics import Kernel, PlanRefused, Signature, Tactic


@dataclass
class Candidates:
    """All options of one kind of layer (equal text, equal work) and the refused candidates."""

    layer: Layer  # a representative, with static shapes
    text: str
    options: list[Option] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)


def list_candidates(
    layer: Layer,
    tactics: list[Tactic],
    backend: Backend,
    permissions: Permissions,
    *,
    deterministic: bool = False,
    strict_numerics: bool = False,
    workspace: int | None = None,
) -> Candidates:
    """Options of `layer` (static shapes) in order: tactics by name, then opt-in tactics (so that they lose ties), then fallbacks; signatures and
    configurations as each tactic lists them.

    `deterministic` refuses nondeterministic kernels, `strict_numerics` kernels that mix values or lose NaN (Tactic.not_strict), `workspace` kernels
    that need more scratch (bytes).
    """
    listed = Candidates(layer, format_layer_text(layer))
    for t in sorted(tactics, key=lambda t: (t.fallback, t.opt_in, t.name)):
        if (reason := t.why_not(layer) or permissions.refuses_tactic(t.name)) is not None:
            listed.refused.append(Candidate(t.name, "", (), reason=reason))
            continue
        try:
            signatures = t.signatures(layer, backend)
        except NetworkError as e:  # a shape known only at run time
            listed.refused.append(Candidate(t.name, "", (), reason=str(e)))
            continue
        for signature in signatures:
            reason = _explain_malformed(layer, signature) or permissions.refuses(layer, signature) or t.refuses(layer, signature, backend)
            if reason is not None:
                listed.refused.append(Candidate(t.name, str(signature), (), reason=reason))
                continue
            for config, texts in list_configs_with_texts(t, layer, signature, backend):
                try:
                    kernel = t.plan(layer, signature, config, backend)
                except (PlanRefused, BackendError, NetworkError) as e:
                    listed.refused.append(Candidate(t.name, str(signature), tuple(config), reason=str(e)))
                    continue
                reason = _explain_kernel_refusal(kernel, deterministic, workspace)
                if reason is None and strict_numerics and (why := t.not_strict(layer, kernel.implementation)) is not None:
                    reason = f"{why}, and --strictNumerics is given"
                if reason is not None:
                    listed.refused.append(Candidate(t.name, str(signature), tuple(config), kernel.implementation, reason=reason))
                    continue
                option = Option(t, signature, config, kernel, len(listed.options), texts=texts)
                option.estimate_ms = estimate_ms(option, layer)
                listed.options.append(option)
    return listed


def _explain_malformed(layer: Layer, signature: Signature) -> str | None:
    """The reason why a signature is invalid (it has no format for a computed input), or None."""
    for t, o in zip(layer.inputs, signature.inputs, strict=True):
        if t is not None and not t.is_constant and o is None:
            return f"does not say how it reads %{t.name}"
    return None


def _explain_kernel_refusal(kernel: Kernel, deterministic: bool, workspace: int | None) -> str | None:
    if deterministic and not kernel.deterministic:
        return "its results may differ from run to run, and --deterministic is given"
    if workspace is not None and kernel.scratch > workspace:
        return f"needs {kernel.scratch / 2**20:.2f} MiB of scratch, --memPoolSize=workspace allows {workspace / 2**20:.2f} MiB"
    return None


def make_no_tactic_error(layer: Layer, refused: list[Candidate], backend: Backend, others: Sequence[Layer] = ()) -> NoTacticError:
    """The error for a layer that no tactic computes: refusals of the tactics for its op, the names of `others` like it, and the remedies."""
    elsewhere = [c for c in refused if c.reason.startswith("computes ") and ", not " in c.reason]
    lines = [f"  {c.tactic}{' ' + c.signature if c.signature else ''}: {c.reason}" for c in refused if c not in elsewhere]
    lines += [f"  {len(elsewhere)} tactics are for other ops"] if elsewhere else []
    on_host = "\n--allowFallback lets such layers run on the host, which copies their inputs and outputs."
    more = ", ".join(f"{x.op} '{x.name}'" for x in others)
    return NoTacticError(
        f"No tactic of '{backend.name}' computes {layer.op} '{layer.name}' (from {', '.join(layer.sources) or 'no node'}):\n"
        + "\n".join(lines)
        + (f"\nNothing computes these either: {more}." if more else "")
        + (on_host if "allowFallback" in backend.capabilities.flag_sources else "")
        + "\nAllow more precisions, or write a tactic for it (docs/adding.md)."
    )


# Without times, estimates from bytes and operations order the options; fallbacks in Python cost far more.
_BYTES_PER_MS, _OPS_PER_MS, _LAUNCH_MS = 10e6, 50e6, 0.002

_MOVE_NOTHING = frozenset({"Reformat", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Transpose"})  # in place


def estimate_ms(option: Option, layer: Layer) -> float:
    """A rough time from bytes and multiply-adds; the index in the listing breaks ties."""
    k = option.kernel
    if option.signature.inplace and layer.op in _MOVE_NOTHING:
        return 1e-6 * (1 + option.rank)
    shared = sum(k.outputs[o] for _, o in option.signature.inplace)
    moved = sum(k.inputs) + sum(k.outputs) - shared + sum(p.nbytes for p in k.packed)
    ms = _LAUNCH_MS + moved / _BYTES_PER_MS + count_macs(layer) / _OPS_PER_MS
    if option.tactic.fallback:
        ms = 10 * ms + 0.1
    elif k.implementation.startswith("ref"):
        ms *= 10  # plain loops of a library
    return ms * (1 + 1e-3 * option.rank)


def count_macs(layer: Layer) -> int:
    """Multiply-adds of the convolutions and matrix products in a layer with static shapes; 0 for others."""
    if layer.regions:
        return sum(count_macs(inner) for region in layer.regions.values() for inner in region.layers)
    if layer.op not in ("Conv", "ConvTranspose", "Gemm", "MatMul") or not all(t.type.static for t in layer.outputs):
        return 0
    w, out = layer.inputs[1], layer.outputs[0]
    if w is None or not w.type.static:
        return 0
    if layer.op == "Conv":
        return _count(out.shape) * _count(w.shape[1:])
    if layer.op == "ConvTranspose":
        return _count(layer.needs(0).shape) * _count(w.shape[1:])
    inner = (
        w.shape[0]
        if layer.op == "Gemm" and not layer.attrs.get("transB")
        else w.shape[-1]
        if layer.op == "Gemm"
        else w.shape[max(0, w.type.rank - 2)]
    )
    return _count(out.shape) * int(inner)


def _count(shape) -> int:
    n = 1
    for d in shape:
        n *= int(d)
    return n
