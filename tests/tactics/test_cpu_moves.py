"""whet's CPU kernel for fused data movement with arithmetic: formats, tails of rows, threads, special values, refusals, a head in a network."""

import numpy as np
import pytest
from test_onednn_tactics import CPU, compute

from whet.backends.cpu import CpuBackend
from whet.builder import BuildConfig, build
from whet.composites.moves import make_channel_shuffle_sample, make_detector_head_sample
from whet.network import Network, parse_network, parse_type
from whet.ops import run_network, run_regions, sample_layer
from whet.ops._base import Sample
from whet.runtime import Runtime
from whet.tactics import get_tactic
from whet.tactics._moves_indices import Refused
from whet.tactics._moves_tree import Moves
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.move import moves
from whet.tactics.cpu.move._moves_ir import emit_moves_ir

JIT = pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))
TACTIC = get_tactic("cpu/moves")


def chain(step, inputs=("f32[2,24,3,5]",), cut=(2, 2, 12, 15), rows=(2, 30, 12), behind=lambda body, x: x[0]) -> Sample:
    """`step(body, [values of each input, as rows of 12])`, joined with `behind` of them."""

    def regions():
        body = Network("body", "lowered")
        own = [body.add_input(f"i{i}", parse_type(t)) for i, t in enumerate(inputs)]
        turned = []
        for x in own:
            parts = body.add("Reshape", x, body.constant(np.array(cut), "cut"))
            turned.append(body.add("Reshape", body.add("Transpose", parts, perm=(0, 1, 3, 2)), body.constant(np.array(rows), "rows")))
        body.mark_output(body.add("Concat", step(body, turned), behind(body, turned), axis=2))
        return {"body": body}

    return Sample(list(inputs), {"composite": "Moves"}, regions)


def close(layer, arrays, signature, machine=CPU, code=None):
    """Runs the kernel and compares it with the reference."""
    kernel = TACTIC.plan(layer, signature, (), machine)
    _, got, fed = compute(layer, arrays, TACTIC, signature, ())
    (want,) = run_regions(layer, fed)
    np.testing.assert_allclose(got[0], want, rtol=2e-6, atol=1e-6)
    return kernel


@JIT
@pytest.mark.parametrize(
    "sample",
    [
        make_detector_head_sample(2, 3, 2, (4, 6), (2, 3)),
        make_detector_head_sample(2, 4, 11, (5, 6), (3, 3)),
        make_detector_head_sample(1, 16, 6, (5, 5)),
        make_detector_head_sample(3, 2, 11, (7, 5)),
        make_detector_head_sample(1, 4, 83, (3, 3)),
    ],
)
def test_heads_from_pixels_and_from_blocks_of_channels(sample):
    """Rows of 6 to 88 values: shorter than a register, whole registers and tails; anchors that start anywhere in a block."""
    _, layer, arrays = sample_layer("Fused", sample)
    usable = [s for s in TACTIC.signatures(layer, CPU) if TACTIC.refuses(layer, s, CPU) is None]
    assert usable
    for signature in usable:
        close(layer, arrays, signature)
    channels, registers = layer.inputs[0].shape[1], get_registers()
    blocks = any(s.inputs[0].format == registers.stored.format for s in usable)
    assert blocks == (channels % registers.lanes == 0 and channels // layer.outputs[0].shape[2] != 16)


@JIT
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_rows(threads):
    _, layer, arrays = sample_layer("Fused", make_detector_head_sample(2, 3, 80, (13, 11), (3, 3)))
    machine = CpuBackend(threads=threads)
    signature = next(s for s in TACTIC.signatures(layer, machine) if s.inputs[0].format == "nhwc")
    assert close(layer, arrays, signature, machine).threads == threads


@JIT
@pytest.mark.parametrize("op", ["Sigmoid", "Relu", "Abs", "Neg"])
def test_steps_keep_nan_and_infinity(op):
    _, layer, arrays = sample_layer("Fused", chain(lambda body, x: body.add(op, x[0])))
    arrays[0].reshape(-1)[:9] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-40, -1e-40]
    for signature in TACTIC.signatures(layer, CPU):
        if TACTIC.refuses(layer, signature, CPU) is None:
            close(layer, arrays, signature)


