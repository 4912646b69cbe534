"""New weights in a built engine: equal to a new build, with the same kernels; what cannot be replaced is refused with the reason."""

import numpy as np
import pytest

import whet
from support import datasets
from whet.builder import BuildConfig, build
from whet.engine import read_engine, write_engine
from whet.errors import EngineError
from whet.network import Network, Weight, parse_type
from whet.ops import run_network
from whet.runtime import Runtime
from whet.runtime.refit import list_missing_weights

QUICK = BuildConfig(timing_cache="", optimization_level=0)


def network(seed=0, equal=False, zero=False):
    """Conv -> batch norm -> ReLU -> Conv -> Flatten -> Gemm, with weights of a seed."""
    rng = np.random.default_rng(seed)
    net = Network("small")

    def weight(shape, name, positive=False):
        a = rng.standard_normal(shape).astype(np.float32)
        return net.constant(np.abs(a) + np.float32(0.1) if positive else a, name)

    x = net.add_input("x", parse_type("f32[N,3,8,8]"))
    y = net.add("Conv", x, weight((8, 3, 3, 3), "conv.w"), weight(8, "conv.b"), pads=(1, 1, 1, 1))
    norm = [weight(8, f"bn.{n}", positive=n == "var") for n in ("scale", "bias", "mean", "var")]
    y = net.add("Relu", net.add("BatchNormalization", y, *norm))
    y = net.add("Conv", y, weight((4, 8, 3, 3), "conv2.w"))
    y = net.add("Flatten", y)
    net.mark_output(net.add("Gemm", y, weight((5, 144), "fc.w"), weight(5, "fc.b"), transB=1), "y")
    return net


def changed(net, **arrays):
    """The network with other weights."""
    for name, a in arrays.items():
        t = net.constants[name]
        t.weight = Weight(a, t.constant().origin)
    return net


def feed(shape=(2, 3, 8, 8)):
    return {"x": np.random.default_rng(9).standard_normal(shape).astype(np.float32)}


@pytest.fixture(scope="module")
def engine():
    return Runtime().load(build(network(), QUICK))


def test_all_new_weights_give_the_engine_of_the_new_model_with_the_same_kernels(engine):
    other = network(seed=1)
    got = engine.refit({n: t.array() for n, t in other.constants.items()})
    one = {k: v[:1] for k, v in feed().items()}
    np.testing.assert_allclose(got.run(one)["y"], run_network(other, one)["y"], rtol=1e-4, atol=1e-4)
    assert got.plan.choices == engine.plan.choices
    np.testing.assert_allclose(engine.run(one)["y"], run_network(network(), one)["y"], rtol=1e-4, atol=1e-4)  # the old engine is unchanged


def test_one_weight_that_is_folded_with_others_is_computed_from_their_old_values(engine):
    scale = np.linspace(-1, 2, 8, dtype=np.float32)
    one = {k: v[:1] for k, v in feed().items()}
    want = run_network(changed(network(), **{"bn.scale": scale}), one)["y"]
    got = engine.refit({"bn.scale": scale})
    np.testing.assert_allclose(got.run(one)["y"], want, rtol=1e-4, atol=1e-4)
    assert engine.plan.probe["outputs"] != got.plan.probe["outputs"]


def test_a_refitted_engine_is_saved_and_refitted_again(engine, tmp_path):
    first = engine.refit({"fc.b": np.full(5, 7, np.float32)})
    write_engine(first.plan, tmp_path / "a.engine")
    again = whet.load(tmp_path / "a.engine").refit({"fc.b": np.zeros(5, np.float32)})
    one = {k: v[:1] for k, v in feed().items()}
    difference = first.run(one)["y"] - again.run(one)["y"]
    np.testing.assert_allclose(difference, 7, rtol=1e-4)


