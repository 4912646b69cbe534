"""Network.to_torch(): every translated op against its reference, real networks, names, training mode, and the conversion back."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

import whet
from support import realdata
from whet import zoo
from whet.errors import NetworkError, ShapeError, UnsupportedError, UsageError
from whet.network import Network, parse_type
from whet.ops import OPS, run_network, sample_layer
from whet.training import from_module, to_torch
from whet.training.translate import TRANSLATIONS

TIGHT = 1e-5


def error(got, want):
    """||e|| / ||reference||, in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-12)) if got.size else 0.0


def outputs_of(module, net, feeds):
    with torch.no_grad():
        got = module(**{t.name: torch.from_numpy(np.array(feeds[t.name])) for t in net.inputs})
    got = got if isinstance(got, tuple) else (got,)
    return {t.name: x.float().numpy() if x.is_floating_point() else x.numpy() for t, x in zip(net.outputs, got, strict=True)}


UNUSUAL = ("extreme", "nonfinite", "f16", "bf16", "f8", "f64", "string", "u16", "u32", "u64", "i4", "u4", "i16")


def usable(name, k):
    """Samples with types and values that occur in training: no NaN, no 8-bit floats, no text."""
    for spec in OPS[name].samples[k].inputs:
        if name in ("IsInf", "IsNaN") and spec.startswith("extreme f32"):
            continue
        if isinstance(spec, str) and any(w in spec for w in UNUSUAL):
            return False
    return True


@pytest.mark.parametrize("name", sorted(TRANSLATIONS))
def test_every_translation_equals_the_reference(name):
    ran = 0
    for k in range(len(OPS[name].samples)):
        if not usable(name, k):
            continue
        net, layer, arrays = sample_layer(name, OPS[name].samples[k])
        feeds = {t.name: a for t, a in zip(layer.inputs, arrays, strict=True) if t is not None and not t.is_constant}
        want = run_network(net, feeds)
        try:
            got = outputs_of(to_torch(net).eval(), net, feeds)
        except UnsupportedError as e:
            assert "cannot be trained" in str(e)  # noqa: PT017 - the other branch goes on
            continue
        for key, value in want.items():
            assert got[key].shape == value.shape, (name, k)
            if value.dtype.kind == "f":
                finite = np.isfinite(value)
                np.testing.assert_array_equal(np.isfinite(got[key]), finite)
                assert error(got[key][finite], value[finite]) < TIGHT, (name, k)
            else:
                np.testing.assert_array_equal(got[key], value)
        ran += 1
    assert ran, f"no sample of {name} could be compared"


CIFAR = ("resnet20_cifar10", "resnet56_cifar10", "resnet8_mlperftiny")
REAL = [*CIFAR, "lenet_mnist", "vit_mnist", "squeezenet1.1", "nanodet_m", "vww_mobilenet025_96", "version-RFB-320",
        "version-RFB-320_without_postprocessing", "mobilenetv2_backbone"]


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_real_networks_compute_the_same(name):
    model, = realdata.models([name])
    net = whet.network_from_onnx(model.path)
    feeds = next(iter(model.inputs(1)))
    module = net.to_torch().eval()
    want, got = run_network(net, feeds), outputs_of(module, net, feeds)
    for key, value in want.items():
        assert error(got[key], value) < TIGHT


