"""Rows times 2:4 matrices by whet's CPU kernels: sizes, epilogues, threads, AVX-512 code, positions with arbitrary bits, refusals, builds."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import CPU, Listed, check, compute, fused, place

from whet.backends.cpu import CpuBackend
from whet.backends.cpu.machine_code import use_opaque_pointers
from whet.builder import BuildConfig, build
from whet.composites._two_four_samples import (
    draw_integer_weights,
    draw_two_four_weights,
    make_sparse_conv_sample,
    make_sparse_matmul_sample,
    make_sparse_qconv_sample,
)
from whet.composites.quantized import make_op_body_builder, make_quantized_sample
from whet.network import BF16, Network, parse_type
from whet.ops import run_regions, sample_layer
from whet.sparsity.report import list_sparse_layers
from whet.tactics import Args, get_tactic
from whet.tactics._base import PlanRefused
from whet.tactics._two_four import compress
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.sparse import sparse_linear, sparse_qlinear
from whet.tactics.cpu.sparse._sparse_linear_ir import Variant, emit_sparse_linear_ir
from whet.tactics.cpu.sparse._sparse_qlinear_ir import QVariant, emit_sparse_qlinear_ir

NAME = "cpu/sparse_linear"
TACTIC = get_tactic(NAME)
AVX2 = pytest.mark.skipif(TACTIC.unavailable() is not None, reason=str(TACTIC.unavailable()))


def select_own_types(layer, machine=CPU):
    """The signature that stores the result in the layer's own type: a CPU with bf16 instructions also has one that stores f32 as bf16."""
    (signature,) = (s for s in TACTIC.signatures(layer, machine) if s.outputs[0].dtype == layer.outputs[0].dtype)
    return signature


def judge(layer, arrays, configs=None):
    """Every config against the reference in f64. Rounding errors are relative to the sums of absolute values: the terms may cancel."""
    (want,) = run_regions(layer, [a.astype(np.float64) for a in arrays])
    (scale,) = run_regions(layer, [np.abs(a).astype(np.float64) for a in arrays])
    signature = select_own_types(layer)
    for config in configs or TACTIC.configs(layer, signature, CPU):
        _, got, _ = compute(layer, arrays, TACTIC, signature, config)
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6 * np.abs(scale).max(), err_msg=str(config))


