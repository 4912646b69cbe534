"""Concatenation in one launch: the kernel compiled for the host, its machine code, and on a GPU both ways against the reference."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.host_cuda import HostLaunch, compile_launches, host_compiler
from whet.backends.cuda.compile import compile_cubin
from whet.network import from_stored, static_shape, to_stored
from whet.ops import Sample, sample_layer
from whet.tactics import Args
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.move import concat
from whet.tactics.cuda.move.concat import Concat

LAYERS = {
    "dense block": ([f"f32[2,{n},6,5]" for n in (64, *[32] * 36)], {"axis": 1}),
    "odd channels": (["f32[2,3,4,5]", "f32[2,7,4,5]", "f32[2,1,4,5]"], {"axis": 1}),
    "one empty": (["f32[2,8,4,5]", "f32[2,0,4,5]", "f32[2,24,4,5]"], {"axis": 1}),
    "rows": (["f32[3,40]", "f32[2,40]", "f32[5,40]"], {"axis": 0}),
    "taps": (["f32[1,6,8,9,32]"] * 3, {"axis": 4}),
    "integers": (["u8[2,5,3]", "u8[2,6,3]"], {"axis": 1}),
}


def cases():
    for name, given in LAYERS.items():
        _, layer, arrays = sample_layer("Concat", Sample(*given))
        for signature in Concat().signatures(layer, HOPPER):
            yield name, layer, arrays, signature


@pytest.mark.skipif(host_compiler() is None, reason="needs a C++ compiler")
def test_the_kernel_moves_every_part_to_its_position(monkeypatch):
    monkeypatch.setattr(concat, "launch", HostLaunch.of)
    runs = []
    for name, layer, arrays, signature in cases():
        parts = [np.ascontiguousarray(to_stored(a.astype(o.dtype.numpy), o.format)) for a, o in zip(arrays, signature.inputs, strict=True)]
        out = signature.outputs[0]
        want = np.concatenate([a.astype(out.dtype.numpy) for a in arrays], layer.attrs["axis"])
        got = np.full(want.size, 7, out.dtype.numpy)
        kernel = Concat().plan(layer, signature, (("joint", 1),), HOPPER)
        made = kernel.launches(Args(tuple(p.ctypes.data for p in parts), (got.ctypes.data,), (), 0))
        assert len(made) == -(-sum(p.size > 0 for p in parts) // 32)
        runs.append((name, made, parts, got, want, out.format))
    run = compile_launches([x for r in runs for x in r[1]])
    for name, made, _, got, want, form in runs:
        run(made)
        np.testing.assert_array_equal(from_stored(got, form, want.shape), want, err_msg=f"{name} {form}")


@pytest.mark.parametrize(("unit", "parts", "each"), [(16, 32, 4), (16, 2, 1), (2, 4, 1)])
def test_machine_code(unit, parts, each, tmp_path):
    text = sass(compile_cubin(emit_kernel_source("concat.cu", {"UNIT": unit, "PARTS": parts, "EACH": each}), name="concat"), tmp_path)
    assert "LDL" not in text
    assert "STL" not in text
    assert text.count("LDG.E.128" if unit == 16 else "LDG.E.U16") == each


@pytest.mark.gpu
@pytest.mark.parametrize("config", [(("joint", 1),), ()], ids=str)
def test_parts_of_any_count_match_the_reference(gpu, config):
    for name, layer, arrays, signature in cases():
        kernel = Concat().plan(layer, signature, config, gpu)
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{name} {signature}")


@pytest.mark.gpu
def test_many_values_match_the_reference(gpu):
    """Several units of a thread."""
    _, layer, arrays = sample_layer("Concat", Sample(["f32[4,64,64,64]", "f32[4,96,64,64]", "f32[4,32,64,64]"], {"axis": 1}))
    assert static_shape(layer.output.shape) == (4, 192, 64, 64)
    for signature in Concat().signatures(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, Concat().plan(layer, signature, (("joint", 1),), gpu))
        judge(got[0], reference(layer, fed)[0], 0.0, signature.outputs[0].dtype, str(signature))
