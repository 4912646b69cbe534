"""Large batches are verified on a few items and by rotating the batch; networks that mix items are verified as a whole."""

import numpy as np
import pytest
from test_verification import QUICK, only

from whet.backends import get_backend
from whet.builder import build
from whet.builder.batching.batch_items import (
    NO_BATCH_AXES,
    BatchAxes,
    BatchItems,
    NotPerImage,
    find_batch_axes,
    get_common_batch,
    run_network_on_items,
)
from whet.builder.progress import ProgressLog
from whet.builder.verify.differences import compute_float8_error
from whet.builder.verify.emulation import compute_reference_outputs
from whet.builder.verify.verification import verify_engine
from whet.composites.quantized import make_quantized_sample
from whet.engine.plan import Choice
from whet.network import F8E4M3, F32, I64, Network, Weight, parse_type
from whet.ops import BatchAxis, run_network, sample_layer
from whet.ops._base import Sample

BATCH = 9


def attention(batch=BATCH):
    """Patches to tokens to heads and back: the batch moves to other axes, and constants have a part for each item."""
    rng = np.random.default_rng(0)
    net = Network("attention")
    x = net.add_input("x", parse_type(f"f32[{batch},3,4,4]"))

    def weight(*shape):
        return net.constant(rng.standard_normal(shape).astype(np.float32))

    y = net.add("Conv", x, weight(8, 3, 2, 2), None, strides=(2, 2))
    y = net.add("Reshape", y, net.constant(np.array([batch, 8, 4])))
    y = net.add("Transpose", y, perm=(0, 2, 1))
    token = net.add("Expand", weight(1, 1, 8), net.constant(np.array([batch, 1, 8])))
    y = net.add("Concat", token, y, axis=1)
    y = net.add("Add", y, weight(batch, 5, 8))
    qkv = net.add("Reshape", net.add("MatMul", y, weight(8, 24)), net.constant(np.array([batch, 5, 3, 2, 4])))
    qkv = net.add("Transpose", qkv, perm=(2, 0, 3, 1, 4))
    q, k, v = (net.add("Gather", qkv, net.constant(np.array(i)), axis=0) for i in range(3))
    scores = net.add("Softmax", net.add("MatMul", q, net.add("Transpose", k, perm=(0, 1, 3, 2))), axis=-1)
    y = net.add("Transpose", net.add("MatMul", scores, v), perm=(0, 2, 1, 3))
    y = net.add("Reshape", y, net.constant(np.array([batch, 40])))
    net.mark_output(y, "y")
    return net


def windows(batch=BATCH):
    """As Swin: windows of an image as [batch * 4, 4, 8], rolled by a Gather of rows within each image, and back."""
    rng = np.random.default_rng(0)
    net = Network("windows")
    y = net.add_input("x", parse_type(f"f32[{batch},4,4,8]"))

    def shape(*dims):
        return net.constant(np.array(dims))

    y = net.add("Transpose", net.add("Reshape", y, shape(batch, 2, 2, 2, 2, 8)), perm=(0, 1, 3, 2, 4, 5))
    y = net.add("LayerNormalization", net.add("Reshape", y, shape(batch * 4, 4, 8)), net.constant(np.ones(8, np.float32)), axis=-1)
    rows = np.roll(np.arange(16), 3) + 16 * np.arange(batch)[:, None]
    y = net.add("Gather", net.add("Reshape", y, shape(-1, 8)), net.constant(rows.ravel()), axis=0)
    y = net.add("Reshape", y, shape(batch * 4, 4, 8))
    y = net.add("MatMul", net.add("Softmax", net.add("MatMul", y, net.add("Transpose", y, perm=(0, 2, 1)))), y)
    y = net.add("Add", net.add("Reshape", y, shape(batch, 4, 4, 8)), net.constant(rng.standard_normal((1, 4, 1, 1)).astype(np.float32)))
    net.mark_output(net.add("ReduceMean", y, net.constant(np.array([1, 2])), keepdims=0), "y")
    return net


