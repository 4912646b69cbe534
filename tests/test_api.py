"""The functions for users: whet.build, whet.load, calls of an engine from any thread, and arguments refused by name."""

import asyncio
import doctest
import threading
import warnings

import numpy as np
import pytest

import whet
from whet.errors import BuildWarning, ContextError, EngineError, NetworkError, ShapeError, UsageError
from whet.network import parse_network
from whet.ops import run_network

QUICK = {"optimization_level": 0, "timing_cache": ""}
TWO = """network two source
in %a: f32[N,4]
in %b: f32[N,4]
const %w: f32[4,3] = seed(1)
%sum = Add(%a, %b)
%y = MatMul(%sum, %w)
out %sum
out %y
"""
ONE = "network one source\nin %x: f32[N,4]\nconst %w: f32[4,3] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n"
RANGE = whet.Profile(min=(1, 4), opt=(2, 4), max=(4, 4))
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def engine():
    return whet.build(parse_network(ONE), shapes=RANGE, **QUICK)


@pytest.fixture(scope="module")
def two():
    return whet.build(parse_network(TWO), shapes={"a": RANGE, "b": ((1, 4), (2, 4), (4, 4))}, **QUICK)


def expected(x):
    return run_network(parse_network(ONE), {"x": np.asarray(x, np.float32)})["y"]


def test_arrays_lists_and_dicts_in_and_the_same_structure_out(engine, two):
    np.testing.assert_allclose(engine(X), expected(X), rtol=1e-5)
    for outputs in (engine({"x": X}), engine(x=X), engine.run({"x": X})):
        np.testing.assert_allclose(outputs["y"], expected(X), rtol=1e-5)
    (listed,) = engine([X])
    assert np.array_equal(listed, engine(X))
    assert np.array_equal(engine(X.tolist()), engine(X)), "nested lists of numbers are one input"
    assert engine(X[:1]).shape == (1, 3)
    assert isinstance(two(X, X), tuple)
    total, y = two(X, X)
    assert np.array_equal(total, 2 * X)
    np.testing.assert_allclose(y, expected(2 * X), rtol=1e-5)
    assert list(two(a=X, b=X)) == ["sum", "y"]
    assert isinstance(two([X, X]), list)


def test_torch_tensors_in_and_out(engine):
    torch = pytest.importorskip("torch")
    y = engine(torch.from_numpy(X).requires_grad_())
    assert isinstance(y, torch.Tensor)
    assert np.array_equal(y.numpy(), engine(X))
    assert isinstance(engine({"x": torch.from_numpy(X)})["y"], torch.Tensor)


