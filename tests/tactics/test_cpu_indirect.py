"""Own kernels that replace oneDNN: convolutions, products with constant matrices and poolings by tables of addresses, for all lengths of vectors."""

from itertools import product

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_cpu_direct_conv import followed, text
from test_onednn_tactics import CPU, compute

from whet.backends.cpu import CpuBackend
from whet.builder import BuildConfig, build
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.network import Network, parse_type
from whet.ops import run_layer, run_network, run_regions, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import Step
from whet.tactics.cpu.conv import _indirect_kernel
from whet.tactics.cpu.conv._indirect_ir import Form, emit_indirect_ir
from whet.tactics.cpu.move import strided_copy
from whet.tactics.cpu.pool.max_pool import PoolKernel

pytestmark = JIT
LANES = (4, 8, 16)  # of SSE and NEON, AVX2, AVX-512; LLVM splits vectors that are too long for this CPU


def check(name, layer, arrays, monkeypatch, lanes=LANES, threads=(1, 3), bound=2e-6):
    """The tactic against float64 with vectors of all lengths and several numbers of threads."""
    wide = [None if a is None else a.astype(np.float64) for a in arrays]
    (want,) = run_regions(layer, wide) if layer.regions else run_layer(layer, wide)
    tactic = get_tactic(name)
    assert tactic.why_not(layer) is None
    monkeypatch.setattr(_indirect_kernel.IndirectKernel, "serial_work", 0)
    for n, count, signature in product(lanes, threads, tactic.signatures(layer, CPU)):
        monkeypatch.setattr(_indirect_kernel, "count_lanes", lambda n=n: n)
        monkeypatch.setattr("test_onednn_tactics.CPU", CpuBackend(threads=count))
        _, (got,), _ = compute(layer, arrays, tactic, signature, ())
        assert np.abs(got - want).max() <= bound * max(np.abs(want).max(), 1e-30), (n, count, str(signature))


def layer_of(op, inputs, **attrs):
    return sample_layer(op, Sample(inputs, attrs))[1:]


