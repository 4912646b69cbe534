"""A convolution and the pointwise convolution after it in one launch: candidates partition the work exactly and fit the device; invalid
configurations are refused. Steps with slots of their own: the cases that use them, and the refusals.
"""

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.backends.cuda.launch import MAX_SHARED
from whet.builder import BuildConfig, build
from whet.engine import engine_bytes, read_engine
from whet.network import parse_network
from whet.ops import OPS, sample_layer
from whet.tactics import PlanRefused, list_tactics
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.conv._conv_config import with_once
from whet.tactics.cuda.conv._conv_then_pointwise import MOST_BLOCKS, Tile, count_shared_bytes, find_halo, list_product_tiles, why_not_tile
from whet.tactics.cuda.conv._conv_tiles import Halo, list_conv_configs, why_not_config

HOPPER = CompileOnlyGpu()
PAD = (1, 1, 1, 1)
STAGES = [
    (ConvShape(1, 56, 56, 64, 64, 3, 3, pad=PAD), 256),
    (ConvShape(1, 28, 28, 128, 128, 3, 3, pad=PAD), 512),
    (ConvShape(1, 14, 14, 256, 256, 3, 3, pad=PAD), 1024),
    (ConvShape(1, 7, 7, 512, 512, 3, 3, pad=PAD), 2048),
    (ConvShape(2, 9, 11, 64, 64, 5, 5, pad=(2, 2, 2, 2)), 128),
]


@pytest.mark.parametrize(("shape", "k2"), STAGES)
def test_candidates_partition_all_work_exactly_once(shape, k2):
    found = list_product_tiles(shape, k2, 132)
    assert found
    for tile in found:
        halo = find_halo(shape, tile)
        assert isinstance(halo, Halo)
        assert (halo.rows - 1) * halo.wide + shape.q <= tile.pixels, "results of a tile's rows"
        assert tile.chunks(shape) * tile.sk * tile.bk == shape.c
        assert 64 * tile.groups == shape.k
        assert 64 * tile.mi * tile.cluster == k2
        assert 1 < tile.cluster <= MOST_BLOCKS
        assert count_shared_bytes(shape, tile, halo) <= MAX_SHARED
        assert -(-shape.p // halo.rows) * shape.n * tile.cluster <= 2 * 132, "one round"


def test_many_images_have_no_candidates():
    assert not list_product_tiles(replace(STAGES[2][0], n=64), 1024, 132)
    assert not list_product_tiles(ConvShape(1, 14, 14, 256, 96, 3, 3, pad=PAD), 1024, 132), "inner channels come in 64s"


WRONG = [
    {"sk": 3},
    {"groups": 4},
    {"mi": 3},
    {"bk": 24},
    {"bk": 0},
    {"sk": 0},
    {"stages": 40},
    {"pixels": 8},
    {"pixels": 512},
    {"stages": 1},
    {"mi": 16},
]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_wrong_configurations_are_refused(changes):
    i = next(i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] == "ConvThenPointwise")
    _, layer, _ = sample_layer("Fused", OPS["Fused"].samples[i])
    tactic = next(t for t in list_tactics("cuda") if t.name == "cuda/conv_then_pointwise")
    signature = tactic.signatures(layer, HOPPER)[0]
    good = dict(tactic.configs(layer, signature, HOPPER)[0])
    tactic.plan(layer, signature, tuple(good.items()), HOPPER)
    with pytest.raises(PlanRefused):
        tactic.plan(layer, signature, tuple({**good, **changes}.items()), HOPPER)


def test_rows_wider_than_a_tile_say_so():
    shape, k2 = STAGES[0]
    assert "does not fit" in why_not_tile(Tile(32, 2, 1, 2, 32, 9), shape, k2)


@pytest.mark.parametrize(("shape", "k2"), STAGES[:4])
def test_own_slots_cover_all_steps_of_a_block(shape, k2):
    found = [c for c in list_conv_configs(shape, 132) if c.once]
    assert found
    for config in found:
        steps = shape.steps(config.bk)
        assert config.once * config.sk == steps
        assert config.once <= config.stages
        assert why_not_config(config, shape) is None
        assert why_not_config(replace(config, once=config.once - 1), shape), "a step would never be multiplied"
        if config.sk == 1:
            assert config.direct


def test_slots_are_released_if_fewer_than_steps():
    shape = STAGES[2][0]
    config = next(c for c in list_conv_configs(shape, 132) if c.once and not c.halo)
    assert with_once(replace(config, once=0, stages=config.once - 1), shape.steps(config.bk)).once == 0
    halo = next(c for c in list_conv_configs(shape, 132) if c.once and c.halo)
    assert with_once(replace(halo, once=0), shape.steps(halo.bk), touched=halo.halo + 1).once == 0, "input tiles would be loaded again"


BLOCK = """network bottleneck source
in %x: f32[1,256,14,14]
const %w0: f32[64,256,1,1] = seed(1)
const %w1: f32[64,64,3,3] = seed(2)
const %w2: f32[256,64,1,1] = seed(3)
%a = Conv(%x, %w0) from "reduce"
%b = Relu(%a) from "relu"
%c = Conv(%b, %w1, pads=(1, 1, 1, 1)) from "spatial"
%d = Relu(%c) from "relu2"
%e = Conv(%d, %w2) from "expand"
%f = Add(%e, %x) from "add"
%y = Relu(%f) from "relu3"
out %y
"""


def test_a_bottleneck_ends_in_one_launch(standin_gpu):
    config = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False, avg_timing=1)
    plan = build(parse_network(BLOCK), config)
    layers = [layer for layer in plan.network.layers if layer.op != "Reformat"]
    assert [layer.composite or layer.op for layer in layers] == ["Conv", "ConvThenPointwise"]
    assert plan.choices[layers[1].name].tactic == "cuda/conv_then_pointwise"
    again = read_engine(engine_bytes(plan))
    assert str(again.network) == str(plan.network)
    assert again.choices == plan.choices
    many = build(parse_network(BLOCK.replace("f32[1,256", "f32[64,256")), config)
    assert "ConvThenPointwise" not in [layer.composite for layer in many.network.layers], "more pixels than clusters take: its parts"