def sequence_first(batch=BATCH):
    """As torch.nn.MultiheadAttention: [length, batch, width], whose first two axes are merged for a product."""
    rng = np.random.default_rng(0)
    net = Network("sequence first")
    y = net.add("Transpose", net.add_input("x", parse_type(f"f32[{batch},5,8]")), perm=(1, 0, 2))
    y = net.add("Gemm", net.add("Reshape", y, net.constant(np.array([5 * batch, 8]))), net.constant(rng.standard_normal((8, 6)).astype(np.float32)))
    y = net.add("Softmax", net.add("Reshape", y, net.constant(np.array([5, batch, 2, 3]))), axis=-1)
    y = net.add("Transpose", net.add("Reshape", y, net.constant(np.array([5, batch * 2, 3]))), perm=(1, 0, 2))
    net.mark_output(net.add("Reshape", y, net.constant(np.array([batch, -1]))), "y")
    return net


def recurrent(batch=BATCH):
    """As torch.nn.LSTM: [length, batch, width], and constants with an initial state for each item."""
    rng = np.random.default_rng(0)
    net = Network("recurrent")
    y = net.add("Transpose", net.add_input("x", parse_type(f"f32[{batch},5,6]")), perm=(1, 0, 2))
    w, r, b, h, c = (net.constant(rng.standard_normal(s).astype(np.float32)) for s in ((1, 16, 6), (1, 16, 4), (1, 32), (1, batch, 4), (1, batch, 4)))
    y = net.add("LSTM", y, w, r, b, None, h, c, hidden_size=4)[0]
    y = net.add("Transpose", net.add("Squeeze", y, axes=(1,)), perm=(1, 0, 2))
    net.mark_output(net.add("Reshape", y, net.constant(np.array([batch, 20]))), "y")
    return net


def padding_mask(batch=BATCH):
    """As PyTorch exports the mask of BERT and RoBERTa: entries of the flat mask, at indices that are computed from its sizes, or by GatherND at
    constant ones; and positions counted per sequence and looked up by GatherElements."""
    net = Network("padding mask")
    x = net.add_input("x", parse_type(f"f32[{batch},6]"))

    def constant(values, dtype=np.int64):
        return net.constant(np.array(values, dtype))

    size = net.add("Gather", net.add("Shape", x), constant([1]), axis=0)
    at = net.add("Add", constant(np.arange(6)[None, None]), net.add("Mul", constant(np.arange(batch)[:, None, None]), size))
    flat = net.add("Gather", net.add("Flatten", x, axis=2), at, axis=0)
    mask = net.add("Reshape", flat, net.add("Shape", at))
    places = np.stack(np.broadcast_arrays(np.arange(batch)[:, None, None], np.arange(6)[::-1]), -1)
    reversed_mask = net.add("GatherND", x, constant(places))
    counts = net.add("Cast", net.add("Greater", x, constant(0, np.float32)), to=I64)
    table = net.add("Expand", constant(np.arange(8)[None] ** 2), constant([batch, 8]))
    positions = net.add("Cast", net.add("GatherElements", table, net.add("CumSum", counts, constant(1, np.int32)), axis=1), to=F32)
    y = net.add("Add", net.add("Sub", mask, reversed_mask), net.add("Unsqueeze", positions, axes=(1,)))
    net.mark_output(net.add("Reshape", y, net.constant(np.array([batch, 6]))), "y")
    return net


def feed(net, seed=1):
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(tuple(t.shape)).astype(np.float32) for t in net.inputs}


def test_items_are_the_first_the_last_and_seeded_ones():
    assert BatchItems.of(128, 0) == BatchItems.of(128, 0)
    assert BatchItems.of(128, 0) != BatchItems.of(128, 1)
    for batch in (2, 3, 4, 128):
        at = BatchItems.of(batch, 5).at
        assert (at[0], at[-1], len(at)) == (0, batch - 1, min(batch, 3))
    assert get_common_batch({"a": (4, 3), "b": (4, 7)}) == 4
    assert get_common_batch({"a": (4, 3), "b": (2, 7)}) == get_common_batch({"a": (4, 3), "b": (4,)}) == 1


