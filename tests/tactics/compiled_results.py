"""Checks for compiled kernels with one or several results: every config against float64 on given thread counts, operands at other addresses."""

import numpy as np
from test_onednn_tactics import Listed, compute, place

from whet.backends.cpu import CpuBackend
from whet.network import compute_stored_shape, from_stored
from whet.ops import run_regions
from whet.tactics import Args, get_tactic
from whet.tactics.cpu.onednn import _api as dnn


def computed(name, layer, arrays, threads, monkeypatch):
    """The kernel of each config, after all of them were compared with float64; small layers use all threads too."""
    want = run_regions(layer, [a.astype(np.float64) for a in arrays])
    tactic, machine = get_tactic(name), CpuBackend(threads=threads)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    (signature,) = tactic.signatures(layer, machine)
    configs, kernels = tactic.configs(layer, signature, machine), []
    assert configs
    monkeypatch.setattr(type(tactic.plan(layer, signature, configs[0], machine)), "serial_work", 0)
    assert tactic.refuses(layer, signature, machine) is None
    for config in configs:
        kernel, got, _ = compute(layer, arrays, tactic, signature, config)
        for one, other in zip(got, want, strict=True):
            assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max(), config
        kernels.append(kernel)
    return kernels


def check_pointed_elsewhere(name, layer, arrays):
    """Inputs and results are bound to other addresses after the launches were recorded: parts of a Concat, users' own arrays."""
    tactic, machine = get_tactic(name), CpuBackend(threads=2)
    (signature,) = tactic.signatures(layer, machine)
    for config in tactic.configs(layer, signature, machine):
        kernel = tactic.plan(layer, signature, config, machine)
        packed, stream, scratch = [p.make() for p in kernel.packed], Listed(), dnn.allocate_aligned(max(kernel.scratch, 64))
        assert [p.nbytes for p in packed] == [p.nbytes for p in kernel.packed]
        nowhere = [dnn.allocate_aligned(max(n, 64)) for n in (*kernel.inputs, *kernel.outputs)]
        at = [b.ctypes.data for b in nowhere]
        kernel.enqueue(Args(tuple(at[: len(arrays)]), tuple(at[len(arrays) :]), tuple(p.ctypes.data for p in packed), scratch.ctypes.data), stream)
        images = {i: place(arrays[i], o) for i, o in enumerate(signature.inputs) if o is not None}
        outs = [dnn.allocate_aligned(n) for n in kernel.outputs]
        for call in stream.calls:
            for i, image in images.items():
                call.set_address("input", i, image.ctypes.data)
            for i, out in enumerate(outs):
                call.set_address("output", i, out.ctypes.data)
            call.run()
        for out, want in zip(outs, run_regions(layer, arrays), strict=True):
            stored = signature.outputs[0].format
            got = from_stored(out.view(np.float32).reshape(compute_stored_shape(stored, want.shape)), stored, want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def check_odd_numbers(name, layer, arrays, least):
    """NaN and infinities in `arrays` change the same pixels as in the reference, at least `least` of them, and no others."""
    with np.errstate(all="ignore"):
        want = run_regions(layer, arrays)
    tactic, machine = get_tactic(name), CpuBackend(threads=1)
    (signature,) = tactic.signatures(layer, machine)
    for config in tactic.configs(layer, signature, machine):
        _, got, _ = compute(layer, arrays, tactic, signature, config)
        for one, other in zip(got, want, strict=True):
            assert np.isnan(other[0, 0]).sum() >= least
            np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
