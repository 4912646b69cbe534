"""Derived networks run in segments: the same values as in one piece, less built and run, the same sensitive layers found."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import samples

from support import datasets, realdata
from whet.builder import BuildConfig
from whet.builder.precision.float8_ranges import calibrate_float8_ranges, find_sensitive_layers
from whet.builder.precision.int8 import Calibration, prepare
from whet.builder.verify.engine_values import EngineRun
from whet.builder.verify.segments import SegmentedRuns
from whet.frontends import network_from_onnx
from whet.network import Network, parse_type
from whet.precision import Analysis, calibrate, find_quantization_sites
from whet.precision.float8 import list_excluded_layers


def deep_network(blocks=8):
    """Residual blocks: one tensor crosses between two of them, two inside."""
    rng, net = np.random.default_rng(2), Network("deep")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    t = net.add("Conv", net.add_input("x", parse_type("f32[N,3,12,12]")), w(16, 3, 3, 3), pads=(1,) * 4, name="stem")
    for i in range(blocks):
        a = net.add("Relu", net.add("Conv", t, w(16, 16, 3, 3), w(16), pads=(1,) * 4, name=f"a{i}"))
        t = net.add("Relu", net.add("Add", net.add("Conv", a, w(16, 16, 1, 1), name=f"b{i}"), t))
    net.mark_output(net.add("Gemm", net.add("Flatten", net.add("GlobalAveragePool", t)), w(16, 5), name="fc"), "y")
    return net


class Runs(list):
    """The networks of all runs; called, it makes an engine that adds its network here whenever it runs. An engine is built by its first run."""

    def __call__(self, net, names):
        runs = self

        class Counted(EngineRun):
            def __call__(self, feeds):
                runs.append(self.net)
                return super().__call__(feeds)

        return Counted(net, names)

    @property
    def layer_counts(self):
        """The number of layers of every engine that was built."""
        return [len(net.layers) for net in dict.fromkeys(self)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_segments_equal_one_piece(precision):
    net = deep_network()
    ranges = calibrate(net, samples(4), run=EngineRun(net, find_quantization_sites(net).names()), method="minmax")
    data = samples(3, 9)
    whole, parts = (Analysis(net, precision, data, run_of, ranges) for run_of in (EngineRun, SegmentedRuns(net, data)))
    for names in (["stem"], ["a3"], ["b4"], ["a7"], ["b7"], ["a1", "b6"], ["b0", "b7"], None):
        # dB; a segment may use other float kernels than the whole network, and rounding to bf16 may go either way
        assert parts.snr(names) == pytest.approx(whole.snr(names), abs=0.1 if precision == "bf16" else 0.02)


def test_only_different_segments_are_built_and_run():
    net = deep_network()
    data = samples(2)
    ranges = calibrate(net, data, run=EngineRun(net, find_quantization_sites(net).names()), method="minmax")
    calls = Runs()
    runs = SegmentedRuns(net, data, engine_of=calls)
    found = Analysis(net, "int8", data, runs, ranges)
    assert len(runs.cuts) >= 4
    assert all(len(names) == 1 for names in runs.cuts), "one tensor crosses between blocks"
    before = set(calls)
    del calls[:]
    found.snr(["b7"])
    built = [n for n in dict.fromkeys(calls) if n not in before]
    assert len(built) == 1
    assert len(built[0].layers) < len(net.layers) / 2
    assert len(calls) <= 2 * len(data), "earlier segments are known"


def test_sets_share_equal_segments():
    net = deep_network()
    ranges = calibrate(net, samples(2), run=EngineRun(net, find_quantization_sites(net).names()), method="minmax")
    calls = Runs()
    found = Analysis(net, "int8", samples(2), SegmentedRuns(net, engine_of=calls), ranges)
    names = [x.name for x in found.layers]
    found.snr(names)
    before = len(calls.layer_counts)
    found.snr([n for n in names if n != "a3"])
    assert len(calls.layer_counts) <= before + 2  # the segment of a3, and the next if inputs or outputs of a3 are rounded there


def test_little_memory_costs_work_but_not_accuracy():
    net = deep_network()
    ranges = calibrate(net, samples(2), run=EngineRun(net, find_quantization_sites(net).names()), method="minmax")
    data = samples(3)
    expected = Analysis(net, "int8", data, SegmentedRuns(net, data), ranges).snr(["b6"])
    runs = SegmentedRuns(net, data, cache_bytes=30000)  # three values of 9216 bytes
    assert Analysis(net, "int8", data, runs, ranges).snr(["b6"]) == pytest.approx(expected, abs=1e-9)
    assert sum(map(len, runs.known.values())) == 3


def test_half_a_gigabyte_of_values_is_kept():
    sample = {"x": np.zeros(1, np.float32)}
    for size, kept in ((512 << 20, 1), ((512 << 20) + 1, 0)):
        runs = SegmentedRuns(deep_network(), [sample])
        runs.keep(sample, 0, {"a": np.broadcast_to(np.uint8(0), (size,))})  # no memory: one byte repeated
        assert len(runs.known[id(sample)]) == kept


def test_reused_input_arrays_with_other_values_are_detected():
    net, data = deep_network(), samples(3)
    run = SegmentedRuns(net, data[:1])(net, ["y"])
    feeds = {}
    for sample in data:
        feeds["x"] = sample["x"]
        assert np.array_equal(run(feeds)["y"], run(sample)["y"])
    assert not np.array_equal(run(data[1])["y"], run(data[2])["y"])


def test_short_networks_and_single_tensors_run_in_one_piece():
    net = deep_network(0)
    assert isinstance(SegmentedRuns(net)(net, ["y"]), EngineRun)
    net = deep_network()
    assert isinstance(SegmentedRuns(net)(net, ["a1"]), EngineRun)


def sensitive_layers(net, data, enough):
    """The layers that are excluded from FP8, found by running segments; EngineRun, which runs whole networks, finds the same ones."""
    config, made = BuildConfig(timing_cache=""), prepare(net, BuildConfig())
    ranges = calibrate_float8_ranges(net, made, data, config, [])
    found = find_sensitive_layers(made, ranges, data, config, list_excluded_layers(made), enough_db=enough)
    assert found == find_sensitive_layers(made, ranges, data, config, list_excluded_layers(made), enough_db=enough, run_of=EngineRun)
    return found


def test_the_same_layers_are_sensitive():
    assert sensitive_layers(deep_network(3), Calibration(samples=lambda: samples(6)), 40.0)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(("name", "enough"), [("resnet8_mlperftiny", 32.0), ("resnet20_cifar10", 29.0)])
def test_the_same_layers_of_trained_networks_are_sensitive(name, enough):
    (model,) = realdata.models([name])
    net = network_from_onnx(str(model.path))
    x, _ = datasets.cifar10_train_lossless()
    x = x[datasets.spread(len(x), 24)]
    images = x.astype(np.float32).transpose(0, 3, 1, 2) if "mlperf" in name else datasets.imagenet_norm(x)
    data = Calibration(samples=lambda: ({net.inputs[0].name: images[i : i + 1]} for i in range(len(images))))
    assert sensitive_layers(net, data, enough)