@JIT
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
def test_two_sources_meet(op):
    _, layer, arrays = sample_layer("Fused", chain(lambda body, x: body.add(op, body.add("Sigmoid", x[0]), x[1]), ("f32[2,24,3,5]",) * 2))
    arrays[1][...] = np.where(np.abs(arrays[1]) < 0.1, 0.5, arrays[1])
    close(layer, arrays, next(s for s in TACTIC.signatures(layer, CPU) if s.inputs[0].format == "nhwc"))


@JIT
def test_parts_within_parts():
    sample = chain(lambda body, x: x[0], behind=lambda body, x: body.add("Concat", body.add("Neg", x[0]), body.add("Abs", x[0]), axis=2))
    _, layer, arrays = sample_layer("Fused", sample)
    close(layer, arrays, next(s for s in TACTIC.signatures(layer, CPU) if s.inputs[0].format == "nhwc"))


@JIT
@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.skipif(not jit.has("avx512dq"), reason="no AVX-512 DQ"))])
def test_sigmoids_with_and_without_avx512(wide, monkeypatch):
    monkeypatch.setattr(moves, "emit_moves_ir", lambda tree, has_avx512dq: emit_moves_ir(tree, wide))
    _, layer, arrays = sample_layer("Fused", chain(lambda body, x: body.add("Sigmoid", body.add("Sigmoid", x[0]))))
    arrays[0].reshape(-1)[:4] = [np.nan, np.inf, -np.inf, np.uint32(0x7FC00001).view(np.float32)]
    close(layer, arrays, next(s for s in TACTIC.signatures(layer, CPU) if s.inputs[0].format == "nhwc"))


@JIT
@pytest.mark.parametrize(("sample", "form", "why"), [
    (make_detector_head_sample(2, 3, 2, (4, 6)), "linear", "adjacent values of a result row have a stride of 24"),
    (make_detector_head_sample(1, 16, 6, (5, 5)), get_registers().stored.format, "too many different offsets in blocks"),
    (make_channel_shuffle_sample(2, 2, 8, 5, 3), "nhwc", "have a stride of"),
    (chain(lambda body, x: body.add("Pow", x[0], x[0])), "nhwc", "the kernel has no Pow"),
    (chain(lambda body, x: body.add("Tanh", x[0])), "nhwc", "the kernel has no Tanh"),
])  # fmt: skip
def test_ops_without_code_are_refused_with_the_reason(sample, form, why):
    _, layer, _ = sample_layer("Fused", sample)
    signature = next(s for s in TACTIC.signatures(layer, CPU) if s.inputs[0].format == form)
    assert why in TACTIC.refuses(layer, signature, CPU)


def test_long_code_is_refused():
    _, layer, _ = sample_layer("Fused", make_detector_head_sample(1, 2, 80, (20, 20), (10, 10)))
    made = Moves(layer, {i: "nhwc" for i, t in enumerate(layer.inputs) if not t.is_constant}, "linear")
    with pytest.raises(Refused, match="more than 100 instructions"):
        emit_moves_ir(made, True, longest=100)


HEAD = """
in %x: f32[N,16,9,7]
const %w: f32[18,16,1,1] = seed(1)
const %s: i64[5] = [0, 3, 6, 9, 7]
const %r: i64[3] = [0, 189, 6]
const %k: f32[] = [2.0]
const %n: i64[2] = [2, 4]
%c = Conv(%x, %w)
%a = Reshape(%c, %s)
%t = Transpose(%a, perm=(0,1,3,4,2))
%b = Sigmoid(%t)
%p, %q = Split(%b, %n, axis=4)
%m = Mul(%p, %k)
%j = Concat(%m, %q, axis=4)
%y = Reshape(%j, %r)
out %y
"""


@JIT
def test_a_network_with_a_head_runs_it_in_one_launch_at_any_batch():
    net = parse_network(HEAD)
    shapes = tuple({"x": (n, 16, 9, 7)} for n in (1, 2, 5))
    plan = build(net, BuildConfig(profiles=(shapes,), timing_cache="", passes=("-fuse_head_convs",)))
    assert "cpu/moves" in {c.tactic for c in plan.choices.values()}
    context = Runtime().load(plan).create_context()
    for n in (1, 5):
        x = np.random.default_rng(n).standard_normal((n, 16, 9, 7)).astype(np.float32)
        (want,) = run_network(net, {"x": x}).values()
        (got,) = context.run({"x": x}).values()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