SMALL = {"resnet18": {"image": 64}, "resnext50_32x4d": {"image": 32, "width": 16}, "densenet121": {"image": 32, "blocks": (2, 3, 3, 2)},
         "mobilenet_v2": {"image": 32},
         "mobilenet_v3_large": {"image": 32}, "efficientnet_b0": {"image": 32}, "squeezenet1_1": {"image": 64}, "lenet5": {},
         "vit_b_16": {"image": 32, "layers": 1}, "bert_base": {"layers": 1, "hidden": 96, "heads": 4}, "yolov5s": {"image": 64}}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_zoo_networks_compute_the_same_and_all_weights_are_trainable(name):
    net = whet.network_from_onnx(zoo.build(name, **SMALL[name]))
    rng = np.random.default_rng(1)
    env = {s: 2 if s in ("N", "batch") else 6 for s in net.symbols()}
    feeds = {}
    for t in net.inputs:
        shape = [d if isinstance(d, int) else env[str(d)] for d in t.shape]
        feeds[t.name] = rng.standard_normal(shape, np.float32) if t.dtype.is_float else np.ones(shape, np.int64)
    module = net.to_torch()
    want, got = run_network(net, feeds), outputs_of(module.eval(), net, feeds)
    for key, value in want.items():
        assert error(got[key], value) < TIGHT
    published = zoo.build(name, **SMALL[name])
    weights = {w.name: int(np.prod(w.dims)) for w in published.graph.initializer if w.data_type == 1 and len(w.dims)}
    trained = {module.weight_names()[n] for n, _ in module.named_parameters()}
    measured = {module.weight_names()[n] for n, _ in module.named_buffers()}
    assert trained | measured == set(weights), "a weight of the model is not trained, or a constant is"
    assert all("running" in n for n in measured)


def small_net():
    """x[N,4,8,8] -> a convolution, batch norm, Relu, a shared scale, a product."""
    rng = np.random.default_rng(3)
    net = Network("small")
    x = net.add_input("x", parse_type("f32[N,4,8,8]"))
    y = net.add("Conv", x, net.constant(rng.standard_normal((8, 4, 3, 3), np.float32) / 6, "body.0.weight"), pads=(1, 1, 1, 1))
    values = {"weight": 1, "bias": 0.1, "running_mean": 0, "running_var": 1}
    norm = [net.constant(np.full(8, v, np.float32), f"body.1.{n}") for n, v in values.items()]
    y = net.add("Relu", net.add("BatchNormalization", y, *norm))
    y = net.add("Flatten", net.add("GlobalAveragePool", y))
    y = net.add("Gemm", y, net.constant(rng.standard_normal((8, 3), np.float32), "fc"), net.constant(np.zeros(3, np.float32), "fc.bias"))
    net.mark_output(y, "logits")
    return net


def test_state_dict_has_the_networks_names_also_if_one_is_a_prefix():
    module = small_net().to_torch()
    names = module.weight_names()
    assert set(names.values()) == {"body.0.weight", "body.1.weight", "body.1.bias", "body.1.running_mean", "body.1.running_var", "fc", "fc.bias"}
    assert {n for n, real in names.items() if n != real} == {"fc_"}  # "fc" is a module because of fc.bias
    assert set(module.state_dict()) == set(names)


def test_batch_norm_statistics_are_updated_and_written_back():
    net = small_net()
    module = net.to_torch()
    x = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    module.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    w = net.tensor("body.0.weight").array()
    conv = torch.nn.functional.conv2d(x, torch.from_numpy(w.copy()), padding=1)
    want = 0.1 * conv.mean((0, 2, 3))
    np.testing.assert_allclose(module.weights()["body.1.running_mean"], want, rtol=1e-4, atol=1e-6)  # ONNX momentum 0.9: the new value has weight 0.1
    with torch.no_grad():
        module.weights()["body.0.weight"].mul_(2)
    tuned = from_module(net, module, about="twice")
    np.testing.assert_array_equal(tuned.tensor("body.0.weight").array(), 2 * w)
    np.testing.assert_array_equal(net.tensor("body.0.weight").array(), w)
    np.testing.assert_allclose(tuned.tensor("body.1.running_mean").array(), want, rtol=1e-4, atol=1e-6)
    assert tuned.metadata["prop.whet.training"] == "twice"
    got = outputs_of(module.eval(), tuned, {"x": x.numpy()})["logits"]
    assert error(got, run_network(tuned, {"x": x.numpy()})["logits"]) < TIGHT