@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (attention, {(1, 1, 1)}),
        (windows, {(0, 1, 4), (0, 1, 16)}),
        (sequence_first, {(0, 5, 1), (1, 1, 2)}),
        (recurrent, {(1, 1, 1), (2, 1, 1)}),
        (padding_mask, {(0, 1, 6), (0, 1, 1)}),
    ],
)
def test_selected_items_equal_those_of_the_whole_batch(make, kinds, widen):
    net = make()
    x, items = feed(net), BatchItems.of(BATCH)
    few, whole = run_network_on_items(net, x, items, widen=widen), run_network(net, x, widen=widen)
    assert few["y"].shape == (3, whole["y"].shape[1])
    assert few["y"].dtype == whole["y"].dtype
    np.testing.assert_allclose(few["y"], whole["y"][list(items.at)], rtol=1e-12 if widen else 1e-5)
    axes = find_batch_axes(net, {t.name: tuple(t.shape) for t in net.inputs}, BATCH).axis
    assert kinds <= set(axes.values()), "axes of which the batch is a part, or which are not the first"


def test_entries_of_items():
    axis = BatchAxis(1, repeat=2, block=3)
    assert axis.count_entries(4) == 24
    assert axis.list_indices([1, 3], 4).tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]
    a = np.arange(24)[None] * np.ones((2, 1), int)
    assert axis.take(a, [1, 3], 4).tolist() == [axis.list_indices([1, 3], 4).tolist()] * 2
    assert not axis.is_outermost
    assert BatchAxis(0, block=7).is_outermost


E4M3 = F8E4M3.numpy
FLOAT8_LAYERS = {
    "rounding": ("QuantizeLinear", Sample([f"f32[{BATCH},8,5,5]", np.array(0.01, np.float32)], {"output_dtype": F8E4M3})),
    "cast": ("Cast", Sample([f"f32[{BATCH},8,5,5]"], {"to": F8E4M3})),
    "sum": (
        "Fused",
        make_quantized_sample(
            "Add",
            [(f"f8e4m3[{BATCH},8,5,5]", 0.5, None, 1), (f"f8e4m3[{BATCH},8,5,5]", 0.7, None, 1)],
            lambda body, v: body.add("Relu", body.add("Add", *v)),
            (0.01, None, "f8e4m3"),
        ),
    ),
}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", FLOAT8_LAYERS)
def test_the_reference_of_a_layer_that_stores_float8_has_float8_values(name, few):
    """Regression: widening rounded the values to integers."""
    net, layer, arrays = sample_layer(*FLOAT8_LAYERS[name])
    fed = {t.name: a for t, a in zip(layer.inputs, arrays, strict=True) if not t.is_constant}
    want = next(iter(run_network(net, fed).values()))
    assert want.dtype == E4M3
    choice = Choice("cuda/any", (), tuple(("linear", t.dtype.name) for t in layer.inputs), (("linear", "f8e4m3"),))
    images = BatchItems.of(BATCH) if few else None
    places = BatchAxes({t.name: BatchAxis(0) for t in layer.inputs if not t.is_constant}, {}, frozenset()) if few else NO_BATCH_AXES
    ins = [images.take(a, BatchAxis(0)) if few and t.name in places.axis else a for t, a in zip(layer.inputs, arrays, strict=True)]
    (got,) = compute_reference_outputs(layer, choice, ins, images, places)
    want = images.take(want, BatchAxis(0)) if few else want
    assert np.array_equal(got.astype(np.float64), np.asarray(got).astype(E4M3).astype(np.float64)), "not representable in e4m3"
    error, why = compute_float8_error(want, got)
    assert error <= 1e-6, why
    assert len(np.unique(want.astype(np.float32))) > 20


