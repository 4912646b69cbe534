"""Direct convolutions of larger windows by whet's CPU kernel: ends of rows, odd sizes, in-place residuals, threads, special values, refusals."""

import numpy as np
import pytest
from test_compiled_kernels import JIT, TILES, judge_every_config
from test_onednn_tactics import CPU, Listed, compute, place

from whet.backends.cpu import CpuBackend
from whet.composites.epilogue import make_conv_silu_sample
from whet.network import Network, compute_stored_shape, from_stored, parse_type, static_shape
from whet.ops import run_regions, sample_layer
from whet.ops._base import Sample
from whet.tactics import Args, get_tactic
from whet.tactics._base import PlanRefused
from whet.tactics.cpu._llvm.registers import AVX512, get_registers
from whet.tactics.cpu.onednn import _api as dnn

NAME = "cpu/direct_conv"


def text(*shape):
    return f"f32[{','.join(map(str, shape))}]"


@TILES
@pytest.mark.parametrize(("shape", "channels", "window", "strides", "pads"), [
    ((1, 16, 12, 12), 32, (3, 3), (1, 1), (1, 1, 1, 1)), ((2, 32, 9, 17), 48, (3, 3), (2, 2), (1, 1, 1, 1)),
    ((1, 3, 20, 22), 16, (6, 6), (2, 2), (2, 2, 2, 2)), ((1, 1, 15, 31), 32, (7, 7), (2, 2), (3, 3, 3, 3)),
    ((1, 20, 7, 13), 40, (3, 3), (1, 1), (1, 1, 1, 1)), ((3, 17, 5, 9), 80, (5, 5), (1, 1), (2, 2, 2, 2)),
    ((1, 64, 6, 40), 304, (3, 3), (1, 1), (1, 1, 1, 1)), ((1, 16, 3, 14), 16, (1, 3), (1, 2), (0, 2, 0, 0)),
    ((2, 16, 1, 11), 64, (3, 1), (2, 1), (2, 0, 1, 0)), ((1, 18, 24, 19), 16, (11, 10), (3, 1), (10, 9, 4, 0)),
    ((1, 16, 14, 15), 33, (2, 4), (1, 4), (0, 1, 0, 3)),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_windows_of_all_sizes(shape, channels, window, strides, pads, threads):
    """Windows that extend past one border or all, tiles that do and do not divide a row, partly filled blocks of input and output channels."""
    judge_every_config(NAME, make_conv_silu_sample(text(*shape), text(channels, shape[1], *window), strides=strides, pads=pads), threads)


@TILES
def test_random_geometries():
    """Every planned convolution is correct; the others are refused with a reason."""
    rng, planned = np.random.default_rng(5), 0
    for _ in range(25):
        window = tuple(int(n) for n in rng.integers(1, 6, 2))
        shape = (int(rng.integers(1, 3)), int(rng.integers(1, 40)), *(int(n) for n in rng.integers(6, 30, 2)))
        pads = tuple(int(rng.integers(0, window[i % 2])) for i in range(4))
        strides = tuple(int(n) for n in rng.integers(1, 4, 2))
        sample = make_conv_silu_sample(text(*shape), text(int(rng.integers(1, 60)), shape[1], *window), strides=strides, pads=pads)
        layer, tactic = sample_layer("Fused", sample)[1], get_tactic(NAME)
        why = tactic.why_not(layer) or tactic.refuses(layer, tactic.signatures(layer, CPU)[0], CPU)
        if why is None:
            judge_every_config(NAME, sample, 2)
            planned += 1
        else:
            assert "window" in why or "fits the rows" in why
    assert planned >= 12


@TILES
@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize("columns", [20, 37])
def test_residuals(at, columns):
    """Residuals before and after the activation, from another buffer and in place of the result, where no pixel may be computed twice."""
    shape = (2, 48, 7, columns)
    sample = make_conv_silu_sample(text(2, 24, 7, columns), text(48, 24, 3, 3), pads=(1, 1, 1, 1), **{at: text(*shape)})
    _, layer, arrays = sample_layer("Fused", sample)
    (want,) = run_regions(layer, [a.astype(np.float64) for a in arrays])
    tactic = get_tactic(NAME)
    inplace, apart = tactic.signatures(layer, CPU)
    assert inplace.inplace == ((3, 0),)
    assert not apart.inplace
    assert all(columns % dict(c)["pixels"] == 0 for c in tactic.configs(layer, inplace, CPU))
    assert (tactic.refuses(layer, inplace, CPU) is None) == (columns == 20)
    for signature in (inplace, apart):
        for config in tactic.configs(layer, signature, CPU):
            _, got, _ = compute(layer, arrays, tactic, signature, config)
            assert np.abs(got[0] - want).max() <= 2e-6 * np.abs(want).max()


def followed(steps, x, w, **attrs):
    """A convolution followed by ops; "Add" adds a second image, "Add x" the image that is convolved."""
    inputs = [x, f"const {w}", *([x.replace(x.split(",")[1], w.split("[")[1].split(",")[0], 1)] if "Add" in steps else [])]

    def regions():
        body = Network("body", "lowered")
        read = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        y = body.add("Conv", *read[:2], **attrs)
        for step in steps:
            if step.startswith("Add"):
                y = body.add("Add", y, read[0] if step.endswith("x") else read[2])
            else:
                y = body.add("Mul", y, body.add("Sigmoid", y)) if step == "Silu" else body.add(step, y)
        body.mark_output(y)
        return {"body": body}

    return Sample(inputs, {"composite": "Conv"}, regions)


FOLLOWING = [(), ("Add",), ("Add x",)]
FOLLOWING += [s for f in ("Silu", "Relu") for s in ((f,), (f, "Add"), ("Add", f), ("Add x", f), (f, "Add x"))]


@TILES
@pytest.mark.parametrize("steps", [*FOLLOWING, ("HardSwish",), ("Gelu", "Add"), ("Add", "LeakyRelu")])
@pytest.mark.parametrize(("name", "channels", "window"), [(NAME, 4, 3), (NAME, 24, 3), ("cpu/pointwise_conv", 32, 1), ("cpu/pointwise_conv", 44, 1)])
def test_epilogues(steps, name, channels, window):
    """An activation, a residual (possibly the input image), both or nothing; NaN and infinities among the values. In place each pixel once: 217 are
    not a multiple of a tile."""
    sides = (7, 31) if window == 1 else (9, 24)
    sample = followed(steps, text(2, channels, *sides), text(channels, channels, window, window), pads=(window // 2,) * 4)
    _, layer, arrays = sample_layer("Fused", sample)
    arrays[0][0, 1, 4, 11], arrays[0][1, 0, 0, 0] = np.nan, np.inf
    with np.errstate(all="ignore"):
        (want,) = run_regions(layer, [a.astype(np.float64) for a in arrays])
    tactic = get_tactic(name)
    assert tactic.why_not(layer) is None
    assert len(tactic.signatures(layer, CPU)) == 1 + ("Add" in steps)
    for signature in tactic.signatures(layer, CPU):
        assert tactic.refuses(layer, signature, CPU) is None
        for config in tactic.configs(layer, signature, CPU):
            _, got, _ = compute(layer, arrays, tactic, signature, config)
            np.testing.assert_allclose(got[0], want, rtol=2e-6, atol=2e-6 * np.abs(want[np.isfinite(want)]).max())


@TILES
@pytest.mark.parametrize(("name", "weights", "attrs"), [
    (NAME, (36, 20, 1, 1), {"strides": (2, 2)}), (NAME, (33, 20, 1, 1), {"strides": (2, 1), "pads": (0, 0, 0, 0)}),
    ("cpu/depthwise_conv", (20, 1, 3, 3), {"group": 20, "pads": (1, 1, 1, 1)}),
    ("cpu/depthwise_conv", (20, 1, 5, 5), {"group": 20, "pads": (2, 2, 2, 2), "strides": (2, 2)}),
])  # fmt: skip
@pytest.mark.parametrize("steps", [(), ("Relu",), ("HardSwish",), ("Silu",)])
def test_strided_points_and_depthwise_windows(name, weights, attrs, steps):
    """Partly filled blocks of channels, with any activation that keeps zeros; the sigmoid of padding channels is not zero."""
    judge_every_config(name, followed(steps, text(2, 20, 11, 18), text(*weights), **attrs), 2)
    other = sample_layer("Fused", followed(("Sigmoid",), text(2, 20, 11, 18), text(*weights), **attrs))[1]
    assert "padding channels" in get_tactic(name).why_not(other)


@TILES
@pytest.mark.parametrize(("channels", "strides"), [(96, (1, 1)), (48, (2, 2))])
def test_groups_of_whole_blocks(channels, strides):
    """Each group of output blocks reads its own input blocks, on several threads and of several samples."""
    sample = followed(("Relu",), text(2, 48, 9, 18), text(channels, 16, 3, 3), group=3, pads=(1, 1, 1, 1), strides=strides)
    for threads in (1, 3):
        judge_every_config(NAME, sample, threads)
    other = sample_layer("Fused", followed((), text(2, 24, 9, 18), text(24, 12, 3, 3), group=2, pads=(1, 1, 1, 1)))[1]
    assert "whole blocks" in get_tactic(NAME).why_not(other)


@TILES
@pytest.mark.parametrize("added", ["Add", "Add x"])
def test_users_own_buffers(added):
    """Image, residual (possibly the image itself) and result are bound to other buffers after the launch was recorded."""
    _, layer, arrays = sample_layer("Fused", followed(("Silu", added), text(1, 16, 5, 12), text(16, 16, 3, 3), pads=(1, 1, 1, 1)))
    tactic = get_tactic(NAME)
    signature = tactic.signatures(layer, CPU)[-1]
    kernel = tactic.plan(layer, signature, tactic.configs(layer, signature, CPU)[0], CPU)
    packed, stream = [p.make() for p in kernel.packed], Listed()
    nowhere = [dnn.allocate_aligned(max(n, 64)) for n in (*kernel.inputs, *kernel.outputs)]
    *at, result = [b.ctypes.data for b in nowhere]
    kernel.enqueue(Args(tuple(at), (result,), tuple(p.ctypes.data for p in packed), 0), stream)
    out, buffers = dnn.allocate_aligned(kernel.outputs[0]), {i: place(arrays[i], o) for i, o in enumerate(signature.inputs) if o is not None}
    (call,) = stream.calls
    for i, b in buffers.items():
        call.set_address("input", i, b.ctypes.data)
    call.set_address("output", 0, out.ctypes.data)
    call.run()
    (want,), stored = run_regions(layer, arrays), signature.outputs[0].format
    got = from_stored(out.view(np.float32).reshape(compute_stored_shape(stored, want.shape)), stored, want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@TILES
@pytest.mark.parametrize("channels", [3, 16])
def test_nan_and_infinity_reach_only_windows_that_contain_them(channels):
    """NaN and infinities at corners, borders and inside: the same pixels are affected as in the reference, the others keep their values."""
    _, layer, arrays = sample_layer("Fused", make_conv_silu_sample(text(1, channels, 9, 24), text(32, channels, 3, 3), pads=(1, 1, 1, 1)))
    arrays[0][0, 0, 0, 0], arrays[0][0, 1, 4, 11], arrays[0][0, 2, 8, 23], arrays[0][0, 0, 2, 0] = np.nan, np.inf, -np.inf, 3e38
    with np.errstate(all="ignore"):
        (want,) = run_regions(layer, arrays)
    tactic = get_tactic(NAME)
    (signature,) = tactic.signatures(layer, CPU)
    for config in tactic.configs(layer, signature, CPU):
        _, got, _ = compute(layer, arrays, tactic, signature, config)
        np.testing.assert_array_equal(np.isnan(got[0]), np.isnan(want))
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)


@TILES
@pytest.mark.parametrize(("shape", "channels"), [((1, 32, 80, 80), 32), ((1, 16, 160, 160), 16), ((3, 144, 21, 20), 304), ((1, 80, 40, 40), 80)])
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_have_equal_partitions(shape, channels, threads):
    """Of all rows of all channels of all batch items: partitions differ by at most a row."""
    machine, tactic = CpuBackend(threads=threads), get_tactic(NAME)
    layer = sample_layer("Fused", make_conv_silu_sample(text(*shape), text(channels, shape[1], 3, 3), pads=(1, 1, 1, 1)))[1]
    (signature,) = tactic.signatures(layer, machine)
    for config in tactic.configs(layer, signature, machine):
        kernel = tactic.plan(layer, signature, config, machine)
        groups = divmod(-(-channels // get_registers().lanes), dict(config)["blocks"])
        for part, of_it in zip(kernel.parts, (n for n in (groups[0], groups[1] > 0) if n), strict=True):
            items, share = part.sizes[-2:]
            assert part.threads == threads
            assert items == shape[0] * shape[2] * of_it
            assert share == -(-items // threads)
    CPU.activate()


@TILES
def test_tiles_divide_the_row_if_possible():
    tactic = get_tactic(NAME)
    for columns in (20, 40, 80, 160):
        layer = sample_layer("Fused", make_conv_silu_sample(text(1, 32, 8, columns), text(80, 32, 3, 3), pads=(1, 1, 1, 1)))[1]
        configs = tactic.configs(layer, tactic.signatures(layer, CPU)[0], CPU)
        assert configs
        assert {dict(c)["blocks"] for c in configs if columns % dict(c)["pixels"] == 0} == ({2, 3, 5} if get_registers() == AVX512 else {2})


@TILES
@pytest.mark.parametrize(("channels", "columns", "window"), [(64, 21, 9), (80, 16, 7), (32, 29, 11)])
def test_only_the_first_and_last_tile_of_a_row_read_beyond_it(channels, columns, window):
    """Values read beyond the row are overwritten by the last tile, but their addresses may be past the end of the image."""
    side = window // 2
    layer = sample_layer("Fused", make_conv_silu_sample(text(1, 16, 2, columns), text(channels, 16, 1, window), pads=(0, side, 0, side)))[1]
    tactic = get_tactic(NAME)
    configs = tactic.configs(layer, tactic.signatures(layer, CPU)[0], CPU)
    assert configs
    for pixels in (dict(c)["pixels"] for c in configs):
        for at in range(pixels, columns - pixels, pixels):
            assert side <= at
            assert at + pixels - 1 + side < columns


@TILES
@pytest.mark.parametrize(("name", "shape", "window", "group", "config"), [
    (NAME, (1, 16, 4, 5), 3, 1, {"blocks": 1, "pixels": 6}), (NAME, (1, 16, 4, 12), 3, 1, {"blocks": 3, "pixels": 4}),
    (NAME, (1, 16, 4, 60), 3, 1, {"blocks": 1, "pixels": 31}), ("cpu/pointwise_conv", (1, 16, 4, 5), 1, 1, {"blocks": 1, "pixels": 24}),
    ("cpu/depthwise_conv", (1, 16, 4, 6), 3, 16, {"pixels": 8}),
])  # fmt: skip
def test_a_tile_chosen_for_other_shapes_is_refused(name, shape, window, group, config):
    """An engine of several shapes plans each with the config of one; a tile longer than a row would be stored out of bounds."""
    sample = make_conv_silu_sample(
        text(*shape), text(16 if group > 1 else 64, shape[1] // group, window, window), group=group, pads=(window // 2,) * 4
    )
    layer, tactic = sample_layer("Fused", sample)[1], get_tactic(name)
    (signature,) = tactic.signatures(layer, CPU)
    assert tactic.refuses(layer, signature, CPU) is None
    with pytest.raises(PlanRefused, match="does not fit a result"):
        tactic.plan(layer, signature, tuple(config.items()), CPU)


@JIT
@pytest.mark.parametrize(("change", "why"), [
    ({"w": text(32, 16, 1, 1)}, "more than one pixel"), ({"w": text(32, 16, 3, 13), "pads": (1, 3, 1, 3)}, "at most 11"),
    ({"pads": (3, 1, 1, 1)}, "smaller than the window"),
    ({"dilations": (2, 2)}, "no dilations"), ({"w": text(32, 1, 3, 3), "group": 16}, "one group"),
    ({"x": text(1, 16, 9), "w": text(32, 16, 3), "pads": (1, 1)}, "images"),
    ({"after": text(1, 32, 1, 1)}, "of the result's shape"), ({"before": text(1, 32, 9, 9), "after": text(1, 32, 9, 9)}, "one residual"),
])  # fmt: skip
def test_convolutions_that_are_refused(change, why):
    _, layer, _ = sample_layer("Fused", make_conv_silu_sample(**{"x": text(1, 16, 9, 9), "w": text(32, 16, 3, 3), "pads": (1, 1, 1, 1), **change}))
    assert why in get_tactic(NAME).why_not(layer)


@JIT
@pytest.mark.parametrize(("steps", "channels", "why"), [(("Add", "Silu", "Add x"), 16, "one residual"), (("Tanh",), 20, "padding channels")])
def test_refused_epilogues(steps, channels, why):
    _, layer, _ = sample_layer("Fused", followed(steps, text(1, channels, 9, 9), text(channels, channels, 3, 3), pads=(1, 1, 1, 1)))
    assert why in get_tactic(NAME).why_not(layer)


@TILES
def test_rows_too_short_for_a_tile_are_refused():
    layer = sample_layer("Fused", make_conv_silu_sample(text(1, 16, 9, 3), text(32, 16, 3, 3), pads=(1, 1, 1, 1)))[1]
    tactic = get_tactic(NAME)
    (signature,) = tactic.signatures(layer, CPU)
    assert static_shape(layer.outputs[0].shape)[3] == 3
    assert "fits the rows" in tactic.refuses(layer, signature, CPU)
