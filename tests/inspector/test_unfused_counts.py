"""Fused layers count like their parts: the roofline of a network is independent of fusion."""

import pytest

from whet.builder import BuildConfig, build
from whet.inspector.facts import layer_facts
from whet.inspector.unfused_counts import count_unfused
from whet.network import parse_network
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import why_no_registers

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")

NET = """network block source
in %x: f32[2,32,24,24]
const %w0: f32[32,32,1,1] = seed(1)
const %w1: f32[32,32,3,3] = seed(2)
%a = Conv(%x, %w0)
%b = Relu(%a)
%c = Conv(%b, %w1, pads=(1, 1, 1, 1))
%d = Relu(%c)
%e = Add(%d, %x)
%f = MaxPool(%e, kernel_shape=(2, 2), strides=(2, 2))
out %f
"""

HEAD = """network head source
in %x: f32[2,16,8,8]
const %w: f32[32,16,1,1] = seed(1)
const %s: i64[5] = [2, 2, 16, 8, 8]
const %r: i64[3] = [2, 128, 32]
%c = Conv(%x, %w)
%a = Reshape(%c, %s)
%t = Transpose(%a, perm=(0, 1, 3, 4, 2))
%b = Sigmoid(%t)
%j = Concat(%b, %b, axis=4)
%y = Reshape(%j, %r)
out %y
"""


def counted(**config):
    plan = build(parse_network(NET), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False, avg_timing=1, **config))
    facts = layer_facts(plan)
    return {x.layer.composite or x.layer.op for x in facts}, sorted(p for x in facts if x.layer.op != "Reformat" for p in count_unfused(x))


def test_a_launch_of_two_layers_counts_as_two(standin_gpu):
    fused, together = counted()
    plain, alone = counted(passes=("-fuse_pointwise_then_conv",))
    assert "PointwiseThenConv" in fused
    assert "PointwiseThenConv" not in plain
    assert together == alone


@pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))
def test_data_movement_counts_as_one_pass_or_as_the_moved_bytes():
    """Two images of 32 channels and 64 pixels: a transpose, a sigmoid and a Concat of it with itself; Reshapes move nothing."""
    plan = build(parse_network(HEAD), BuildConfig(timing_cache="", verify=False, avg_timing=1, passes=("-fuse_head_convs",)))
    moves = next(x for x in layer_facts(plan) if x.layer.composite == "Moves")
    channels, joined = 2 * 32 * 64 * 4, 2 * 64 * 64 * 4
    (whole,) = count_unfused(moves)
    assert whole[1] == pytest.approx(channels + joined, abs=200)  # and the shapes, which are read as well
    assert [size for _, size in count_unfused(moves, ("Moves",))] == [2 * channels, 2 * channels, 2 * channels + joined]


@pytest.mark.skipif(bool(jit.why_unavailable() or why_no_registers()), reason="needs llvmlite and the registers of AVX2")
@pytest.mark.parametrize("also", [(), ("Moves",)])
def test_a_head_with_its_convolutions_counts_as_its_parts(also):
    def counted(*passes):
        config = BuildConfig(timing_cache="", verify=False, avg_timing=1, optimization_level=2, passes=passes)  # 2: not compared with its parts
        plan = build(parse_network(HEAD), config)
        facts = [x for x in layer_facts(plan) if x.layer.op != "Reformat"]
        return {x.layer.composite or x.layer.op for x in facts}, [p for x in facts for p in count_unfused(x, also)]

    (fused, together), (plain, alone) = counted(), counted("-fuse_head_convs")
    assert fused == {"HeadConvs"}
    assert plain == {"Conv", "Moves"}
    assert [n for n, _ in together] == [n for n, _ in alone]
    assert [size for _, size in together] == [pytest.approx(size, abs=200) for _, size in alone]