@pytest.mark.parametrize(("shape", "weights", "attrs"), [
    ((1, 3, 11, 9), (5, 3, 3, 3), {"pads": (1, 1, 1, 1)}),
    ((2, 4, 21, 20), (33, 4, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    ((2, 19, 9, 7), (37, 19, 1, 1), {}),
    ((1, 16, 9, 9), (24, 16, 1, 1), {"strides": (2, 2)}),
    ((1, 7, 8, 30), (16, 7, 1, 5), {"pads": (0, 2, 0, 2)}),
    ((1, 5, 12, 13), (8, 5, 3, 3), {"pads": (4, 0, 1, 3), "dilations": (2, 3)}),
    ((3, 70, 2, 1), (9, 70, 1, 1), {"pads": (1, 0, 0, 2)}),
])  # fmt: skip
def test_convolutions(shape, weights, attrs, monkeypatch):
    """Windows with and without pads on each side, copied windows of few channels, partly filled vectors, rows that do not fill a tile."""
    check("cpu/indirect_conv", *layer_of("Conv", [text(*shape), f"const {text(*weights)}", f"const {text(weights[0])}"], **attrs), monkeypatch)


@pytest.mark.parametrize(("channels", "window", "attrs"), [
    (20, 3, {"pads": (1, 1, 1, 1)}), (1, 3, {}), (35, 5, {"pads": (2, 2, 2, 2), "strides": (2, 2)}),
    (16, 3, {"pads": (2, 2, 2, 2), "dilations": (2, 2)}),
])  # fmt: skip
def test_depthwise_convolutions(channels, window, attrs, monkeypatch):
    inputs = [text(2, channels, 12, 11), f"const {text(channels, 1, window, window)}", f"const {text(channels)}"]
    check("cpu/indirect_conv", *layer_of("Conv", inputs, group=channels, **attrs), monkeypatch)


@pytest.mark.parametrize(("channels", "results", "groups"), [(32, 32, 8), (48, 48, 3), (12, 30, 6), (10, 40, 2)])
def test_grouped_convolutions(channels, results, groups, monkeypatch):
    inputs = [text(2, channels, 9, 8), f"const {text(results, channels // groups, 3, 3)}", f"const {text(results)}"]
    layer, arrays = layer_of("Conv", inputs, group=groups, pads=(1, 1, 1, 1), strides=(2, 1))
    check("cpu/grouped_conv", layer, arrays, monkeypatch)
    assert "one group" in get_tactic("cpu/indirect_conv").why_not(layer)


@pytest.mark.parametrize("steps", [
    ("Relu",), ("Silu",), ("HardSwish",), ("Sigmoid",), ("Add",), ("Add", "Relu"), ("Relu", "Add"), ("Add x",), ("Tanh", "Add", "Gelu"),
])  # fmt: skip
def test_epilogues(steps, monkeypatch):
    check("cpu/indirect_conv", *sample_layer("Fused", followed(steps, text(2, 9, 7, 6), text(9, 9, 3, 3), pads=(1, 1, 1, 1)))[1:], monkeypatch)


@pytest.mark.parametrize(("rows", "inner", "results"), [((1,), 70, 1000), ((2,), 33, 5), ((3, 7), 64, 48), ((2, 3, 50), 257, 31)])
def test_products_with_constant_matrices(rows, inner, results, monkeypatch):
    """One and two rows have several accumulators per result."""
    check("cpu/linear_layer", *layer_of("MatMul", [text(*rows, inner), f"const {text(inner, results)}"]), monkeypatch, bound=3e-6)
    if len(rows) == 1:
        inputs = [text(*rows, inner), f"const {text(results, inner)}", f"const {text(results)}"]
        check("cpu/linear_layer", *layer_of("Gemm", inputs, transB=1), monkeypatch, bound=3e-6)


@pytest.mark.parametrize(("op", "attrs"), [
    ("GlobalAveragePool", {}), ("GlobalMaxPool", {}), ("MaxPool", {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ("MaxPool", {"kernel_shape": (2, 3), "dilations": (2, 1), "ceil_mode": 1, "strides": (2, 2)}),
    ("AveragePool", {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ("AveragePool", {"kernel_shape": (3, 2), "pads": (1, 1, 1, 0), "count_include_pad": 1}),
])  # fmt: skip
@pytest.mark.parametrize("channels", [3, 32, 45])
def test_poolings(op, attrs, channels, monkeypatch):
    check("cpu/indirect_pool", *layer_of(op, [text(2, channels, 11, 9)], **attrs), monkeypatch)


@pytest.mark.skipif(not jit.has("avx512f"), reason="no AVX-512")
@pytest.mark.parametrize(("window", "strides", "pads"), [
    ((3, 3), (2, 2), (1, 1, 1, 1)), ((2, 2), (2, 2), (0, 0, 0, 0)), ((3, 2), (1, 3), (2, 1, 0, 1)), ((3, 3), (1, 1), (1, 1, 1, 1)),
    ((5, 5), (1, 1), (2, 2, 2, 2)), ((1, 2), (2, 2), (0, 0, 0, 0)),
])  # fmt: skip
@pytest.mark.parametrize("ceil_mode", [0, 1])
def test_maxima_in_blocks(window, strides, pads, ceil_mode, monkeypatch):
    """Whole windows, or rows then columns; the last window may extend past the image."""
    monkeypatch.setattr(PoolKernel, "serial_work", 0)
    attrs = {"kernel_shape": window, "strides": strides, "pads": pads, "ceil_mode": ceil_mode}
    check("cpu/max_pool", *layer_of("MaxPool", [text(2, 20, 10, 8)], **attrs), monkeypatch, lanes=(16,))


@pytest.mark.parametrize("inputs", [
    ("Mul", text(2, 20, 5, 7), text(2, 20, 1, 1)), ("Add", text(1, 33, 4, 4), text(1, 33, 4, 4)), ("HardSwish", text(2, 3, 5, 7)),
    ("Exp", text(2, 3, 5, 7)), ("Add", text(2, 20, 5, 7), text(2, 1, 5, 7)),
], ids=str)  # fmt: skip
def test_elementwise_ops_in_partly_filled_blocks(inputs):
    """Where results of zeros are zeros, padding channels are computed like others; else no format with padding is offered."""
    op, *operands = inputs
    layer, arrays = layer_of(op, operands)
    tactic = get_tactic("cpu/elementwise")
    signatures = tactic.signatures(layer, CPU)
    padded = [s for s in signatures if s.outputs[0].format.startswith("nChw") and s.outputs[0].dtype.name == "f32"]
    assert bool(padded) == (op != "Exp" and "[2,1," not in operands[-1])
    (want,) = run_layer(layer, arrays)
    for signature in padded:
        _, (got,), _ = compute(layer, [a.copy() for a in arrays], tactic, signature, ())
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 16, 13, 13), (2, 32, 1, 3), (1, 48, 30, 29)])
def test_means_of_blocks(shape):
    """Several pixels at once, and those that remain."""
    layer, arrays = layer_of("GlobalAveragePool", [text(*shape)])
    tactic = get_tactic("cpu/reduce")
    signatures = [s for s in tactic.signatures(layer, CPU) if s.outputs[0].dtype.name == "f32"]
    assert len(signatures) == 3
    for signature in signatures:
        _, (got,), _ = compute(layer, arrays, tactic, signature, ())
        np.testing.assert_allclose(got, arrays[0].mean((2, 3), dtype=np.float64, keepdims=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("shape", "perm"), [
    ((3, 17), (1, 0)), ((2, 3, 9, 11), (0, 2, 3, 1)), ((2, 5, 3, 7), (2, 1, 0, 3)), ((4, 1, 6), (0, 1, 2)), ((2, 3, 4, 5), (3, 2, 1, 0)),
    ((1,), (0,)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["f32", "i64", "u8", "f16"])
def test_transposes(shape, perm, dtype):
    layer, arrays = layer_of("Transpose", [f"{dtype}[{','.join(map(str, shape))}]"], perm=perm)
    tactic = get_tactic("cpu/strided_copy")
    (signature,) = tactic.signatures(layer, CPU)
    assert tactic.refuses(layer, signature, CPU) is None
    _, (got,), _ = compute(layer, arrays, tactic, signature, ())
    np.testing.assert_array_equal(got, arrays[0].transpose(perm))


@pytest.mark.parametrize(
    "shape", [(1, 16, 5, 7), (2, 32, 17, 19), (1, 40, 6, 33), (3, 3, 4, 5), (2, 49, 1, 1), (1, 17, 16, 16), (1, 64, 1, 16)], ids=str
)  # fmt: skip
@pytest.mark.parametrize("block", ["nChw8c", "nChw16c"])
@pytest.mark.parametrize("dtype", ["f32", "u8", "f16", "i64"])
@pytest.mark.parametrize("lanes", LANES)
def test_blocks_of_channels(shape, block, dtype, lanes, monkeypatch):
    """Between blocks, channels last and row-major: every element once, zeros behind the last channel."""
    monkeypatch.setattr(strided_copy, "count_lanes", lambda: lanes)
    monkeypatch.setattr(strided_copy.StridedCopyKernel, "serial_work", 0)
    monkeypatch.setattr("test_onednn_tactics.CPU", CpuBackend(threads=3))
    tactic = get_tactic("cpu/strided_copy")
    x = np.random.default_rng(0).integers(1, 99, shape).astype(parse_type(f"{dtype}[1]").dtype.numpy)
    for source, target in ((block, "nhwc"), ("nhwc", block), (block, "linear"), ("linear", block), ("linear", "nhwc"), ("nhwc", "linear")):
        net = Network("reformat")
        value = net.add_input("x", parse_type(f"{dtype}[{','.join(map(str, shape))}]"))
        net.mark_output(net.add("Reformat", value, source_format=source, format=target, source_dtype=dtype, dtype=dtype), "y")
        (signature,) = tactic.signatures(net.layers[0], CPU)
        assert tactic.refuses(net.layers[0], signature, CPU) is None
        _, (got,), _ = compute(net.layers[0], [x], tactic, signature, ())
        np.testing.assert_array_equal(got, x, err_msg=f"{source} to {target}")


def test_means_of_many_values(monkeypatch):
    """One accumulator for 12,544 values of one sign has an error of eight times the bound."""
    layer, (x,) = layer_of("GlobalAveragePool", [text(1, 5, 112, 112)])
    check("cpu/indirect_pool", layer, [np.abs(x) + np.float32(1)], monkeypatch, lanes=(8,), bound=5e-7)


def test_nan_reaches_the_results_that_read_it(monkeypatch):
    for op, inputs, attrs in (
        ("Conv", [text(1, 6, 8, 8), f"const {text(8, 6, 3, 3)}"], {"pads": (1, 1, 1, 1)}),
        ("MaxPool", [text(1, 6, 8, 8)], {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}),
    ):
        layer, arrays = layer_of(op, inputs, **attrs)
        arrays[0][0, 2, 3, 4] = np.nan
        tactic = get_tactic("cpu/indirect_conv" if op == "Conv" else "cpu/indirect_pool")
        _, (got,), _ = compute(layer, arrays, tactic, tactic.signatures(layer, CPU)[0], ())
        (want,) = run_layer(layer, arrays)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "x86_64-linux-gnu"])
def test_code_for_other_machines(target):
    """The code of NEON's vectors multiplies and adds vectors with one instruction, and keeps the accumulators of the inner loop in registers."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    from whet.backends.cpu.machine_code import use_opaque_pointers

    ir = emit_indirect_ir(Form("product", 4, 2, (6,), 0, (Step("Relu"),)))
    module = llvm.parse_assembly(ir if llvm.llvm_version_info[0] < 17 else use_opaque_pointers(ir))
    machine = llvm.Target.from_triple(target).create_target_machine(opt=3, features="+neon" if "aarch64" in target else "+avx2,+fma")
    assembly = machine.emit_assembly(module)
    product = assembly[assembly.index("sums_6:") :]
    product = product[: product.index(".cfi_endproc")]
    fused = product.count("fmla") if "aarch64" in target else product.count("vfmadd")
    assert fused == 12 * (4 + 1), "twelve accumulators, for four channels and for the remaining ones"


def names(*switches):
    return {t.name for t in list_enabled_tactics("cpu", switches)}


def test_they_replace_onednn_and_are_there_on_request():
    own = {"cpu/indirect_conv", "cpu/indirect_pool", "cpu/layer_norm", "cpu/strided_copy"}
    assert not own & names()
    assert own <= names("-ONEDNN")
    assert own & names("+indirect_conv") == {"cpu/indirect_conv"}
    assert own & names("-ONEDNN", "-indirect_conv") == own - {"cpu/indirect_conv"}
    assert "cpu/grouped_conv" in names(), "oneDNN has no fast kernel for groups"
    assert "cpu/linear_layer" in names(), "oneDNN's products are slower on some CPUs"


def test_networks_without_onednn_run_in_own_kernels(monkeypatch):
    """An inverted residual with a gate, a strided residual block, a pool and a classifier: nothing runs in NumPy."""
    rng, net = np.random.default_rng(0), Network("net")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    x = net.add_input("x", parse_type("f32[1,3,32,32]"))
    t = net.add("HardSwish", net.add("Conv", x, w(16, 3, 3, 3), w(16), pads=(1,) * 4, strides=(2, 2)))
    u = net.add("HardSwish", net.add("Conv", t, w(40, 16, 1, 1), w(40)))
    u = net.add("HardSwish", net.add("Conv", u, w(40, 1, 3, 3), w(40), pads=(1,) * 4, group=40))
    t = net.add("Add", net.add("Conv", u, w(16, 40, 1, 1), w(16)), t)
    t = net.add("MaxPool", t, kernel_shape=(2, 2), strides=(2, 2))
    t = net.add("Relu", net.add("Conv", t, w(24, 16, 3, 3), w(24), pads=(1,) * 4, strides=(2, 2)))
    t = net.add("Flatten", net.add("GlobalAveragePool", t))
    net.mark_output(net.add("Gemm", t, w(24, 10), w(10)), "y")
    config = BuildConfig(optimization_level=1, avg_timing=1, timing_cache="", threads=1, tactic_sources=("-ONEDNN",))
    plan = build(net, config)
    assert not {n: c.tactic for n, c in plan.choices.items() if "numpy" in c.tactic}
    assert not [c.tactic for c in plan.choices.values() if "onednn" in c.tactic]
    from whet.runtime import Runtime

    feeds = {"x": rng.standard_normal((1, 3, 32, 32)).astype(np.float32)}
    with Runtime().load(plan).create_context() as context:
        np.testing.assert_allclose(context.run(feeds)["y"], run_network(net, feeds)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "weights", "attrs"), [
    ((2, 5, 4, 7, 6), (9, 5, 3, 3, 3), {"pads": (1, 1, 1, 1, 1, 1)}),
    ((1, 3, 7, 8, 9), (20, 3, 3, 5, 2), {"pads": (2, 0, 1, 1, 2, 0), "strides": (2, 1, 3), "dilations": (2, 1, 2)}),
    ((2, 19, 3, 2, 5), (37, 19, 1, 1, 1), {"strides": (2, 1, 1)}),
    ((1, 12, 5, 6, 7), (12, 1, 3, 3, 3), {"pads": (1, 1, 1, 1, 1, 1), "group": 12}),
])  # fmt: skip
def test_convolutions_of_volumes(shape, weights, attrs, monkeypatch):
    inputs = [text(*shape), f"const {text(*weights)}", f"const {text(weights[0])}"]
    check("cpu/indirect_conv", *layer_of("Conv", inputs, **{"group": 1, **attrs}), monkeypatch)


@pytest.mark.parametrize(("op", "attrs"), [
    ("MaxPool", {"kernel_shape": (3, 2, 3), "strides": (2, 2, 1), "pads": (1, 0, 1, 1, 1, 1)}),
    ("MaxPool", {"kernel_shape": (2, 2, 2), "dilations": (2, 1, 2), "ceil_mode": 1, "strides": (2, 2, 2)}),
    ("AveragePool", {"kernel_shape": (3, 3, 2), "strides": (2, 1, 2), "pads": (1, 1, 0, 1, 1, 1)}),
    ("AveragePool", {"kernel_shape": (2, 3, 2), "pads": (1, 1, 0, 0, 1, 1), "count_include_pad": 1}),
])  # fmt: skip
def test_poolings_of_volumes(op, attrs, monkeypatch):
    check("cpu/indirect_pool", *layer_of(op, [text(2, 21, 5, 7, 6)], **attrs), monkeypatch)


@pytest.mark.parametrize(("shape", "weights", "attrs"), [
    ((2, 16, 5, 7), (16, 12, 2, 2), {"strides": (2, 2)}),
    ((1, 7, 6, 5), (7, 33, 4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((2, 3, 5, 4), (3, 9, 3, 3), {"strides": (2, 3), "pads": (1, 0, 0, 1), "output_padding": (1, 2)}),
    ((1, 5, 6, 7), (5, 4, 3, 3), {"pads": (1, 1, 1, 1)}),
    ((1, 6, 4, 5), (6, 5, 3, 2), {"strides": (3, 2), "dilations": (2, 3), "pads": (0, 1, 2, 0)}),
    ((1, 4, 3, 3), (4, 6, 1, 2), {"strides": (3, 4), "output_padding": (1, 1)}),
    ((1, 8, 4, 4), (8, 3, 5, 5), {"strides": (2, 2), "pads": (2, 2, 2, 2), "group": 2, "output_padding": (1, 1)}),
    ((2, 20, 4, 3), (20, 1, 4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1), "group": 20}),
    ((2, 6, 9), (6, 10, 4), {"strides": (2,), "pads": (1, 1)}),
    ((1, 5, 3, 4, 2), (5, 7, 3, 2, 3), {"strides": (2, 1, 2), "pads": (1, 0, 1, 0, 1, 1), "output_padding": (1, 0, 1)}),
])  # fmt: skip
def test_transposed_convolutions(shape, weights, attrs, monkeypatch):
    """Windows that strides divide or not, smaller than a stride, with dilations that share a divisor with it or not; groups; results beyond the last
    tap."""
    group = attrs.get("group", 1)
    inputs = [text(*shape), f"const {text(*weights)}", f"const {text(weights[1] * group)}"]
    layer, arrays = layer_of("ConvTranspose", inputs, **{"group": 1, **attrs})
    check("cpu/transposed_conv", layer, arrays, monkeypatch)


def test_random_transposed_convolutions(monkeypatch):
    """Each result reads the taps that the op's definition says."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        size, strides, dilations = ([int(n) for n in rng.integers(1, high, 2)] for high in (6, 5, 4))
        reach = [d * (k - 1) + 1 for d, k in zip(dilations, size, strict=True)]
        pads = [int(rng.integers(0, min(3, n))) for n in (*reach, *reach)]
        extra = [int(rng.integers(0, max(s, d))) for s, d in zip(strides, dilations, strict=True)]
        inputs = [text(1, 3, 4, 5), f"const {text(3, 2, *size)}"]
        attrs = {"group": 1, "strides": strides, "dilations": dilations, "pads": pads, "output_padding": extra}
        check("cpu/transposed_conv", *layer_of("ConvTranspose", inputs, **attrs), monkeypatch, lanes=(8,), threads=(2,))


@pytest.mark.parametrize("shape", [(2, 21, 9), (1, 40, 6, 5), (2, 7, 3, 4, 5)])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_batch_norms(shape, epsilon, monkeypatch):
    """With statistics whose mean is larger than the deviation."""
    channels = text(shape[1])
    inputs = [text(*shape), *(f"const {channels}" for _ in range(3)), f"const positive {channels}"]
    layer, arrays = layer_of("BatchNormalization", inputs, epsilon=epsilon)
    arrays[0] += 3
    check("cpu/batch_norm", layer, arrays, monkeypatch)


def test_a_network_of_volumes_without_onednn():
    """Convolutions with a following Concat and without, pooling, a transposed convolution, a BatchNormalization that reads the input, LogSoftmax: no
    layer runs in NumPy."""
    net, rng = Network("volumes"), np.random.default_rng(6)

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    x = net.add_input("x", parse_type("f32[1,2,8,12,10]"))
    norm = [net.constant((rng.random(2) + 0.5).astype(np.float32), f"n{k}") for k in range(4)]
    t = net.add("Relu", net.add("BatchNormalization", x, *norm, epsilon=1e-5))
    a = net.add("Relu", net.add("Conv", t, w(12, 2, 3, 3, 3), w(12), pads=(1,) * 6))
    b = net.add("MaxPool", a, kernel_shape=(2, 2, 2), strides=(2, 2, 2))
    b = net.add("Relu", net.add("Conv", b, w(20, 12, 3, 3, 3), w(20), pads=(1,) * 6))
    b = net.add("ConvTranspose", b, w(20, 12, 2, 2, 2), w(12), strides=(2, 2, 2))
    t = net.add("Concat", a, b, axis=1)
    t = net.add("AveragePool", net.add("Conv", t, w(5, 24, 1, 1, 1), w(5)), kernel_shape=(2, 3, 2), strides=(2, 3, 2))
    net.mark_output(net.add("LogSoftmax", t, axis=1), "y")
    config = BuildConfig(optimization_level=1, avg_timing=1, timing_cache="", threads=1, tactic_sources=("-ONEDNN",))
    plan = build(net, config)
    assert not {n: c.tactic for n, c in plan.choices.items() if "numpy" in c.tactic or "onednn" in c.tactic}
    from whet.runtime import Runtime

    feeds = {"x": rng.standard_normal((1, 2, 8, 12, 10)).astype(np.float32)}
    with Runtime().load(plan).create_context() as context:
        np.testing.assert_allclose(context.run(feeds)["y"], run_network(net, feeds)["y"], rtol=1e-4, atol=1e-5)
