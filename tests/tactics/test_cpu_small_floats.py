"""16-bit float kernels for CPUs with AVX512-BF16 and AMX, or AVX512-FP16: all shapes of tiles, windows, tails and epilogues, several threads, NaN,
oneDNN's tiles beside."""

import ml_dtypes
import numpy as np
import pytest
from test_cpu_direct_conv import followed, text
from test_cpu_indirect import layer_of
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.network import BF16, F16, Network, parse_type
from whet.ops import run_layer, run_regions, sample_layer
from whet.tactics import get_tactic
from whet.tactics.cpu._llvm.amx import why_no_tiles
from whet.tactics.cpu._llvm.kernel import CompiledKernel
from whet.tactics.cpu._llvm.packing import RTOL, why_no_small_float
from whet.tactics.cpu.conv._amx_kernel import choose_step, pack_panels
from whet.tactics.cpu.conv._half_kernel import pack_pairs
from whet.tactics.cpu.conv._product_kernel import ProductKernel, Window
from whet.tactics.cpu.conv.depthwise_bf16 import DepthwiseKernel, choose_tile, pack_blocks


def mark(reason):
    return pytest.mark.skipif(reason is not None, reason=str(reason))


TILES = mark(why_no_small_float(BF16) or why_no_tiles())
HALVES = mark(why_no_small_float(F16))
ROUNDED = pytest.mark.parametrize("stored", [pytest.param(t, marks=mark(why_no_small_float(t))) for t in (BF16, F16)])
PRODUCTS = pytest.mark.parametrize("stored", [pytest.param(BF16, marks=TILES), pytest.param(F16, marks=HALVES)])
BOUND = {BF16: 2**-8, F16: 2**-11}  # a result rounded to 16 bits, half of its last place for the largest, and sums in f32
LINEAR = {BF16: "cpu/amx_linear", F16: "cpu/half_linear"}
CONV = {BF16: "cpu/amx_conv", F16: "cpu/half_conv"}
DEPTHWISE = {BF16: "cpu/depthwise_bf16", F16: "cpu/depthwise_half"}
LAYER_NORM = {BF16: "cpu/layer_norm_bf16", F16: "cpu/layer_norm_half"}


@pytest.fixture(autouse=True)
def small_layers_on_all_threads(monkeypatch):
    for kernel in (CompiledKernel, ProductKernel, DepthwiseKernel):
        monkeypatch.setattr(kernel, "serial_work", 0, raising=False)


def check(name, layer, arrays, monkeypatch, stored, threads=(1, 3)):
    """Each signature in a 16-bit type against float64 of the rounded operands. Only products multiply rounded weights; of f16 they add few in f16."""
    tactic, checked = get_tactic(name), 0
    is_product = name in (*LINEAR.values(), *CONV.values())
    bound = RTOL[F16] if is_product and stored == F16 else BOUND[stored]
    assert tactic.why_not(layer) is None
    for count in threads:
        machine = CpuBackend(threads=count)
        monkeypatch.setattr("test_onednn_tactics.CPU", machine)
        for signature in tactic.signatures(layer, machine):
            if signature.outputs[0].dtype != stored:
                continue
            assert tactic.refuses(layer, signature, machine) is None
            _, (got,), fed = compute(layer, arrays, tactic, signature, ())
            read = [own if o is None and not is_product else a for own, o, a in zip(arrays, signature.inputs, fed, strict=True)]
            wide = [None if a is None else a.astype(np.float64) for a in read]
            (want,) = run_regions(layer, wide) if layer.regions else run_layer(layer, wide)
            assert np.abs(got - want).max() <= bound * np.abs(want).max(), (signature, count)
            checked += 1
    assert checked


@PRODUCTS
@pytest.mark.parametrize(("rows", "inner", "results"), [
    ((4,), 32, 16), ((5, 7), 48, 70), ((31,), 64, 33), ((33,), 2, 32), ((2, 100), 160, 96), ((197,), 768, 48), ((64,), 36, 1000),
])  # fmt: skip
def test_products(rows, inner, results, stored, monkeypatch):
    """One pair of tiles and several, of all heights; results that fill no tile, one, and both of the last panel."""
    check(LINEAR[stored], *layer_of("MatMul", [text(*rows, inner), f"const {text(inner, results)}"]), monkeypatch, stored)
    if len(rows) == 1:
        inputs = [text(*rows, inner), f"const {text(results, inner)}", f"const {text(results)}"]
        check(LINEAR[stored], *layer_of("Gemm", inputs, transB=1), monkeypatch, stored)