def test_a_changed_weight_is_a_source_weight_and_an_unchanged_one_keeps_its_origin():
    from whet.pruning import PruneConfig, prune

    net = small_net()
    small = prune(net, PruneConfig(ratio=0.5, multiple=1)).network
    assert small.tensor("fc").weight.origin.op == "Gather"
    module = small.to_torch(freeze=["fc*"])
    with torch.no_grad():
        module.weights()["body.0.weight"].mul_(2)
    made = from_module(small, module)
    assert made.tensor("fc").weight.origin.op == "Gather"
    assert (made.tensor("body.0.weight").weight.origin.op, made.tensor("body.0.weight").weight.origin.name) == ("source", "body.0.weight")


def test_dynamic_shapes_are_bound_at_each_call():
    net = small_net()
    module = net.to_torch().eval()
    for n in (1, 5):
        x = np.random.default_rng(n).standard_normal((n, 4, 8, 8), np.float32)
        assert error(outputs_of(module, net, {"x": x})["logits"], run_network(net, {"x": x})["logits"]) < TIGHT


def test_frozen_weights_do_not_train():
    module = small_net().to_torch(freeze=["body.*"])
    assert [module.weight_names()[n] for n, _ in module.named_parameters()] == ["fc", "fc.bias"]
    with pytest.raises(UsageError, match=r"Did you mean 'fc\.bias'"):
        small_net().to_torch(freeze=["fc.biass"])


def recurrent_net(op, **attrs):
    """x[T=6,N,2] -> a recurrent layer of 8 units -> two logits from the last state."""
    rng = np.random.default_rng(0)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    net = Network(op)
    x = net.add_input("x", parse_type("f32[6,N,2]"))
    shapes = ((1, gates * 8, 2), (1, gates * 8, 8), (1, gates * 16))
    w, r, b = (net.constant(0.4 * rng.standard_normal(s).astype(np.float32), n) for s, n in zip(shapes, "wrb", strict=True))
    last = net.add("Squeeze", net.add(op, x, w, r, b, hidden_size=8, **attrs)[1], axes=(0,))
    net.mark_output(net.add("MatMul", last, net.constant(0.4 * rng.standard_normal((8, 2)).astype(np.float32), "head")), "y")
    return net


@pytest.mark.parametrize(
    ("op", "attrs"), [("LSTM", {}), ("LSTM", {"clip": 5.0}), ("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {"activations": ("Relu",)})]
)
def test_recurrent_layers_learn(op, attrs):
    """Which of the two sums over time is larger; torch's layers and the step-by-step form."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 64, 2)).astype(np.float32)
    labels = x.sum(0).argmax(1)
    net = recurrent_net(op, **attrs)
    module = net.to_torch()
    assert sorted(module.weight_names().values()) == ["b", "head", "r", "w"]
    optimizer = torch.optim.Adam(module.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels)).backward()
        optimizer.step()
    trained = from_module(net, module)
    assert (run_network(trained, {"x": x})["y"].argmax(1) == labels).mean() > 0.9
    for t in net.constants.values():
        assert not np.array_equal(trained.constants[t.name].array(), t.array()), t.name


def test_untrainable_parts_are_named():
    net = Network("integers")
    x = net.add_input("x", parse_type("i8[5,3]"))
    w = net.constant(np.ones((3, 2), np.int8))
    net.mark_output(net.add("MatMulInteger", x, w, name="product"), "y")
    with pytest.raises(UnsupportedError, match=r"MatMulInteger 'product': it computes in integers"):
        net.to_torch()
    with pytest.raises(NetworkError, match="train before lowering"):
        small_net().clone("lowered").to_torch()
    with pytest.raises(ShapeError, match="the network takes x"):
        small_net().to_torch()(torch.zeros(1, 4, 8, 8), y=torch.zeros(1))


def test_nonfinite_weights_are_refused():
    net = small_net()
    module = net.to_torch()
    with torch.no_grad():
        module.weights()["fc"].fill_(float("nan"))
    with pytest.raises(NetworkError, match="lower the learning rate"):
        from_module(net, module)
