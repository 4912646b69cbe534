"""Importance: criteria against their definitions, gradients against finite differences, Taylor terms against the effect of removal."""

import sys
import types

import numpy as np
import pytest

from support.selection import with_slow_names
from whet import zoo
from whet.errors import PruneError, UnsupportedError, UsageError
from whet.frontends import network_from_onnx
from whet.network import Weight, parse_network
from whet.ops import OPS, run_layer, run_network, sample_layer
from whet.pruning import PruneConfig, Samples, branches, groups, importance, prune, sensitivity, silence_branches, zero_channels
from whet.pruning._vjp import MOVES, RULES, backpropagate, needs_cotangent
from whet.pruning.importance import KINDS

RNG = np.random.default_rng(0)
POINTWISE = {"Relu", "Mul", "Div", "Clip", "PRelu", "HardSwish", "Pow"}  # a sample of them: all share one code path
CASES = [(n, i) for n, o in sorted(OPS.items()) if n in {*RULES, *MOVES, *POINTWISE} for i in range(len(o.samples))]


@pytest.mark.parametrize(("name", "i"), CASES)
def test_gradients_equal_finite_differences(name, i):
    """Along a random direction of all computed inputs: the sum of cotangent times change of the outputs."""
    sample = OPS[name].samples[i]
    if any(str(x).startswith(("extreme", "nonfinite")) or str(x).startswith("f16") for x in sample.inputs):
        pytest.skip("infinities and half precision have no finite differences")
    _, layer, arrays = sample_layer(name, sample)
    computed = [k for k in range(len(arrays)) if arrays[k] is not None and needs_cotangent(layer, k)]
    if not computed:
        pytest.skip("nothing computed is read")
    wide = [a.astype(np.float64) if a is not None and a.dtype.kind == "f" else a for a in arrays]
    if name == "Pow":
        wide[0] = np.abs(wide[0]) + 0.5
    outs = run_layer(layer, wide)
    cotangents = [RNG.standard_normal(o.shape) for o in outs]
    try:
        got = backpropagate(layer, wide, outs, cotangents)
    except UnsupportedError as e:
        pytest.skip(str(e))
    direction = [RNG.standard_normal(a.shape) if k in computed else None for k, a in enumerate(wide)]
    moved = [[a if d is None else a + s * d for a, d in zip(wide, direction, strict=True)] for s in (1e-6, -1e-6)]
    change = [(u - v) / 2e-6 for u, v in zip(*(run_layer(layer, m) for m in moved), strict=True)]
    want = sum(float((c * d).sum()) for c, d in zip(cotangents, change, strict=True))
    mine = sum(float((got[k] * direction[k]).sum()) for k in computed)
    assert abs(mine - want) <= 2e-4 * max(abs(want), sum(np.abs(c).sum() for c in cotangents) / 50, 1)


def chain(wide=6):
    net = parse_network(f"""network n source
in %x: f32[N,4]
const %w: f32[4,{wide}] = seed(1)
const %v: f32[{wide},3] = seed(2)
%a: f32[N,{wide}] = MatMul(%x, %w)
%r: f32[N,{wide}] = Relu(%a)
%y: f32[N,3] = MatMul(%r, %v)
out %y
""")
    return net


def test_the_geometric_median_is_the_least_important():
    net = chain()
    w = np.tile(np.array([[0.0], [0.0], [1.0], [1.0]], np.float32), (1, 6)) * np.array([3, 1, 0, -1, -3, 9], np.float32)
    net.constants["w"].weight = Weight(w)
    net.constants["v"].weight = Weight(np.ones((6, 3), np.float32))
    score = importance(groups(net), "fpgm")["w"]
    assert int(np.argmin(score)) in (1, 2), "the central ones: nearest to all others, though far from the smallest norm"
    assert int(np.argmax(score)) == 5
    apart = np.abs(w.T[:, None] - w.T[None]) ** 2
    want = np.sqrt(apart.sum(-1)).sum(1)
    np.testing.assert_allclose(score, want / want.mean(), rtol=1e-6)