def product_with(steps, rows, inner, results):
    """A product of rows with a constant matrix, followed by ops: "bias" adds a constant row, "residual" a tensor."""
    rng, net, body = np.random.default_rng(1), Network("net", "lowered"), Network("body", "lowered")
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((1, rows, inner), (inner, results), (results,), (1, rows, results))]
    outer = [net.add_input("x", parse_type(text(1, rows, inner))), *(net.constant(a, "c") for a in arrays[1:3])]
    outer.append(net.add_input("r", parse_type(text(1, rows, results))))
    x, w, b, r = (body.add_input(f"i{k}", t.type) for k, t in enumerate(outer))
    y = body.add("MatMul", x, w)
    for step in steps:
        y = body.add("Add", y, {"bias": b, "residual": r}[step]) if step in ("bias", "residual") else body.add(step, y)
    body.mark_output(y)
    net.mark_output(net.add("Fused", *outer, composite="MatMul", regions={"body": body}), "y")
    return net.layers[0], arrays


@PRODUCTS
@pytest.mark.parametrize("steps", [("bias",), ("bias", "Gelu"), ("bias", "residual"), ("residual",), ("bias", "residual", "Relu")])
def test_products_with_bias_and_residual(steps, stored, monkeypatch):
    layer, arrays = product_with(steps, 37, 64, 72)
    check(LINEAR[stored], layer, arrays, monkeypatch, stored)


@PRODUCTS
@pytest.mark.parametrize(("image", "results", "side", "stride", "pad"), [
    ((1, 32, 8, 8), 32, 3, 1, 1), ((2, 64, 9, 11), 48, 3, 1, 1), ((1, 16, 14, 14), 40, 3, 2, 1), ((2, 40, 13, 12), 24, 5, 2, 2),
    ((1, 64, 14, 14), 32, 1, 2, 0), ((1, 4, 30, 31), 20, 7, 2, 3), ((1, 34, 7, 7), 33, 3, 1, 0), ((2, 24, 7, 9), 24, 1, 1, 0),
    ((1, 48, 6, 6), 16, 1, 1, 1), ((1, 8, 12, 12), 16, 2, 3, 0), ((3, 16, 5, 1), 8, 3, 1, 1),
])  # fmt: skip
def test_convolutions(image, results, side, stride, pad, stored, monkeypatch):
    """Windows with and without pads, strides larger than the window, several samples, images of a column."""
    inputs = [text(*image), f"const {text(results, image[1], side, side)}", f"const {text(results)}"]
    check(CONV[stored], *layer_of("Conv", inputs, pads=(pad,) * 4, strides=(stride, stride)), monkeypatch, stored)


@ROUNDED
@pytest.mark.parametrize(("image", "side", "stride", "pads"), [
    ((1, 32, 9, 11), 3, 1, (1, 1, 1, 1)), ((2, 48, 14, 14), 3, 1, (1, 1, 1, 1)), ((1, 40, 15, 13), 5, 2, (2, 2, 2, 2)),
    ((1, 16, 8, 8), 3, 2, (0, 1, 2, 1)), ((1, 8, 7, 7), 3, 1, (1, 1, 1, 1)), ((1, 96, 20, 20), 7, 1, (3, 3, 3, 3)),
    ((1, 64, 5, 4), 5, 1, (2, 2, 2, 2)), ((1, 33, 12, 12), 3, 2, (0, 0, 0, 0)), ((1, 1, 6, 6), 3, 1, (1, 1, 1, 1)),
    ((1, 160, 4, 3), 3, 1, (1, 1, 1, 1)),
])  # fmt: skip
def test_depthwise_convolutions(image, side, stride, pads, stored, monkeypatch):
    inputs = [text(*image), f"const {text(image[1], 1, side, side)}", f"const {text(image[1])}"]
    layer, arrays = layer_of("Conv", inputs, group=image[1], pads=pads, strides=(stride, stride))
    check(DEPTHWISE[stored], layer, arrays, monkeypatch, stored)


@PRODUCTS
@pytest.mark.parametrize("steps", [
    ("Relu",), ("Silu",), ("HardSwish",), ("Sigmoid",), ("Add",), ("Add", "Relu"), ("Add x",), ("Tanh", "Add", "Gelu"),
])  # fmt: skip
def test_epilogues(steps, stored, monkeypatch):
    """Of convolutions with and without a window, and of depthwise ones; sums of about 1, so that a sigmoid's are not far beyond its limits."""
    for side, attrs in ((1, {}), (3, {"pads": (1,) * 4})):
        layer, arrays = sample_layer("Fused", followed(steps, text(2, 34, 7, 6), text(34, 34, side, side), **attrs))[1:]
        arrays[0] *= 0.1
        check(CONV[stored], layer, arrays, monkeypatch, stored)
    layer, arrays = sample_layer("Fused", followed(steps, text(2, 34, 7, 6), text(34, 1, 3, 3), pads=(1,) * 4, group=34))[1:]
    check(DEPTHWISE[stored], layer, arrays, monkeypatch, stored)