def mixing(kind):
    net = Network(kind)
    x = net.add_input("x", parse_type(f"f32[{BATCH},4]"))
    if kind == "mean over the batch":
        y = net.add("Add", x, net.add("ReduceMean", x, net.constant(np.array([0])), keepdims=1))
    elif kind == "transposed":
        y = net.add("MatMul", net.add("Transpose", x, perm=(1, 0)), net.constant(np.ones((BATCH, BATCH), np.float32)))
    elif kind == "regrouped":
        y = net.add("Reshape", x, net.constant(np.array([4, BATCH])))
    elif kind == "entries of other items":
        places = np.stack(np.broadcast_arrays(np.arange(BATCH)[::-1, None], np.arange(4)), -1)
        y = net.add("GatherND", x, net.constant(places))
    elif kind == "flat entries of other items":
        y = net.add("Gather", net.add("Reshape", x, net.constant(np.array([-1]))), net.constant(np.arange(4 * BATCH)[::-1].reshape(BATCH, 4).copy()))
    else:
        y = net.add("Softmax", x, axis=0)
    net.mark_output(y, "y")
    return net


@pytest.mark.parametrize(
    "kind",
    ["mean over the batch", "transposed", "regrouped", "entries of other items", "flat entries of other items", "softmax over the batch"],
)
def test_networks_that_mix_items_are_verified_as_a_whole(kind):
    net = mixing(kind)
    with pytest.raises(NotPerImage):
        find_batch_axes(net, {"x": (BATCH, 4)}, BATCH)
    plan = build(net, QUICK)
    assert plan.report.verification.images is None
    assert any(f"all {BATCH} images" in n for n in plan.report.notes)


def convolutions(batch):
    rng = np.random.default_rng(0)
    net = Network("net")
    x = net.add_input("x", parse_type(f"f32[{batch},4,6,6]"))
    y = net.add("Conv", x, net.constant(rng.standard_normal((8, 4, 3, 3)).astype(np.float32)), None)
    net.mark_output(net.add("Relu", y), "y")
    return net


@pytest.mark.parametrize("index", range(BATCH))
def test_a_kernel_that_is_wrong_for_one_item_is_found_at_any_index(plant, index):
    def spoil_item(call):
        call.writes[0][index] *= 1.01

    plant(spoil_item)
    plan = build(convolutions(BATCH), only())
    assert len(plan.report.verification.images) == 3
    assert {what.split()[0] for _, what, _ in plan.report.banned} == {"cpu/planted"}
    compared = index in plan.report.verification.images
    assert all(("depends on its place in the batch" in reason) != compared for _, _, reason in plan.report.banned)


def test_a_kernel_that_is_equally_wrong_for_all_items_is_found_by_the_reference(plant):
    def spoil_all(call):
        call.writes[0][:, 0] *= 1.01

    plant(spoil_all)
    plan = build(convolutions(BATCH), only())
    assert {what.split()[0] for _, what, _ in plan.report.banned} == {"cpu/planted"}


def test_a_correct_engine_of_a_large_batch_reports_the_verified_items():
    plan = build(attention(), QUICK)
    said = plan.report.verification
    assert said.failures == []
    assert len(said.images) == 3
    assert said.turned_error <= 1e-5
    assert plan.probe


def test_a_network_with_a_slow_reference_is_verified_on_one_item_its_layers_on_three():
    source = convolutions(BATCH)
    plan, other = build(source, QUICK), convolutions(BATCH)
    other.layers[0].inputs[1].weight = Weight(other.layers[0].inputs[1].array() * np.float32(1.01))
    for slow, many in ((2e9, 3), (0.0, 1)):
        right, wrong = (verify_engine(plan, net, get_backend("cpu"), None, QUICK, ProgressLog(None), slow) for net in (source, other))
        assert len(right.network_items) == many
        assert set(right.network_items) <= set(right.images)
        assert len(right.images) == 3
        assert not right.failures
        assert [f.layer for f in wrong.failures] == [""], "the network's result differs"


def test_all_layers_without_a_tactic_are_named_in_one_error():
    from whet.errors import NoTacticError

    net = Network("net")
    x = net.add_input("x", parse_type("f64[2,4]"))
    net.mark_output(net.add("Sinh", net.add("Hardmax", x, name="largest"), name="curve"), "y")
    with pytest.raises(NoTacticError, match=r"(?s)computes Hardmax 'largest'.*Nothing computes these either: .*Sinh 'curve'"):
        build(net, only("-NUMPY"))
