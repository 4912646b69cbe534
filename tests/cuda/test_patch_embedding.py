"""Windows of images as rows of a matrix: the kernel compiled for the host gives the values that each window reads."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.compiling import first_configs
from support.host_cuda import HostLaunch, compile_launches, host_compiler
from whet.backends.cuda.compile import compile_cubin
from whet.network.types import F16
from whet.ops import Sample, sample_layer
from whet.tactics import Args
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv import patch_embedding
from whet.tactics.cuda.conv.patch_embedding import PatchEmbedding, list_plane_signatures

LAYERS = {
    "transformer": (["f32[2,3,64,48]", "const f32[96,3,16,16]", "const f32[96]"], {"strides": (16, 16)}),
    "14": (["f32[2,3,42,28]", "const f32[40,3,14,14]"], {"strides": (14, 14)}),
    "padded runs": (["f32[1,2,24,32]", "const f32[8,2,4,16]"], {"strides": (4, 8), "pads": (2, 8, 2, 8)}),
    "dilated": (["f32[1,3,40,40]", "const f32[8,3,8,8]"], {"strides": (3, 5), "pads": (1, 2, 3, 4), "dilations": (2, 3)}),
}
RUNS = {"transformer": 8, "14": 1, "padded runs": 8, "dilated": 1}


def windows(x, layer):
    """The values of each window, [pixels, C * R * S]."""
    _, _, r, s = layer.needs(1).shape
    (sh, sw), (dh, dw) = layer.attrs["strides"], layer.attrs.get("dilations") or (1, 1)
    top, left, bottom, right = layer.attrs.get("pads") or (0, 0, 0, 0)
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    view = np.lib.stride_tricks.sliding_window_view(x, ((r - 1) * dh + 1, (s - 1) * dw + 1), (2, 3))[:, :, ::sh, ::sw, ::dh, ::dw]
    return view.transpose(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * r * s)


@pytest.mark.skipif(host_compiler() is None, reason="needs a C++ compiler")
def test_the_kernel_lays_out_the_windows_of_planes(monkeypatch):
    monkeypatch.setattr(patch_embedding, "launch", HostLaunch.of)
    monkeypatch.setattr(patch_embedding, "launch_with_epilogue", lambda *_: None)
    cases = []
    for name, given in LAYERS.items():
        _, layer, arrays = sample_layer("Conv", Sample(*given))
        for signature in list_plane_signatures(layer):
            source, target = signature.needs(0), signature.outputs[0].dtype
            x = np.ascontiguousarray(arrays[0].astype(source.dtype.numpy))
            kernel = PatchEmbedding().plan(layer, signature, PatchEmbedding().configs(layer, signature, HOPPER)[0], HOPPER)
            want = windows(x, layer)
            memory = np.full(kernel.scratch // 2, 7, target.numpy)
            start = -memory.ctypes.data % 128
            made = kernel.launches(Args((x.ctypes.data,), (0,), (0, 0), memory.ctypes.data + start))[0]
            assert made.constants["RUN"] == RUNS[name]
            cases.append((made, x, memory, memory[start // 2 :], want, target))
    run = compile_launches([c[0] for c in cases])
    for made, _, _, got, want, target in cases:
        run([made])
        width = -(-want.shape[1] // 8) * 8
        rows = got[: want.shape[0] * width].reshape(-1, width)
        np.testing.assert_array_equal(rows[:, : want.shape[1]], want.astype(target.numpy))
        assert not rows[:, want.shape[1] :].any()
    assert len(cases) == 4 * len(LAYERS)


def test_rows_of_planes_are_multiplied_by_weights_in_their_order():
    _, layer, arrays = sample_layer("Conv", Sample(*LAYERS["transformer"]))
    rows = windows(arrays[0], layer)
    for signature in (*PatchEmbedding().signatures(layer, HOPPER), *list_plane_signatures(layer)):
        if signature.outputs[0].dtype != F16:
            continue
        kernel = PatchEmbedding().plan(layer, signature, PatchEmbedding().configs(layer, signature, HOPPER)[0], HOPPER)
        packed = kernel.packed[0].make().view(np.float16).reshape(96, -1)
        channels_last = signature.needs(0).format == "nhwc"
        order = rows.reshape(-1, 3, 256).transpose(0, 2, 1).reshape(len(rows), -1) if channels_last else rows
        got = order @ packed.astype(np.float32).T + arrays[2]
        want = reference(layer, arrays)[0].transpose(0, 2, 3, 1).reshape(-1, 96)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=0.1)  # results of about 100


@pytest.mark.parametrize(("source", "run"), [(0, 8), (0, 1), (1, 8), (2, 1)])
def test_machine_code(source, run, tmp_path):
    """A thread reads and writes 16 bytes at once if runs of eight are aligned."""
    text = sass(compile_cubin(emit_kernel_source("im2col.cu", {"FROM": source, "TO": source or 1, "RUN": run}), name="patches"), tmp_path)
    assert "LDL" not in text
    assert ("LDG.E.128" in text, "STG.E.128" in text) == (run == 8, run == 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_images_of_planes_match_the_reference(gpu, name):
    _, layer, arrays = sample_layer("Conv", Sample(*LAYERS[name]))
    for signature in (*PatchEmbedding().signatures(layer, gpu), *list_plane_signatures(layer)):
        for config in first_configs(PatchEmbedding(), layer, signature, gpu, 4):
            kernel = PatchEmbedding().plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