@ROUNDED
@pytest.mark.parametrize(("rows", "width"), [(197, 768), (5, 100), (7, 16), (3, 33), (1, 5)])
def test_layer_norms(rows, width, stored, monkeypatch):
    inputs = [text(1, rows, width), f"const {text(width)}", f"const {text(width)}"]
    check(LAYER_NORM[stored], *layer_of("LayerNormalization", inputs, axis=-1), monkeypatch, stored)


@ROUNDED
def test_elementwise_layers_and_reductions(stored, monkeypatch):
    """Channel gates, residuals, scalars; kept and reduced innermost axes."""
    check("cpu/elementwise", *layer_of("Mul", [text(2, 33, 1, 1), text(2, 33, 7, 5)]), monkeypatch, stored)
    check("cpu/elementwise", *layer_of("Add", [text(1, 37, 7, 7), text(1, 37, 7, 7)]), monkeypatch, stored)
    check("cpu/elementwise", *layer_of("Sub", [text(3, 19), text(1)]), monkeypatch, stored)
    for axes in ((2, 3), (1,), (3,)):
        check("cpu/reduce", *layer_of("ReduceMean", [text(2, 40, 7, 9)], axes=axes, keepdims=1), monkeypatch, stored)
    check("cpu/reduce", *layer_of("GlobalAveragePool", [text(2, 72, 7, 9)]), monkeypatch, stored)


@PRODUCTS
def test_nan_reaches_the_results_that_read_it(stored, monkeypatch):
    """A NaN and an infinity in a pixel do not spread through the padding, nor to the results of other rows."""
    for name, weights, attrs in (
        (CONV[stored], (8, 6, 3, 3), {"pads": (1,) * 4}), (CONV[stored], (8, 6, 1, 1), {}),
        (DEPTHWISE[stored], (6, 1, 3, 3), {"pads": (1,) * 4, "group": 6}),
    ):  # fmt: skip
        layer, arrays = layer_of("Conv", [text(1, 6, 8, 8), f"const {text(*weights)}"], **attrs)
        arrays[0][0, 2, 3, 4], arrays[0][0, 1, 7, 7] = np.nan, np.inf
        machine = CpuBackend(threads=1)
        monkeypatch.setattr("test_onednn_tactics.CPU", machine)
        tactic = get_tactic(name)
        (signature,) = tactic.signatures(layer, machine)
        _, (got,), fed = compute(layer, arrays, tactic, signature, ())
        with np.errstate(all="ignore"):
            (want,) = run_layer(layer, fed)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))


@TILES
def test_the_tile_configuration_of_others_is_kept(monkeypatch):
    """oneDNN's AMX products before and after this kernel, in one thread: both compute what they did alone."""
    layer, arrays = layer_of("MatMul", [text(40, 64), f"const {text(64, 48)}"])
    machine = CpuBackend(threads=1)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    results = []
    for name in ("cpu/onednn_matmul", "cpu/amx_linear") * 2:
        tactic = get_tactic(name)
        signature = next((s for s in tactic.signatures(layer, machine) if s.outputs[0].dtype == BF16), None)
        if signature is None and name == "cpu/onednn_matmul":
            pytest.skip("oneDNN is limited to instructions without BF16")
        configs = [c for c in tactic.configs(layer, signature, machine) if not c or "amx" in str(c)]
        results.append([compute(layer, arrays, tactic, signature, c)[1][0] for c in configs])
        assert configs
    for before, after in zip(results[:2], results[2:], strict=True):
        np.testing.assert_array_equal(before, after)


