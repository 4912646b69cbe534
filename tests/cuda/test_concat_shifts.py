"""Shifted copies concatenated in one launch: the kernel compiled for the host, and on a GPU against the reference."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, reference

from support.host_cuda import HostLaunch, compile_launches, host_compiler
from whet.composites.concat_shifts import concat_shifts_sample
from whet.ops import sample_layer
from whet.tactics import Args
from whet.tactics.cuda.move import concat
from whet.tactics.cuda.move.concat_shifts import ConcatShifts, list_parts

SHAPES = {
    "depth taps": ((1, 6, 5, 4, 32), (1, 0, -1), 1),
    "several items": ((3, 4, 2, 8), (2, 0, -1, -3), 1),
    "nearly all zeros": ((2, 3, 4, 5), (2, -2), 1),
    "another axis": ((2, 3, 7, 16), (1, -2), 2),
}


def layer_of(name):
    return sample_layer("Fused", concat_shifts_sample(*SHAPES[name]))[1:]


def test_parts_are_read_off_the_body():
    layer, _ = layer_of("several items")
    assert list_parts(layer) == [(0, 1, 2), (0, 1, 0), (0, 1, -1), (0, 1, -3)]
    layer.regions["body"].layers[-1].attrs["axis"] = 1
    assert list_parts(layer) is None


@pytest.mark.skipif(host_compiler() is None, reason="needs a C++ compiler")
def test_the_kernel_shifts_every_part(monkeypatch):
    monkeypatch.setattr(concat, "launch", HostLaunch.of)
    runs = []
    for name in SHAPES:
        layer, (x,) = layer_of(name)
        for signature in ConcatShifts().signatures(layer, HOPPER):
            numpy = signature.outputs[0].dtype.numpy
            source = np.ascontiguousarray(x.astype(numpy))
            want = reference(layer, [source.astype(np.float32)])[0].astype(numpy)
            got = np.full(want.size, 7, numpy)
            (made,) = ConcatShifts().plan(layer, signature, (), HOPPER).launches(Args((source.ctypes.data,), (got.ctypes.data,), (), 0))
            runs.append((f"{name} {signature}", made, source, got, want))
    run = compile_launches([r[1] for r in runs])
    for name, made, _, got, want in runs:
        run([made])
        np.testing.assert_array_equal(got.reshape(want.shape), want, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_results_match_the_reference(gpu, name):
    layer, arrays = layer_of(name)
    for signature in ConcatShifts().signatures(layer, gpu):
        kernel = ConcatShifts().plan(layer, signature, (), gpu)
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, str(signature))
