"""Resized images, triangles of matrices and columns put together, by compiled loops: against the references, both formats, one and two threads."""

import itertools

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_mapped_copy import require_exact
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.network import parse_network
from whet.ops import run_layer, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic

pytestmark = [JIT, pytest.mark.parametrize("threads", [1, 2])]


def make_layer(op, spec, attrs, *others):
    _, layer, arrays = sample_layer(op, Sample([spec, *others], attrs))
    return layer, arrays


def require_close(name, layer, arrays, threads, monkeypatch):
    """Every signature gives the reference's values in f32, within the rounding of a few products."""
    machine, tactic = CpuBackend(threads=threads), get_tactic(name)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    monkeypatch.setattr("whet.tactics.cpu.generic._loops.LoopKernel.serial_work", 0)
    (want,) = run_layer(layer, arrays)
    signatures = tactic.signatures(layer, machine)
    assert signatures, tactic.why_not(layer)
    for signature in signatures:
        assert tactic.refuses(layer, signature, machine) is None
        (config,) = tactic.configs(layer, signature, machine)
        _, (got,), _ = compute(layer, arrays, tactic, signature, config)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    return signatures


COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [0, 1])
@pytest.mark.parametrize("size", [(9, 7), (30, 45), (3, 40), (24, 2), (12, 17)])
def test_resized_images(size, antialias, mode, threads, monkeypatch):
    for coordinates in COORDINATES:
        attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "antialias": antialias, "sizes": (2, 3, *size)}
        layer, arrays = make_layer("Resize", "f32[2,3,12,17]", attrs)
        if size == (12, 17):  # nothing changes
            (signature, *_) = get_tactic("cpu/resample").signatures(layer, CpuBackend(threads=threads))
            assert "no axis changes" in get_tactic("cpu/resample").refuses(layer, signature, CpuBackend(threads=threads))
        else:
            assert len(require_close("cpu/resample", layer, arrays, threads, monkeypatch)) == 2


@pytest.mark.parametrize(
    ("shape", "sizes"), [((5, 19), (9, 40)), ((2, 3, 40), (2, 3, 70)), ((1, 2, 5, 6, 7), (1, 2, 9, 5, 30)), ((3, 4, 8, 8), (3, 9, 8, 20))]
)
def test_resized_along_any_axes(shape, sizes, threads, monkeypatch):
    layer, arrays = make_layer("Resize", f"f32[{','.join(map(str, shape))}]", {"mode": "cubic", "sizes": sizes, "exclude_outside": 1})
    require_close("cpu/resample", layer, arrays, threads, monkeypatch)


def test_a_region_of_an_image(threads, monkeypatch):
    """Inside of the image; results outside of it are left to the reference."""
    attrs = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "sizes": (1, 2, 9, 33)}
    roi = np.float32([0, 0, 0.2, 0.5, 1, 1, 0.9, 0.75])
    layer, arrays = make_layer("Resize", "f32[1,2,8,40]", attrs, roi)
    require_close("cpu/resample", layer, arrays, threads, monkeypatch)
    layer, _ = make_layer("Resize", "f32[1,2,8,40]", attrs, roi * 2)
    tactic, machine = get_tactic("cpu/resample"), CpuBackend(threads=threads)
    assert "outside" in tactic.refuses(layer, tactic.signatures(layer, machine)[0], machine)


@pytest.mark.parametrize("dtype", ["f32", "i64", "u8", "f16"])
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_nearest_images_are_copies(rounding, dtype, threads, monkeypatch):
    for coordinates, size in itertools.product(COORDINATES, [(5, 40), (24, 9), (17, 31)]):
        attrs = {"nearest_mode": rounding, "coordinate_transformation_mode": coordinates, "sizes": (1, 3, *size)}
        layer, arrays = make_layer("Resize", f"{dtype}[1,3,12,17]", attrs)
        require_exact("cpu/mapped_copy", layer, arrays, threads, monkeypatch)


def test_sizes_computed_at_run_time_are_left_to_others(threads):
    net = parse_network("network n source\nin %x: f32[1,2,4,4]\nin %s: i64[4]\n%y: f32[1,2,N,M] = Identity(%x)\nout %y\n".replace("N,M", "4,4"))
    layer, _ = make_layer("Resize", "f32[1,2,4,4]", {"mode": "linear", "sizes": (1, 2, 8, 8)})
    layer.inputs = (layer.inputs[0], None, None, net.inputs[1])
    assert "at run time" in get_tactic("cpu/resample").why_not(layer)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (40, 3), (2, 3, 17, 33)])
@pytest.mark.parametrize("dtype", ["f32", "i64", "bool", "f16"])
def test_triangles(dtype, shape, upper, threads, monkeypatch):
    for k in (None, 0, 1, -1, 5, -7, 1000, -1000, 2**62, -(2**62)):
        others = [] if k is None else [np.array(k)]
        layer, arrays = make_layer("Trilu", f"{dtype}[{','.join(map(str, shape))}]", {"upper": upper}, *others)
        require_exact("cpu/triangle", layer, arrays, threads, monkeypatch)


FOLDS = [  # image, block, attributes
    ((40,), (3,), {}),
    ((41,), (4,), {"strides": (3,), "pads": (2, 1), "dilations": (2,)}),
    ((9, 31), (3, 3), {"pads": (1, 1, 1, 1)}),
    ((9, 31), (2, 5), {"strides": (2, 1), "dilations": (1, 3), "pads": (0, 2, 3, 0)}),
    ((8, 40), (2, 2), {"strides": (2, 2)}),
    ((5, 6), (5, 6), {"strides": (1, 2), "pads": (4, 5, 4, 5)}),
]


@pytest.mark.parametrize("case", FOLDS, ids=str)
def test_columns_put_together(case, threads, monkeypatch):
    image, block, attrs = case
    r = len(image)
    s, d, p = attrs.get("strides", (1,) * r), attrs.get("dilations", (1,) * r), attrs.get("pads", (0,) * 2 * r)
    counts = [(n + p[i] + p[r + i] - d[i] * (k - 1) - 1) // s[i] + 1 for i, (n, k) in enumerate(zip(image, block, strict=True))]
    shape = f"f32[2,{3 * np.prod(block)},{np.prod(counts)}]"
    layer, arrays = make_layer("Col2Im", shape, attrs, np.array(image), np.array(block))
    require_close("cpu/columns_to_image", layer, arrays, threads, monkeypatch)
