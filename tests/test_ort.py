"""whet.ort in place of onnxruntime: one script for both libraries, and what only whet's does."""

import ctypes
import doctest
import importlib
import warnings

import numpy as np
import pytest

import whet
import whet.ort
from whet.errors import BuildWarning, ShapeError, UsageError, WhetWarning
from whet.network import parse_network

NET = """network two source
in %a: f32[N,4]
in %b: f32[N,4]
const %w: f32[4,3] = seed(1)
%sum = Add(%a, %b)
%y = MatMul(%sum, %w)
out %sum
out %y
"""
X = np.arange(8, dtype=np.float32).reshape(2, 4)
QUICK = {"optimization_level": 0, "timing_cache": ""}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    import onnx

    path = whet.save_onnx(parse_network(NET), tmp_path_factory.mktemp("ort") / "two.onnx")
    model = onnx.load(path)
    model.producer_name, model.model_version, model.doc_string = "tests", 3, "a sum and a product"
    onnx.helper.set_model_props(model, {"labels": "cat,dog"})
    onnx.save(model, path)
    return str(path)


@pytest.fixture(scope="module")
def session(path):
    return whet.ort.InferenceSession(path, **QUICK)


def script(ort, path, **more):
    """A user's script; returns everything that it sees."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"], **more)
    inputs, outputs, meta = session.get_inputs(), session.get_outputs(), session.get_modelmeta()
    seen = [[(x.name, x.type, x.shape) for x in (*inputs, *outputs)], session.get_providers(), session.get_overridable_initializers()]
    seen.append([meta.producer_name, meta.version, meta.description, meta.custom_metadata_map])
    feed = {inputs[0].name: X, inputs[1].name: X + 1}
    seen += session.run(None, feed)
    seen += session.run([outputs[1].name], feed, ort.RunOptions())
    binding = session.io_binding()
    binding.bind_cpu_input("a", X)
    binding.bind_ortvalue_input("b", ort.OrtValue.ortvalue_from_numpy(X))
    given = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
    binding.bind_output("sum")
    binding.bind_ortvalue_output("y", given)
    session.run_with_iobinding(binding)
    seen += [*binding.copy_outputs_to_cpu(), given.numpy(), given.shape(), given.data_type(), given.device_name()]
    target = np.zeros((2, 3), np.float32)
    binding.clear_binding_outputs()
    binding.bind_output("y", "cpu", 0, np.float32, (2, 3), target.ctypes.data)
    binding.bind_input("a", "cpu", 0, np.float32, X.shape, X.ctypes.data)
    session.run_with_iobinding(binding)
    seen.append(target)
    return seen


def test_a_script_sees_the_same_with_one_import_changed(path):
    onnxruntime = pytest.importorskip("onnxruntime")
    wanted, got = script(onnxruntime, path), script(whet.ort, path, timing_cache="")
    assert len(wanted) == len(got)
    for a, b in zip(wanted, got, strict=True):
        if isinstance(a, np.ndarray):
            np.testing.assert_allclose(b, a, rtol=1e-5)
        else:
            assert b == a


def test_names_of_the_module_are_those_of_onnx_runtime():
    onnxruntime = pytest.importorskip("onnxruntime")
    for name in whet.ort.__all__:
        assert hasattr(onnxruntime, name)
    for kind, ours in ((onnxruntime.GraphOptimizationLevel, whet.ort.GraphOptimizationLevel),):
        assert {n for n in dir(ours) if n.startswith("ORT")} <= {*dir(kind), "ORT_ENABLE_LAYOUT"}  # older releases lack this level


def test_engines_are_built_once_per_set_of_shapes(path):
    session = whet.ort.InferenceSession(path, **QUICK)
    assert session.engines == []
    for n in (1, 2, 1, 2):
        assert session.run(["sum"], {"a": X[:n], "b": X[:n].tolist()})[0].shape == (n, 4)
    assert len(session.engines) == 2
    with pytest.warns(WhetWarning, match="engines for 3 sets of input shapes; give shapes="):
        session.run(None, {"a": np.ones((3, 4), np.float32), "b": np.ones((3, 4), np.float32)})
    ranged = whet.ort.InferenceSession(path, shapes=dict.fromkeys("ab", ((1, 4), (2, 4), (4, 4))), **QUICK)
    for n in (1, 2):
        ranged.run(None, {"a": X[:n], "b": X[:n]})
    assert len(ranged.engines) == 1


def test_fixed_dimensions_and_a_saved_engine(path, tmp_path):
    options = whet.ort.SessionOptions()
    options.add_free_dimension_override_by_name("N", 2)
    options.optimized_model_filepath = str(tmp_path / "two.engine")
    session = whet.ort.InferenceSession(path, options, **QUICK)
    assert [x.shape for x in session.get_inputs()] == [[2, 4], [2, 4]]
    again = whet.ort.InferenceSession(tmp_path / "two.engine")
    assert again.get_inputs() == session.get_inputs()
    for a, b in zip(again.run(None, {"a": X, "b": X}), session.run(None, {"a": X, "b": X}), strict=True):
        assert np.array_equal(a, b)


def test_asynchronous_runs_and_values(session):
    from threading import Event

    done, got = Event(), []

    def callback(outputs, data, error):
        got.append((outputs, data, error))
        done.set()

    session.run_async(["sum"], {"a": X, "b": X}, callback, "mine")
    assert done.wait(60)
    ((outputs, data, error),) = got
    assert (data, error) == ("mine", "")
    assert np.array_equal(outputs[0], 2 * X)
    value = whet.ort.OrtValue.ortvalue_from_numpy(X.copy())
    (total,) = session.run_with_ort_values(["sum"], {"a": value, "b": value})
    assert np.array_equal(total.numpy(), 2 * X)
    assert ctypes.c_float.from_address(total.data_ptr()).value == 0.0
    assert total.tensor_size_in_bytes() == X.nbytes
    value.update_inplace(X + 1)
    assert np.array_equal(np.asarray(value), X + 1)
    with pytest.raises(ShapeError, match="array: float64"):
        value.update_inplace(X.astype(np.float64))


def test_providers():
    select = importlib.import_module("whet.ort.providers").select_provider
    assert select(None, None) == ("CPUExecutionProvider", "cpu", {})
    assert select([("OpenVINOExecutionProvider", {"device": "CPU"})], None)[1] == "cpu"
    with pytest.warns(WhetWarning, match="whet has no provider QNNExecutionProvider"):
        assert select(["QNNExecutionProvider", "CPUExecutionProvider"], None)[0] == "CPUExecutionProvider"
    assert "CPUExecutionProvider" in whet.ort.get_available_providers()


def test_tensorrts_provider_permits_its_types(standin_gpu):
    select = importlib.import_module("whet.ort.providers").select_provider
    chosen = select(["TensorrtExecutionProvider"], [{"trt_fp16_enable": "True", "trt_bf16_enable": 0}])
    assert chosen == ("TensorrtExecutionProvider", "cuda", {"fp16": True})
    assert whet.ort.get_device() == "GPU"


def test_mistakes_are_refused_by_name(path, session):
    for call, error, message in (
        (lambda: session.run(["z"], {"a": X, "b": X}), UsageError, "the model has no output 'z'"),
        (lambda: session.run(None, {"c": X}), UsageError, "the model has no input 'c'"),
        (lambda: session.run(None, {"a": X}), ShapeError, "input_feed: 'b' is missing"),
        (lambda: session.run(None, [X]), UsageError, "input_feed: a dict of arrays"),
        (lambda: session.run(None, {"a": X[:, :3], "b": X}), ShapeError, r"input_feed: 'a' has the shape \[2, 3\], the model takes f32\[N,4\]"),
        (lambda: whet.ort.InferenceSession(path, providers="CPUExecutionProvider"), UsageError, "providers: a list"),
        (lambda: whet.ort.InferenceSession(path, {"threads": 1}), UsageError, "sess_options: a whet.ort.SessionOptions, not dict"),
        (lambda: session.io_binding().bind_output("z"), UsageError, "no output 'z'"),
        (lambda: session.io_binding().bind_output("y", "npu"), UsageError, "device_type: 'npu'"),
        (lambda: session.run_with_iobinding(session.io_binding()), whet.errors.ContextError, "no output is bound"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_the_examples_of_the_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runner, said = doctest.DocTestRunner(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BuildWarning)
        (test,) = doctest.DocTestFinder(recurse=False).find(whet.ort.InferenceSession, "InferenceSession")
        runner.run(test, out=said.append)
    assert runner.tries >= 7
    assert runner.failures == 0, "".join(said)