def test_torch_types_that_numpy_lacks():
    torch = pytest.importorskip("torch")
    net = parse_network("network n source\nin %x: bf16[2,4]\n%y = Relu(%x)\nout %y\n")
    y = whet.build(net, **QUICK)(torch.tensor([[1.5, -2, 3, -4]] * 2, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [[1.5, 0, 3, 0]] * 2


def test_calls_from_many_threads(engine):
    wrong: list[int] = []
    begin = threading.Barrier(6)

    def call(k):
        x = np.full((1 + k % 4, 4), k, np.float32)
        want = expected(x)
        begin.wait()
        for _ in range(20):
            if not np.allclose(engine(x), want, rtol=1e-5):
                wrong.append(k)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert 1 <= len(engine._pool.idle) <= 6


def test_a_failed_call_leaves_the_engine_usable(engine):
    with pytest.raises(ShapeError, match="axis 0: 5"):
        engine(np.zeros((5, 4), np.float32))
    np.testing.assert_allclose(engine(X), expected(X), rtol=1e-5)


def test_asynchronous_calls(engine):
    async def calls():
        return await asyncio.gather(*(engine.run_async({"x": X + k}) for k in range(3)))

    for k, outputs in enumerate(asyncio.run(calls())):
        np.testing.assert_allclose(outputs["y"], expected(X + k), rtol=1e-5)


def test_a_saved_engine_gives_the_same_and_a_closed_one_is_refused(engine, tmp_path):
    loaded = whet.load(engine.save(tmp_path / "one.engine", packed_weights=True))
    assert np.array_equal(loaded(X), engine(X))
    assert np.array_equal(whet.load((tmp_path / "one.engine").read_bytes())(X), engine(X))
    loaded.close()
    with pytest.raises(ContextError, match="the engine is closed"):
        loaded(X)


def test_benchmark_and_explanation(engine):
    measured = engine.benchmark(seconds=0.05)
    assert (measured.batch, measured.queries >= 10) == (2, True)
    low, high = measured.interval_ms
    assert 0 < low <= measured.latency_ms <= high
    assert measured.latency_ms <= measured.p90_ms <= measured.p99_ms
    assert f"{measured.latency_ms:.4g} ms" in str(measured)
    assert engine.benchmark(X[:1], seconds=0.01).batch == 1
    assert engine.benchmark(shapes={"x": (3, 4)}, seconds=0.01).batch == 3
    for wrong in ({"seconds": 0}, {"inputs": X, "shapes": {"x": (2, 4)}}):
        with pytest.raises(UsageError, match=r"seconds: 0|shapes: the inputs"):
            engine.benchmark(**wrong)
    text = engine.explain()
    (name,) = {layer.choice.tactic for layer in whet.inspector.layer_facts(engine.plan) if layer.layer.op == "MatMul"}
    assert name in text
    assert max(map(len, text.splitlines())) <= 100
    assert "computes " in engine.explain("y")
    with pytest.raises(UsageError, match="no layer 'z'"):
        engine.explain("z")


def test_int8_with_samples_and_a_budget():
    """Samples as arrays with several rows, as dicts, and from a function that is called again; the engine's outputs stay close."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((8, 4)).astype(np.float32)
    for samples in (data, [{"x": row[None]} for row in data], lambda: iter(data)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BuildWarning)
            engine = whet.build(parse_network(ONE), shapes=RANGE, int8=samples, accuracy="snr:20", **QUICK)
        assert tuple(engine.plan.options["precisions"]) == ("int8",)
        np.testing.assert_allclose(engine(data[:2]), expected(data[:2]), atol=0.2)


@pytest.mark.usefixtures("shared_registry")
def test_a_torch_module_in_one_call():
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Scaled(torch.nn.Module):
        def forward(self, left, right):
            return left * 2 + right

    engine = whet.build(Scaled(), shapes={"right": (2, 3), "left": (2, 3)}, **QUICK)
    one = np.ones((2, 3), np.float32)
    assert list(engine.inputs) == ["left", "right"]
    assert engine(left=one, right=0 * one)[next(iter(engine.outputs))].tolist() == (2 * one).tolist()
    with pytest.raises(UsageError, match="shapes: a torch module has no shapes"):
        whet.build(Scaled())


def test_models_as_bytes_and_protos(tmp_path):
    import onnx

    path = whet.save_onnx(parse_network(ONE), tmp_path / "one.onnx")
    for model in (str(path), path, path.read_bytes(), onnx.load(path)):
        assert whet.build(model, shapes=(2, 4), **QUICK)(X).shape == (2, 3)


def test_several_profiles_and_a_base_config():
    config = whet.BuildConfig(**QUICK, precisions=("bf16",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BuildWarning)
        engine = whet.build(parse_network(ONE), config, shapes=[{"x": (1, 4)}, {"x": {"min": (2, 4), "max": (4, 4)}}], fp16=True)
    assert [p.shapes["x"] for p in engine.profiles] == [((1, 4),) * 3, ((2, 4), (4, 4), (4, 4))]
    assert tuple(engine.plan.options["precisions"]) == ("bf16", "fp16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp61": True}, r"whet.build has no parameter 'fp61'. Did you mean 'fp16'\?"),
        ({"fp16": "yes"}, "fp16: True or False, not str"),
        ({"shapes": (0, 4)}, r"shapes: \(0, 4\) has the size 0"),
        ({"shapes": {"y": (1, 4)}}, r"shapes: the model has no input 'y'"),
        ({"shapes": {"x": ("1", 4)}}, r"shapes\['x'\]: '1' is not a size"),
        ({"shapes": {"x": ((1, 4), (2, 4))}}, r"shapes\['x'\]: 2 shapes; a range is \(min, opt, max\)"),
        ({"shapes": {"x": {"best": (1, 4)}}}, r"shapes\['x'\]: 'best' is none of min, opt, max"),
        ({"shapes": 4}, "shapes: a shape is a tuple such as"),
        ({"shapes": (1, 4), "profiles": (({"x": (1, 4)},) * 3,)}, "shapes: the profiles are given"),
        ({"int8": True}, "int8: the network has no Q/DQ nodes"),
        ({"int8": 3}, "int8: calibration data .* not 3"),
        ({"int8": []}, "int8: the calibration data is empty"),
        ({"int8": X, "fp8": X}, "int8, fp8: give the calibration data to one"),
        ({"accuracy": "snr:20"}, "accuracy: it bounds the loss"),
        ({"accuracy": 20, "bf16": True}, "accuracy: a text"),
        ({"config": {"threads": 2}}, "config: a whet.BuildConfig, not dict"),
        ({"threads": "two"}, "BuildConfig.threads: 'two' is not an int"),
        ({"verify": "no"}, "BuildConfig.verify: 'no' is not True or False"),
    ],
)
def test_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(UsageError, match=message):
        whet.build(parse_network(ONE), **{**QUICK, **arguments})


def test_models_and_inputs_are_refused_by_name(engine, two, tmp_path):
    saved = engine.save(tmp_path / "one.engine")
    for call, error, message in (
        (lambda: whet.build(3), UsageError, "model: a file, bytes, .* not int"),
        (lambda: whet.build(tmp_path / "no.onnx"), UsageError, "model: there is no file"),
        (lambda: whet.build(saved), UsageError, "model: .* is an engine already: whet.load"),
        (lambda: whet.load("one.onnx"), UsageError, "path: one.onnx is a model, not an engine: whet.build"),
        (lambda: whet.Runtime().load(engine), EngineError, "a loaded engine already"),
        (lambda: engine(X, X), ShapeError, "inputs: the list holds 2 arrays, the engine takes 1: x: f32"),
        (lambda: engine(X, x=X), ShapeError, "inputs: 1 by position and x by name"),
        (lambda: engine(y=X), ShapeError, "inputs: the engine has no input 'y'"),
        (lambda: two(a=X), ShapeError, "inputs: 'b' is missing"),
        (lambda: two(X), ShapeError, "inputs: one ndarray for 2 inputs"),
        (lambda: engine(X.astype(np.float64)), ShapeError, "'x' is float64, the engine takes float32"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(("call", "name"), [
    (lambda e: e.benchmark(seconds="1"), "seconds"), (lambda e: e.benchmark(seconds=0), "seconds"), (lambda e: e.explain(5), "layer"),
    (lambda e: e.save(3), "path"), (lambda e: whet.load(5), "path"),
])  # fmt: skip
def test_arguments_of_engines_are_refused_by_name(engine, call, name):
    with pytest.raises(UsageError, match=f"^{name}: "):
        call(engine)


def test_the_notes_of_a_build_are_warnings_at_the_callers_line():
    with pytest.warns(BuildWarning, match="no profile gives its shape") as found:
        whet.build(parse_network(ONE), **QUICK)
    assert found[0].filename == __file__


def test_a_failed_build_says_which_sizes_were_taken_as_1():
    text = "in %x: f32[N,4]\nconst %i: i64[1] = [3]\n%r = Relu(%x)\n%y = Gather(%r, %i, axis=0)\nout %y\n"
    with pytest.raises(NetworkError, match=r"index 3(.|\n)*dynamic sizes became 1: 'x' f32\[N,4\] as \[1, 4\].*give its usual sizes with profiles="):
        whet.build(parse_network(text), **QUICK)
    with pytest.raises(NetworkError, match=r"^(?!(.|\n)*became 1)"):
        whet.build(parse_network(text), shapes={"x": (2, 4)}, **QUICK)
    assert whet.build(parse_network(text), shapes={"x": (4, 4)}, **QUICK).plan.network.layers


def test_the_examples_of_the_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BuildWarning)
        for thing in (whet.Profile, whet.build, whet.load):
            (test,) = [t for t in doctest.DocTestFinder(recurse=False).find(thing, thing.__name__)]
            runner.run(test, out=said.append)
    assert runner.tries >= 10
    assert runner.failures == 0, "".join(said)


def test_help_teaches():
    for words in ("whet.build(", "engine(", "whet.load(", "benchmark()", "help(whet.build)"):
        assert words in whet.__doc__
    assert "Parameters" in whet.build.__doc__
