"""The contract test of an op for its authors: types against the reference, and every tactic against the reference on all samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend, get_backend
from whet.builder.verify.differences import compare_output
from whet.errors import BuildError, NetworkError, VerificationError
from whet.network import Layer, compute_stored_shape, from_stored, static_shape, to_stored
from whet.ops import get_op, infer_layer, run_layer, sample_layer
from whet.runtime.memory import read_bytes, write_bytes
from whet.tactics import Args, Config, PlanRefused, Signature, Tactic, list_tactics


@dataclass(frozen=True)
class Checked:
    """A tactic that computed a sample: its error (max|e|/max|ref| and ||e||/||ref||, the larger) is within `rtol`."""

    op: str
    sample: int
    tactic: str
    signature: str
    config: Config
    error: float
    rtol: float


def check_samples(name: str, *, backend: str = "cpu") -> list[Checked]:
    """Runs all samples of the op `name` ("<domain>.<op>") on all of its tactics of a backend.

    Raises VerificationError that names sample and tactic if a result differs from the reference by more than the tactic's `rtol`, NetworkError if
    types from `infer` differ from the reference's arrays, BuildError if a tactic has no sample that it computes.
    """
    op, device = get_op(name), get_backend(backend)
    if not op.samples:
        raise NetworkError(f"the op {name} has no samples; give register(..., samples=[(['f32[2,8]'], {{}})])")
    own = [t for t in list_tactics(backend) if name in t.ops or ("*" in t.ops and not t.opt_in)]
    found: list[Checked] = []
    for k in range(len(op.samples)):
        _, layer, arrays = sample_layer(name, op.samples[k])
        want = run_layer(layer, arrays)
        _check_types(layer, want, k)
        for t in own:
            found += _check_tactic(t, layer, arrays, want, device, k)
    idle = [t.name for t in own if "*" not in t.ops and t.unavailable() is None and t.name not in {c.tactic for c in found}]
    if idle:
        raise BuildError(f"no sample of {name} is computed by {', '.join(idle)}: add a sample that it does not refuse")
    return found


def _check_types(layer: Layer, want: Sequence[np.ndarray], sample: int) -> None:
    types, _ = infer_layer(layer)
    for t, a in zip(types, want, strict=True):
        if static_shape(t.shape) != a.shape or t.dtype.numpy != a.dtype:
            raise NetworkError(f"sample {sample} of {layer.op}: infer gives {t}, the reference an array {a.dtype}{list(a.shape)}; they must agree")


def _check_tactic(t: Tactic, layer: Layer, arrays: Sequence[np.ndarray | None], want: Sequence[np.ndarray], device: Backend, k: int) -> list[Checked]:
    if t.why_not(layer) or t.unavailable():
        return []
    found = []
    for signature in t.signatures(layer, device):
        if t.refuses(layer, signature, device):
            continue
        for config in t.configs(layer, signature, device):
            try:
                kernel = t.plan(layer, signature, config, device)
            except PlanRefused:
                continue
            worst = 0.0
            for got, ref, out in zip(_run_kernel(kernel, layer, signature, arrays, device), want, layer.outputs, strict=True):
                error, reason = compare_output(got, ref, out.dtype, kernel.rtol)
                if error > kernel.rtol:
                    raise VerificationError(
                        f"sample {k} of {layer.op}: {t.name} {signature} {dict(config) or ''} differs from the reference by {error:.3g} "
                        f"{reason}, more than its rtol {kernel.rtol:.3g}. Correct the kernel, or raise rtol if the error is its rounding."
                    )
                worst = max(worst, error)
            found.append(Checked(layer.op, k, t.name, str(signature), config, worst, kernel.rtol))
    return found


def _run_kernel(kernel, layer: Layer, signature: Signature, arrays: Sequence[np.ndarray | None], device: Backend) -> list[np.ndarray]:
    """The kernel's results; memory that it does not write has the bytes 0xFF (NaN)."""
    inputs, packed, outputs = [], [], []
    for o, a in zip(signature.inputs, arrays, strict=True):
        inputs.append(None if o is None or a is None else _upload(to_stored(a.astype(o.dtype.numpy), o.format), device))
    for n in kernel.outputs:
        outputs.append(_upload(np.full(max(n, 1), 0xFF, np.uint8), device))
    for i, j in signature.inplace:
        shared = inputs[i]
        assert shared is not None
        outputs[j] = shared
    packed = [_upload(p.make(), device) for p in kernel.packed]
    scratch = device.allocate(max(kernel.scratch, 1))
    stream = device.stream()
    addresses = tuple(0 if b is None else b.address for b in inputs)
    args = Args(addresses, tuple(b.address for b in outputs), tuple(b.address for b in packed), scratch.address if kernel.scratch else 0)
    kernel.enqueue(args, stream)
    stream.finish().run()
    found = []
    for t, o, b, n in zip(layer.outputs, signature.outputs, outputs, kernel.outputs, strict=True):
        shape = static_shape(t.shape)
        stored = read_bytes(device, b, 0, n).view(o.dtype.numpy).reshape(static_shape(compute_stored_shape(o.format, shape)))
        found.append(np.array(from_stored(stored, o.format, shape)).astype(t.dtype.numpy))
    return found


def _upload(stored: np.ndarray, device: Backend):
    buffer = device.allocate(max(stored.nbytes, 1))
    write_bytes(device, buffer, 0, stored)
    return buffer