def test_batch_norm_scales():
    net = network_from_onnx(zoo.build("resnet18", image=32))
    (g,) = (g for g in groups(net) if g.name == "layer2.0.conv1.weight")
    gamma = np.abs(net.constants["layer2.0.bn1.weight"].array().astype(np.float64))
    np.testing.assert_allclose(importance([g], "bn_scale", net=net)[g.name], gamma / gamma.mean(), rtol=1e-6)
    with pytest.raises(PruneError, match="no group has one"):
        importance(groups(chain()), "bn_scale", net=chain())


def test_first_order_taylor_is_exact_for_a_linear_loss():
    """Without labels the loss is linear in the inputs of the last layer: z is the change by removing a unit."""
    net, x = chain(), np.random.default_rng(5).standard_normal((5, 4)).astype(np.float32)
    (g,) = groups(net)
    from whet.pruning.sensitivity import compute_gates, compute_seeds

    seen = compute_gates(net, [g], [], {"x": x}, seed=3, batch=5)
    y = run_network(net, {"x": x})
    (c,) = compute_seeds(net, y, None, np.random.default_rng(3)).values()
    for unit in range(g.size):
        without = run_network(zero_channels(net, {g.name: [k for k in range(g.size) if k != unit]}), {"x": x})["y"]
        np.testing.assert_allclose(seen.z[g.name][:, unit], ((y["y"] - without) * c).sum(1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["taylor1", "taylor2"])
def test_taylor_ranks_units_and_branches_like_removal(kind):
    """Ground truth on a real architecture: each unit is removed by itself and the relative change of the outputs is measured."""
    net = network_from_onnx(zoo.build("resnet18", image=32))
    blocks = branches(net)
    found = [g for g in groups(net) if g.name == "layer1.1.conv1.weight"]
    x = {"input": np.random.default_rng(5).standard_normal((6, 3, 32, 32)).astype(np.float32)}  # independent of earlier tests
    score = importance(found, kind, net=net, samples=Samples(x), blocks=blocks)
    before = run_network(net, x)["output"]

    def change(other):
        return float(np.square(run_network(other, x)["output"] - before).sum())

    some = range(0, 64, 5)
    truth = [change(zero_channels(net, {found[0].name: [k for k in range(64) if k != u]}, found)) for u in some]
    assert _rank_correlation([score[found[0].name][u] for u in some], truth) > 0.8
    gone = [change(silence_branches(net, [b.name])) for b in blocks]
    assert _rank_correlation([float(score[b.name][0]) for b in blocks], gone) > 0.4


def _rank_correlation(a, b):
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def test_with_labels_taylor_uses_the_loss():
    """Cross-entropy: taylor1 of a channel is close to the effect of its removal, sample by sample."""
    net, labels = chain(), np.array([0, 2, 1, 1])
    # independent of earlier tests; gradients are uninformative near a kink
    x = 0.3 * np.random.default_rng(6).standard_normal((4, 4)).astype(np.float32)
    from whet.pruning.sensitivity import compute_gates

    (g,) = groups(net)
    seen = compute_gates(net, [g], [], {"x": x}, labels)

    def loss(n):
        y = run_network(n, {"x": x})["y"]
        return np.log(np.exp(y).sum(1)) - y[np.arange(4), labels]

    for unit in range(g.size):
        change = loss(zero_channels(net, {g.name: [k for k in range(g.size) if k != unit]})) - loss(net)
        z = seen.z[g.name][:, unit]
        assert np.abs(change + z).max() <= 0.5 * np.abs(z).max() + 1e-6
    with pytest.raises(PruneError, match=r"labels need an output \[samples, classes\]"):
        compute_gates(net, [g], [], {"x": x}, np.array([0, 1, 2, 3]))
    with pytest.raises(PruneError, match="2 labels for 4 samples"):
        compute_gates(net, [g], [], {"x": x}, labels[:2])


@pytest.mark.parametrize(("name", "options"), with_slow_names([
    ("mobilenet_v3_large", {"image": 32}), ("convnext_tiny", {"image": 32, "blocks": (1, 1, 1, 1)}),
    ("swin_t", {"image": 64, "window": 2, "blocks": (1, 1, 2, 1), "hidden": 24, "heads": (1, 2, 4, 8)}),
    ("bert_base", {"layers": 1, "hidden": 48, "heads": 4}), ("unet", {"image": 32, "width": 8}),
    ("densenet121", {"image": 32, "blocks": (2, 2, 2, 2)}),
    ("efficientnet_b0", {"image": 32}), ("yolov5s", {"image": 64}), ("resnext50_32x4d", {"image": 32}),
], {"efficientnet_b0", "resnext50_32x4d"}))  # fmt: skip
def test_every_criterion_scores_every_group(name, options):
    net = network_from_onnx(zoo.build(name, **options))
    found, blocks = groups(net), branches(net)
    feeds = {}
    for t in net.inputs:
        shape = [d if isinstance(d, int) else {"sequence": 7}.get(str(d), 2) for d in t.shape]
        feeds[t.name] = np.ones(shape, np.int64) if t.dtype.kind == "int" else RNG.standard_normal(shape).astype(np.float32)
    for kind in ("fpgm", "activation", "taylor2"):
        scores = importance(found, kind, net=net, samples=Samples(feeds), blocks=blocks)
        assert set(scores) == {x.name for x in (*found, *blocks)}
        assert all(scores[g.name].shape == (g.size,) and np.isfinite(scores[g.name]).all() and (scores[g.name] >= 0).all() for g in found)
        assert all(np.ptp(scores[g.name]) > 0 for g in found), "it distinguishes units"


def test_a_user_function(monkeypatch):
    module = types.ModuleType("mine")
    module.score = lambda net, group: np.arange(group.size) * len(net.layers)
    module.wrong = lambda net, group: np.zeros(1)
    monkeypatch.setitem(sys.modules, "mine", module)
    net = chain()
    got = importance(groups(net), "python:mine:score", net=net, normalize=False)["w"]
    assert got.tolist() == [0, 3, 6, 9, 12, 15]
    with pytest.raises(PruneError, match="must give 6 finite scores"):
        importance(groups(net), "python:mine:wrong", net=net)
    with pytest.raises(PruneError, match="negative or not finite"):
        importance(groups(net), lambda net, group: np.full(group.size, -1.0), net=net)
    with pytest.raises(UsageError, match=r"python:mine:nothing: .*searched in the working folder"):
        importance(groups(net), "python:mine:nothing", net=net)


def test_a_function_object_and_its_name_in_the_record():
    def outer(net, group):
        return np.arange(group.size, dtype=np.float64)

    made = prune(chain(), PruneConfig(ratio=0.5, multiple=1, importance=outer))
    assert made.recipe.kept()["w"].tolist() == [3, 4, 5]
    assert made.recipe.about["importance"].endswith("outer")


def test_criteria_with_missing_requirements():
    for kind in ("activation", "taylor1"):
        with pytest.raises(PruneError, match="needs data"):
            importance(groups(chain()), kind)
    with pytest.raises(PruneError, match=f"one of {', '.join(KINDS)}"):
        importance(groups(chain()), "l3")


def test_branches_have_the_score_of_their_groups():
    net = network_from_onnx(zoo.build("resnet50", image=32, width=16))
    found, blocks = groups(net), branches(net)
    scores = importance(found, "l1", net=net, blocks=blocks)
    (b,) = (b for b in blocks if b.name == "/layer2/layer2.1/Add")
    assert scores[b.name][0] == pytest.approx(64), "two groups of 32 channels, each with a mean of one"


def test_a_pass_has_fewer_samples_where_its_values_would_fill_the_memory():
    """The values of one sample: two tensors of 16 numbers, 128 bytes."""
    text = "network n source\nin %x: f32[{},4]\nconst %w: f32[4,16] = seed(1)\n%a = MatMul(%x, %w)\n%y = Relu(%a)\nout %y\n"
    x = {"x": np.zeros((40, 4), np.float32)}
    for batch, most, size, passes in (("N", 128 * 40, 8, 5), ("N", 128 * 3 + 1, 3, 14), ("N", 1, 1, 40), ("16", 1, 16, 2)):
        net = parse_network(text.format(batch))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sensitivity, "MOST_PASS_BYTES", most)
            assert sensitivity.get_run_size(net, x, 8) == size
            assert len(sensitivity.list_starts(net, 40, size)) == passes
    assert sensitivity.get_run_size(parse_network(text.format("N")), {"x": x["x"][:5]}, 8) == 5