def test_a_weight_whose_values_the_file_lacks_must_be_given_too(tmp_path):
    """A product of two weights is stored by value, because sums round differently on other machines: the file has neither factor."""
    net, rng = Network("product"), np.random.default_rng(0)
    x = net.add_input("x", parse_type("f32[2,16]"))
    a, b = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
    net.mark_output(net.add("MatMul", x, net.add("MatMul", net.constant(a, "a"), net.constant(b, "b"))), "y")
    write_engine(build(net, QUICK), tmp_path / "a.engine")
    assert list_missing_weights(read_engine(tmp_path / "a.engine"), ["a"]) == ["b"]
    engine = whet.load(tmp_path / "a.engine")
    with pytest.raises(EngineError, match="give also b"):
        engine.refit({"a": a})
    x = rng.standard_normal((2, 16)).astype(np.float32)
    np.testing.assert_allclose(engine.refit({"a": 2 * a, "b": b})(x), x @ (2 * a @ b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "values", "message"), [
    ("bn.scales", np.ones(8, np.float32), "'bn.scales' cannot be replaced.*Weights that can: bn.bias"),
    ("bn.scale", np.ones(7, np.float32), r"'bn.scale' is f32\[8\] in the engine, the new values are f32\[7\]"),
    ("bn.scale", np.ones(8, np.float64), r"the new values are f64\[8\]"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused(engine, name, values, message):
    with pytest.raises(EngineError, match=message):
        engine.refit({name: values})


def test_weights_that_were_equal_must_stay_equal():
    def twice():
        net = Network("twice")
        x = net.add_input("x", parse_type("f32[2,16]"))
        w = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
        a, b = (net.add("MatMul", x, net.constant(w.copy(), n)) for n in ("w1", "w2"))
        net.mark_output(net.add("Mul", net.add("Relu", a), net.add("Sigmoid", b)), "y")
        return net

    engine = Runtime().load(build(twice(), QUICK))
    new = np.ones((16, 16), np.float32)
    kept = [n for n in engine.refittable_weights() if n in ("w1", "w2")]
    if len(kept) == 2:
        engine.refit({"w1": new})  # two constants: each has its own values
        return
    with pytest.raises(EngineError, match="equal"):
        engine.refit({kept[0]: new})
    with pytest.raises(EngineError, match="equal to another weight"):
        engine.refit({"w2" if kept == ["w1"] else "w1": new})


def test_a_model_of_another_structure_is_refused_by_its_outputs(engine):
    assert engine.refit(network(seed=4)).plan.choices == engine.plan.choices
    other = network(seed=2)
    layer = next(x for x in other.layers if x.op == "Relu")
    layer.op = "Sigmoid"
    with pytest.raises(EngineError, match="does not compute what the model does"):
        engine.refit(other)
    renamed = network(seed=2)
    renamed.outputs[0].name = "z"
    with pytest.raises(EngineError, match="inputs and outputs"):
        engine.refit(renamed)


def test_int8_weights_are_quantized_again_with_the_stored_scales_or_refused():
    net = network()
    samples = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    engine = whet.build(net, shapes={"x": (1, 3, 8, 8)}, int8=[samples], timing_cache="", optimization_level=0)
    new = network().constants["fc.w"].array() * np.float32(0.5)
    if "fc.w" not in engine.refittable_weights():
        with pytest.raises(EngineError, match="cannot be replaced"):
            engine.refit({"fc.w": new})
        return
    one = {k: v[:1] for k, v in feed().items()}
    want = run_network(changed(network(), **{"fc.w": new}), one)["y"]
    got = engine.refit({"fc.w": new}).run(one)["y"]
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.1


@pytest.mark.data
def test_a_real_networks_weights_are_replaced_with_its_accuracy():
    """ResNet-8 with negated filters, then with its own weights again: the accuracy returns."""
    path = datasets.path_of("cifar10/resnet8_mlperftiny.onnx")
    net, x = whet.network_from_onnx(path), datasets.cifar10_lossless()
    engine = whet.build(net, shapes={"input": (50, 3, 32, 32)}, timing_cache="", optimization_level=0)
    images = x[0][:200].astype(np.float32).transpose(0, 3, 1, 2)

    def right(e):
        outputs = np.concatenate([e(np.ascontiguousarray(images[i : i + 50])) for i in range(0, 200, 50)])
        return (outputs.argmax(1) == x[1][:200]).mean()

    own = {n: net.constants[n].array() for n in engine.refittable_weights()}
    wrong = engine.refit({n: -a if a.ndim == 4 else a for n, a in own.items()})
    assert right(wrong) < 0.3
    assert right(wrong.refit(own)) == right(engine) > 0.85