def test_other_layers_are_refused():
    def reason(name, op, inputs, **attrs):
        return get_tactic(name).why_not(layer_of(op, inputs, **attrs)[0])

    image, weights = text(1, 4, 8, 8), f"const {text(4, 4, 3, 3)}"
    assert "dilations" in reason("cpu/amx_conv", "Conv", [image, weights], dilations=(2, 2))
    assert "even number of channels" in reason("cpu/amx_conv", "Conv", [text(1, 3, 8, 8), f"const {text(4, 3, 3, 3)}"])
    assert "square" in reason("cpu/amx_conv", "Conv", [image, f"const {text(4, 4, 3, 1)}"])
    assert "run time" in reason("cpu/amx_conv", "Conv", [image, text(4, 4, 3, 3)])
    assert "even inner" in reason("cpu/amx_linear", "MatMul", [text(8, 5), f"const {text(5, 4)}"])
    assert "rows or more" in reason("cpu/amx_linear", "MatMul", [text(3, 4), f"const {text(4, 4)}"])
    assert "depthwise" in reason("cpu/depthwise_bf16", "Conv", [image, weights])
    assert "stride of 1 or 2" in reason("cpu/depthwise_bf16", "Conv", [image, f"const {text(4, 1, 3, 3)}"], group=4, strides=(3, 3))


def test_divisions_into_tiles():
    assert [choose_step(n) for n in (64, 48, 144, 24, 2, 34, 7)] == [32, 24, 24, 24, 2, 2, 0]
    assert [choose_tile(n, 7) for n in (56, 7, 13, 3, 1)] == [7, 7, 7, 3, 1]
    window = Window(3, 2, (1, 1), 1, 8, 8, 4, 4)
    assert (window.phases, window.lines, window.line, window.product_rows) == (2, 5, 5, 19)
    copy = 5 * 5 * 2  # bytes of a copy with one channel
    assert window.list_offsets(1) == [0, copy, 2, 2 * copy, 3 * copy, 2 * copy + 2, 10, copy + 10, 12]


def test_packed_weights():
    """Panels: each row of a tile has 16 pairs of one result's consecutive weights. Blocks: even channels before odd ones."""
    matrix = np.arange(4 * 20, dtype=np.float32).reshape(4, 20)
    panels = pack_panels(matrix, 2)
    assert panels.dtype == ml_dtypes.bfloat16
    assert panels.shape == (1, 2, 2, 1, 16, 2)  # panel, step, tile, pair of rows, result, row of the pair
    np.testing.assert_array_equal(panels[0, 1, 0, 0, 3].astype(np.float32), [matrix[2, 3], matrix[3, 3]])
    np.testing.assert_array_equal(panels[0, 0, 1, 0, :, 0].astype(np.float32), [*matrix[0, 16:], *[0] * 12])
    blocks = pack_blocks(np.arange(6, dtype=np.float32).reshape(3, 2), np.float32([7, 8, 9]), by_parity=True).reshape(3, 2, 16)
    np.testing.assert_array_equal(blocks[:, :, :2], [[[0, 4], [2, 0]], [[1, 5], [3, 0]], [[7, 9], [8, 0]]])
    blocks = pack_blocks(np.arange(6, dtype=np.float32).reshape(3, 2), np.float32([7, 8, 9]), by_parity=False).reshape(3, 32)
    np.testing.assert_array_equal(blocks[:, :4], [[0, 2, 4, 0], [1, 3, 5, 0], [7, 8, 9, 0]])
    pairs = pack_pairs(matrix)
    assert pairs.dtype == np.float16
    assert pairs.shape == (1, 2, 2, 16, 2)  # panel, pair of rows, parity of the result, pair of results, row of the pair
    np.testing.assert_array_equal(pairs[0, 1, 1, 3].astype(np.float32), [matrix[2, 7], matrix[3, 7]])
    np.testing.assert_array_equal(pairs[0, 0, 0, :, 1].astype(np.float32), [*matrix[1, ::2], *[0] * 6])


@HALVES
def test_sums_of_runs_are_added_in_f32(monkeypatch):
    """8,192 products that are 1: each of two sums in f16 would stop at 2048, where its last place is 2."""
    net = Network("ones", "lowered")
    product = net.add("MatMul", net.add_input("x", parse_type(text(2, 8192))), net.constant(np.ones((8192, 40), np.float32)))
    check("cpu/half_linear", product.maker, [np.ones((2, 8192), np.float32), np.ones((8192, 40), np.float32)], monkeypatch, F16)


@HALVES
def test_a_sum_beyond_the_range_of_f16_is_not_finite(monkeypatch):
    """As a result, and as the sum of a run; other results stay as they are."""
    layer, arrays = layer_of("MatMul", [text(3, 32), f"const {text(32, 40)}"])
    arrays[0][1] = 3e4
    machine = CpuBackend(threads=1)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    tactic = get_tactic("cpu/half_linear")
    (signature,) = tactic.signatures(layer, machine)
    _, (got,), fed = compute(layer, arrays, tactic, signature, ())
    (want,) = run_layer(layer, fed)
    assert not np.isfinite(got[1][np.abs(want[1]) > 66000]).any()
    assert np.isfinite(got[[0, 2]]).all()
