"""Batch normalization of concatenated images: the kernel compiled for the host, its machine code, and on a GPU DenseNet's sizes."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.host_cuda import HostLaunch, compile_launches, host_compiler
from whet.backends.cuda.compile import compile_cubin
from whet.composites.concat_norm import CONCAT_NORM, concat_norm_sample
from whet.network import from_stored, static_shape, to_stored
from whet.ops import sample_layer
from whet.tactics import Args
from whet.tactics.cuda._device.kernel import RTOL
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.norm import concat_norm
from whet.tactics.cuda.norm.concat_norm import ConcatNorm


@pytest.mark.skipif(host_compiler() is None, reason="needs a C++ compiler")
def test_the_kernel_normalizes_every_part(monkeypatch):
    monkeypatch.setattr(concat_norm, "launch", HostLaunch.of)
    runs = []
    for sample in CONCAT_NORM.samples[:2]:  # clips and no activation: the host has no others
        _, layer, arrays = sample_layer("Fused", sample)
        for signature in ConcatNorm().signatures(layer, HOPPER):
            pairs = list(zip(arrays, signature.inputs, strict=True))
            stored = [None if o is None else np.ascontiguousarray(to_stored(a.astype(o.dtype.numpy), o.format)) for a, o in pairs]
            out = signature.outputs[0]
            shape = static_shape(layer.outputs[0].shape)
            got = np.full(int(np.prod(shape)), 7, out.dtype.numpy)
            kernel = ConcatNorm().plan(layer, signature, (), HOPPER)
            packed = [p.make().view(np.float32).copy() for p in kernel.packed]
            addresses = tuple(0 if a is None else a.ctypes.data for a in stored)
            (made,) = kernel.launches(Args(addresses, (got.ctypes.data,), tuple(p.ctypes.data for p in packed), 0))
            rounded = [a if o is None else a.astype(o.dtype.numpy).astype(np.float32) for a, o in pairs]
            runs.append((made, stored, packed, got, reference(layer, rounded)[0], out, shape))
    run = compile_launches([r[0] for r in runs])
    for made, _, _, got, want, out, shape in runs:
        run([made])
        judge(from_stored(got, out.format, shape), want, RTOL[out.dtype.name], out.dtype, str(out))
    assert len(runs) == 6


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_machine_code(kind, tmp_path):
    text = sass(compile_cubin(emit_kernel_source("concat_norm.cu", {"TYPE": kind, "ACT": 0, "PARTS": 32}), name="concat_norm"), tmp_path)
    assert "LDL" not in text
    assert "STL" not in text
    assert text.count("LDG.E.128") >= 5, "16 bytes of values, twice 32 of factors and shifts"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, (64, *[32] * 6), 56, 56), (4, (256, *[32] * 24), 14, 14), (3, (8, 16), 5, 3)], ids=str)
def test_dense_blocks_match_the_reference(gpu, sizes):
    _, layer, arrays = sample_layer("Fused", concat_norm_sample(*sizes))
    for signature in ConcatNorm().signatures(layer, gpu):
        kernel = ConcatNorm().plan(layer, signature, (), gpu)
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, str(signature))