@AVX2
@pytest.mark.parametrize("lanes", [8, pytest.param(16, marks=pytest.mark.skipif(not jit.has("avx512f"), reason="no AVX-512"))])
def test_random_sizes(lanes, monkeypatch):
    """Rows, inputs and channels that are and are not multiples of tiles, chunks and vectors, down to 1 channel and 4 inputs."""
    monkeypatch.setattr(sparse_linear, "count_vector_lanes", lambda: lanes)
    rng = np.random.default_rng(lanes)
    for rows, inputs, channels in [(1, 4, 1), (1, 32, 64), (9, 36, 33), *rng.integers(1, 80, (12, 3)).tolist()]:
        inputs = -(-inputs // 4) * 4
        _, layer, arrays = sample_layer("Fused", make_sparse_matmul_sample(f"f32[{rows},{inputs}]", channels, ("Relu", "Gelu")[rows % 2]))
        judge(layer, arrays)


@AVX2
@pytest.mark.parametrize("lanes", [8, pytest.param(16, marks=pytest.mark.skipif(not jit.has("avx512f"), reason="no AVX-512"))])
def test_bf16_of_random_sizes(lanes, monkeypatch):
    """Inputs, weights, addend and results in bf16, sums in f32: the result is that of exact arithmetic, rounded once."""
    monkeypatch.setattr(sparse_linear, "count_vector_lanes", lambda: lanes)
    rng = np.random.default_rng(lanes)
    for rows, inputs, channels in [(1, 4, 1), (1, 32, 64), (9, 36, 33), *rng.integers(1, 80, (8, 3)).tolist()]:
        w = draw_two_four_weights(-(-inputs // 4) * 4, channels, axis=0).astype(BF16.numpy)
        added = f"bf16[{rows},{channels}]"
        layer, arrays = fused("MatMul", [(f"bf16[{rows},{len(w)}]", False), (w, True), (added, False)], lambda body, x, w, a:
                              body.add("Relu", body.add("Add", body.add("MatMul", x, w), a)))  # fmt: skip
        assert TACTIC.why_not(layer) is None
        signature = select_own_types(layer)
        assert signature.outputs[0].dtype == BF16
        exact = np.maximum(arrays[0].astype("f8") @ w.astype("f8") + arrays[2].astype("f8"), 0)
        size = np.abs(arrays[0].astype("f8")) @ np.abs(w.astype("f8")) + 1
        for config in TACTIC.configs(layer, signature, CPU):
            _, got, _ = compute(layer, arrays, TACTIC, signature, config)
            error = np.abs(got[0].astype("f8") - exact)
            assert (error <= 2**-8 * exact + 1e-6 * size).all(), (config, error.max())


@AVX2
def test_bf16_results_are_rounded_to_nearest_even_and_keep_nan():
    w = np.zeros((4, 8), BF16.numpy)
    w[0], w[1] = 1, 1
    layer, arrays = fused("MatMul", [("bf16[6,4]", False), (w, True)], lambda body, *t: body.add("Relu", body.add("MatMul", *t)))
    arrays[0][:] = 0
    arrays[0][:, 0] = [1, 1, 1, 3e38, np.nan, np.inf]
    arrays[0][:, 1] = [2**-8, 3 * 2**-8, 2**-8 + 2**-15, 3e38, 0, 1]
    signature = select_own_types(layer)
    _, got, _ = compute(layer, arrays, TACTIC, signature, TACTIC.configs(layer, signature, CPU)[0])
    column = got[0][:, 0].astype("f4")
    np.testing.assert_array_equal(column, np.array([1, 1 + 2**-6, 1 + 2**-7, np.inf, np.nan, np.inf], "f4"))


@AVX2
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_channels(threads):
    _, layer, arrays = sample_layer("Fused", make_sparse_matmul_sample("f32[3,512]", 1000, "Relu"))
    (want,), machine = run_regions(layer, arrays), CpuBackend(threads=threads)
    signature = select_own_types(layer, machine)
    for config in TACTIC.configs(layer, signature, machine):
        kernel = TACTIC.plan(layer, signature, config, machine)
        assert kernel.threads == threads
        packed, x, out, stream = kernel.packed[0].make(), place(arrays[0], signature.inputs[0]), dnn.allocate_aligned(kernel.outputs[0]), Listed()
        kernel.enqueue(Args((x.ctypes.data, 0, 0), (out.ctypes.data,), (packed.ctypes.data,), 0), stream)
        stream.calls[0].run()
        np.testing.assert_allclose(out.view(np.float32).reshape(want.shape), want, rtol=1e-4, atol=1e-4)
    CPU.activate()


@AVX2
@pytest.mark.parametrize("added", ["before", "behind"])
@pytest.mark.parametrize("channels", [40, 37])
def test_residuals_and_convolutions(added, channels):
    _, layer, arrays = sample_layer("Fused", make_sparse_conv_sample("f32[2,52,3,3]", channels, 1, added=added))
    judge(layer, arrays)


@AVX2
def test_epilogues():
    x, w = "f32[2,40]", draw_two_four_weights(40, 24, axis=0)
    swish = {"Silu": lambda body, y: body.add("Mul", y, body.add("Sigmoid", y)), "Gelu": lambda body, y: body.add("Gelu", y)}
    for build_step in (*swish.values(), lambda body, y: body.add("Relu", body.add("Gelu", y))):
        layer, arrays = fused("MatMul", [(x, False), (w, True)], lambda body, *t, step=build_step: step(body, body.add("MatMul", *t)))
        judge(layer, arrays)
    for op, attrs in (("Tanh", {}), ("Gelu", {"approximate": "tanh"})):
        layer, _ = fused("MatMul", [(x, False), (w, True)], lambda body, *t, op=op, attrs=attrs: body.add(op, body.add("MatMul", *t), **attrs))
        assert TACTIC.why_not(layer) == f"computes no {op} in its epilogue"


@AVX2
def test_gelu_of_large_inputs():
    """Both tails, infinities, NaN and values whose squares overflow."""
    w = np.zeros((4, 8), np.float32)
    w[0] = 1
    layer, arrays = fused("MatMul", [("f32[12,4]", False), (w, True)], lambda body, *t: body.add("Gelu", body.add("MatMul", *t)))
    arrays[0][:, 0] = [-1e30, -40, -9, -5.5, -1e-3, 0, 1e-3, 5.5, 9, 40, 1e30, np.inf]
    (want,) = run_regions(layer, [a.astype(np.float64) for a in arrays])
    signature = select_own_types(layer)
    _, got, _ = compute(layer, arrays, TACTIC, signature, TACTIC.configs(layer, signature, CPU)[0])
    np.testing.assert_allclose(got[0], want, rtol=1e-6, atol=1e-6)


@JIT
def test_avx512_code_selects_with_one_instruction():
    """16 lanes are compiled for a CPU with AVX-512, whether or not this one has it."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    for variant, register in (
        (Variant(16, 4, 4, 1, 3, 5, ("Add", "Silu"), True), "zmm"), (Variant(8, 4, 2, 1, 3, 5, ("Gelu",)), "ymm"),
        (Variant(16, 4, 4, 1, 3, 5, ("Add",), True, True), "zmm"), (Variant(8, 4, 2, 1, 3, 5, ("Add",), False, True), "ymm"),
        (QVariant(16, 4, 4, 1, 3, 5, ("Silu",), True, signed=True, stores_integers=True), "zmm"), (QVariant(8, 2, 4, 3, 7, 5, ("Gelu",)), "ymm"),
    ):  # fmt: skip
        machine = target.create_target_machine(cpu="skylake-avx512" if register == "zmm" else "haswell", opt=3)
        integers = isinstance(variant, QVariant)
        text = emit_sparse_qlinear_ir(variant) if integers else emit_sparse_linear_ir(variant)
        instruction, per_group = ("vpmaddwd", 1) if integers else ("vpermilps", 2)
        module = llvm.parse_assembly(text if llvm.llvm_version_info[0] < 17 else use_opaque_pointers(text))
        selections = [line for line in machine.emit_assembly(module).splitlines() if instruction in line and f"%{register}" in line]
        groups = 8 + variant.rest_groups
        assert len(selections) == groups * per_group * variant.blocks * (variant.rows + variant.rest_rows)


@AVX2
def test_positions_with_arbitrary_bits_read_nothing_else():
    """An engine file may hold any packed bytes: the result is a sum of the row's own inputs, whatever the positions."""
    _, layer, arrays = sample_layer("Fused", make_sparse_matmul_sample("f32[1,64]", 32, "Relu"))
    arrays[0][:] = 1
    signature = select_own_types(layer)
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, CPU)[0], CPU)
    assert kernel.packed[0].storable
    packed, results = kernel.packed[0].make(), []
    matrix = layer.inputs[1].array().T
    made = compress(matrix)
    words = np.flatnonzero(np.isin(packed.view(np.uint32), _words(made.metadata)))
    assert len(words) >= 64
    for _ in range(2):
        x, out, stream = place(arrays[0], signature.inputs[0]), dnn.allocate_aligned(kernel.outputs[0]), Listed()
        kernel.enqueue(Args((x.ctypes.data, 0, 0), (out.ctypes.data,), (packed.ctypes.data,), 0), stream)
        stream.calls[0].run()
        results.append(out.view(np.float32).copy())
        packed.view(np.uint32)[words] = np.random.default_rng(1).integers(0, 1 << 32, len(words), np.uint32)
    np.testing.assert_array_equal(*results)  # all inputs are equal, so that the selection does not matter


def _words(metadata):
    shifts = np.arange(8, dtype=np.uint32) * 4
    return np.bitwise_or.reduce(metadata.reshape(len(metadata), -1, 8).astype(np.uint32) << shifts, axis=-1)


@AVX2
def test_refusals():
    dense = draw_two_four_weights(16, 8, axis=0)
    dense[4:8, 3] = 1, 1, 1, 0
    layer, _ = fused("MatMul", [("f32[2,16]", False), (dense, True)], lambda body, *t: body.add("Relu", body.add("MatMul", *t)))
    assert TACTIC.why_not(layer) == "weights are not 2:4: output channel 3, inputs 4-7 have 3 non-zeros"
    _, layer, _ = sample_layer("Fused", make_sparse_conv_sample("f32[1,16,5,5]", 8, 3, pads=(1, 1, 1, 1)))
    assert TACTIC.why_not(layer) == "takes 1x1 convolutions with one group, no strides, no pads"
    _, layer, _ = sample_layer("Fused", make_sparse_matmul_sample("f32[1,64]", 32, "Relu"))
    with pytest.raises(PlanRefused, match="does not fit the registers"):
        TACTIC.plan(layer, TACTIC.signatures(layer, CPU)[0], (("blocks", 9), ("rows", 9)), CPU)


@AVX2
def test_a_build_times_both_and_chooses_the_faster(tmp_path):
    """A layer bound by weight bytes: the report holds times of dense and sparse tactics; the report of sparsity names the choice."""
    net = Network("linear")
    x = net.add_input("x", parse_type("f32[1,512]"))
    w = draw_two_four_weights(512, 512, axis=0)
    net.mark_output(net.add("MatMul", x, net.constant(w, "w")))
    plan = build(net, BuildConfig(sparsity="enable", timing_cache="", threads=1))
    (candidates,) = plan.report.candidates.values()
    timed = {c.tactic for c in candidates if c.ms is not None}
    assert NAME in timed
    assert len(timed) > 1
    (choice,) = plan.choices.values()
    assert choice.tactic in timed
    assert bool(list_sparse_layers(plan)) == (choice.tactic == NAME)


def quantized(rows, inputs, channels, dtype, zero, store, scale=None):
    """A Gemm of random integers; `scale` of the weights per channel, or one."""
    rng = np.random.default_rng(rows)
    scale = rng.uniform(0.5, 2, channels).astype(np.float32) / np.float32(40 * np.sqrt(inputs)) if scale is None else scale
    data = [(f"full {dtype}[{rows},{inputs}]", 0.02, zero, 1), (draw_integer_weights(channels, inputs), scale, None, 0)]
    return make_quantized_sample("Gemm", [*data, rng.standard_normal(channels).astype(np.float32)], make_op_body_builder("Gemm", transB=1), store)


@AVX2
@pytest.mark.parametrize("lanes", [8, pytest.param(16, marks=pytest.mark.skipif(not jit.has("avx512bw"), reason="no AVX-512"))])
@pytest.mark.parametrize(("dtype", "zero"), [("u8", 0), ("u8", 131), ("i8", 0), ("i8", -7)])
def test_integers_of_random_sizes(lanes, dtype, zero, monkeypatch):
    """Signed and unsigned, with and without zero point, integer and float results."""
    monkeypatch.setattr(sparse_qlinear, "count_qvector_lanes", lambda: lanes)
    tactic, rng = get_tactic("cpu/sparse_qlinear"), np.random.default_rng(zero + 9)
    stores = (None, (0.03, 4, "i8"), (0.02, 120, "u8"))
    sizes = [(size, stores) for size in [(1, 4, 1), (1, 96, 70), (9, 36, 33)]]
    sizes += [(size, stores[k % 3 : k % 3 + 1]) for k, size in enumerate(rng.integers(1, 70, (4, 3)).tolist())]
    for (rows, inputs, channels), some in sizes:
        for store in some:
            _, layer, arrays = sample_layer("Fused", quantized(rows, -(-inputs // 4) * 4, channels, dtype, zero, store))
            assert tactic.why_not(layer) is None
            assert check(layer, arrays, [tactic]) >= 1


@AVX2
def test_largest_integers_do_not_saturate():
    """255 by 127 in both kept weights: vpmaddubsw, which adds both products in 16 bits, would saturate."""
    weights = np.zeros((24, 64), np.int8)
    weights[:, ::4] = weights[:, 3::4] = 127
    weights[1::2] *= -1
    data = [("full u8[3,64]", 1.0, 0, 1), (weights, np.float32(1), None, 0), np.zeros(24, np.float32)]
    _, layer, arrays = sample_layer("Fused", make_quantized_sample("Gemm", data, make_op_body_builder("Gemm", transB=1), None))
    arrays[0][:] = 255
    tactic = get_tactic("cpu/sparse_qlinear")
    (signature,) = tactic.signatures(layer, CPU)
    for config in tactic.configs(layer, signature, CPU):
        _, got, _ = compute(layer, arrays, tactic, signature, config)
        np.testing.assert_array_equal(got[0], np.broadcast_to(np.where(np.arange(24) % 2, -1, 1) * (255 * 127 * 32), (3, 24)))


@AVX2
def test_quantized_refusals():
    tactic = get_tactic("cpu/sparse_qlinear")
    _, layer, _ = sample_layer("Fused", make_sparse_qconv_sample("u8[2,64,9,9]", 0, 16, 1, (0.03, 0, "u8"), ("full u8[2,16,9,9]", 0.02, 5, 1)))
    assert tactic.why_not(layer) == "adds no residual"
    _, layer, _ = sample_layer("Fused", make_sparse_qconv_sample("u8[2,64,9,9]", 0, 16, 3, (0.03, 0, "u8"), pads=(1, 1, 1, 1)))
    assert tactic.why_not(layer) == "takes 1x1 convolutions with one group, no strides, no pads"
    _, layer, _ = sample_layer("Fused", make_sparse_matmul_sample("f32[1,64]", 32, "Relu"))
    assert tactic.why_not(layer) == "computes in integers, the layer is not quantized"
