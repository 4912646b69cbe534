"""Squeeze and excitation in one launch and in two, quantized convolutions before products: candidates partition all work, others are refused."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, planned, reference

from support.host_cluster import plan_on_host, run_on_host
from support.host_cuda import host_compiler
from whet.composites.conv_then_pointwise import make_quantized_pointwise_sample
from whet.composites.squeeze_excite import squeeze_excite_sample
from whet.network import from_stored
from whet.ops import OPS, sample_layer
from whet.tactics import PlanRefused, list_tactics
from whet.tactics.cuda.pool import squeeze_excite_split

TACTICS = {t.name.removeprefix("cuda/"): t for t in list_tactics("cuda")}


def offered(name, sample):
    """The network (it keeps the layer alive), layer, signature and configurations of a tactic for a sample."""
    net, layer, _ = sample_layer("Fused", sample)
    tactic = TACTICS[name]
    assert tactic.why_not(layer) is None
    signature = tactic.signatures(layer, HOPPER)[0]
    assert tactic.refuses(layer, signature, HOPPER) is None
    return net, layer, signature, tactic.configs(layer, signature, HOPPER)


@pytest.mark.parametrize(("image", "hidden"), [("f32[1,32,112,112]", 8), ("f32[8,144,56,56]", 6), ("f32[1,672,14,14]", 28), ("f32[2,1152,7,7]", 48)])
def test_clusters_hold_the_whole_image(image, hidden):
    *_, found = offered("squeeze_excite", squeeze_excite_sample(image, hidden))
    _, c, h, w = (int(v) for v in image[4:-1].split(","))
    assert len(found) >= 2
    for config in map(dict, found):
        rows = config["threads"] // (c // 8 // config["channels"])
        share = -(-h * w // config["pixels"])
        items = -(-share // rows)
        assert c % (8 * config["channels"]) == 0
        assert config["channels"] * config["pixels"] in (4, 8)
        assert items * 4 + 60 <= 65536 // config["threads"], "pixels stay in registers"


@pytest.mark.parametrize("changes", [{"channels": 3}, {"channels": 16}, {"pixels": 1, "channels": 1}, {"threads": 128}, {"pixels": 64}], ids=str)
def test_invalid_configurations_are_refused(changes):
    _net, layer, signature, found = offered("squeeze_excite", squeeze_excite_sample("f32[1,32,56,56]", 8))
    TACTICS["squeeze_excite"].plan(layer, signature, found[0], HOPPER)
    with pytest.raises(PlanRefused):
        TACTICS["squeeze_excite"].plan(layer, signature, tuple({**dict(found[0]), **changes}.items()), HOPPER)


@pytest.mark.parametrize(
    ("image", "hidden"),
    [("f32[1,48,190,190]", 12), ("f32[1,1632,12,12]", 68), ("f32[32,336,48,48]", 14), ("f32[1,16,4,4]", 256), ("f32[7,264,3,3]", 8)],
)
def test_blocks_take_whole_images_of_any_size(image, hidden):
    _net, layer, signature, found = offered("squeeze_excite_split", squeeze_excite_sample(image, hidden))
    n, c, h, w = (int(v) for v in image[4:-1].split(","))
    assert found
    for groups, shares in ([v for _, v in config] for config in found):
        columns, rows = -(-c // (8 * groups)), 256 // groups
        assert groups <= c // 8
        assert rows >= 8, "at least a row of threads per partial sum of a channel"
        assert shares <= h * w, "no share is empty"
        assert 32 * 256 + groups * 8 * (4 + 2 * hidden) + 4 * hidden <= 48 * 1024, "static shared memory"
        assert shares == 1 or n * columns * shares <= 4 * HOPPER.capabilities.multiprocessors
    kernel = TACTICS["squeeze_excite_split"].plan(layer, signature, found[-1], HOPPER)
    assert kernel.scratch == n * hidden * columns * shares * 4


@pytest.mark.parametrize("changes", [{"groups": 0}, {"groups": 5}, {"shares": 0}, {"shares": 3137}], ids=str)
def test_invalid_distributions_are_refused(changes):
    _net, layer, signature, found = offered("squeeze_excite_split", squeeze_excite_sample("f32[1,32,56,56]", 8))
    TACTICS["squeeze_excite_split"].plan(layer, signature, found[0], HOPPER)
    with pytest.raises(PlanRefused):
        TACTICS["squeeze_excite_split"].plan(layer, signature, tuple({**dict(found[0]), **changes}.items()), HOPPER)


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_two_launches_match_the_reference_on_the_host(monkeypatch):
    tactic, launches, cases = TACTICS["squeeze_excite_split"], [], []
    for image, hidden, options, groups, shares in (
        ("f32[2,24,9,11]", 6, {}, 3, 3),  # 85 rows of threads, more than a share has pixels; a thread without a group
        ("f32[1,72,13,17]", 20, {"hard": True}, 8, 2),  # the second column of blocks has one group of eight channels
        ("f32[1,16,40,40]", 40, {"gate_first": True}, 1, 1),  # several steps of four pixels
    ):
        net, layer, arrays = sample_layer("Fused", squeeze_excite_sample(image, hidden, **options))
        for signature in tactic.signatures(layer, HOPPER):
            config = (("groups", groups), ("shares", shares))
            ran, *case = plan_on_host(monkeypatch, squeeze_excite_split, tactic, layer, arrays, signature, config, HOPPER)
            launches += ran
            cases.append((net, layer, arrays, signature, *case))
    run_on_host(launches)
    for _net, layer, arrays, signature, kernel, ins, outs, _memory in cases:
        fed = [a if x is None else from_stored(x, o.format, a.shape).astype(a.dtype) for a, x, o in zip(arrays, ins, signature.inputs, strict=True)]
        judge(from_stored(outs[0], "nhwc", fed[0].shape), reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, str(signature))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("image", "hidden"),
    [("f32[1,48,190,190]", 12), ("f32[1,1632,12,12]", 68), ("f32[4,336,48,48]", 14), ("f32[1,24,7,7]", 250), ("f32[3,264,9,5]", 8)],
)
def test_gates_match_the_reference(gpu, image, hidden):
    net, layer, arrays = sample_layer("Fused", squeeze_excite_sample(image, hidden))
    ran = set()
    for t, signature, config, kernel in planned(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
        ran.add(t.name)
    assert "cuda/squeeze_excite_split" in ran, net.name


def test_images_larger_than_a_cluster_are_not_fused_into_one_launch():
    _net, layer, _ = sample_layer("Fused", squeeze_excite_sample("f32[1,64,640,640]", 8))
    tactic = TACTICS["squeeze_excite"]
    assert "no cluster" in tactic.refuses(layer, tactic.signatures(layer, HOPPER)[0], HOPPER)


@pytest.mark.parametrize("changes", [{"sk": 3}, {"groups": 1}, {"mi": 4}, {"bk": 256}, {"stages": 60}, {"pixels": 24}], ids=str)
def test_wrong_tiles_of_integers_are_refused(changes):
    _net, layer, signature, found = offered("qconv_then_pointwise", make_quantized_pointwise_sample("u8[1,256,14,14]", 256, 1024, residual="u8"))
    TACTICS["qconv_then_pointwise"].plan(layer, signature, found[0], HOPPER)
    with pytest.raises(PlanRefused):
        TACTICS["qconv_then_pointwise"].plan(layer, signature, tuple({**dict(found[0]), **changes}.items()), HOPPER)


def test_each_tactic_accepts_only_its_types():
    for sample in (s for s in OPS["Fused"].samples if s.attrs["composite"] == "ConvThenPointwise"):
        _net, layer, _ = sample_layer("Fused", sample)
        able = [n for n in ("conv_then_pointwise", "qconv_then_pointwise") if TACTICS[n].signatures(layer, HOPPER)]
        integers = layer.outputs[0].dtype.name == "u8"
        assert able == ["qconv_then_pointwise" if integers else "conv_then_pointwise"]


def test_another_intermediate_type_is_refused():
    _net, layer, _ = sample_layer("Fused", make_quantized_pointwise_sample("i8[1,64,9,9]", 64, 128, between=("u8", 0)))
    assert "one type of integers" in TACTICS["qconv_then_pointwise"].why_not(layer)
