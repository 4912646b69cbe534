"""Comparison of two models: removed channels change every column, zeroed ones none that a kernel depends on."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from whet import zoo
from whet.builder import BuildConfig
from whet.cli import group
from whet.errors import UsageError
from whet.frontends import network_from_onnx, save_onnx
from whet.ops._cost import count_network_operations
from whet.pruning import PruneConfig, compare, count_flops, count_params, groups, prune, zero_channels, zero_smallest
from whet.runtime.steps import BoundEngine
from whet.sparsity import force_two_four


@pytest.fixture(scope="module")
def models():
    net = network_from_onnx(zoo.build("squeezenet1_1", image=48))
    cut = prune(net, PruneConfig(ratio=0.5, scope="group")).network
    return {"original": net, "cut": cut, "zeroed": zero_smallest(net, 0.6), "masked": force_two_four(net)[0]}


def test_counts_need_no_engine(models):
    made = compare(models)
    original, cut, zeroed, masked = made.facts
    assert (cut.params, cut.flops) == (count_params(models["cut"]), count_flops(models["cut"]))
    assert cut.weight_bytes < 0.5 * original.weight_bytes
    assert (zeroed.params, zeroed.flops, zeroed.weight_bytes) == (original.params, original.flops, original.weight_bytes)
    assert zeroed.zeros == pytest.approx(0.6, abs=0.02)
    assert (original.two_four, masked.two_four) == (0, masked.weighted - 1), "all but the first layer, which reads three channels"
    rows = {r[0]: r[1:] for r in made.rows()}
    assert "median ms" not in rows
    assert rows["parameters"][2].endswith("(+0 %)")
    assert [s for s in made.said if s.startswith("zeroed: 60% of the weights are zeros in no pattern")]


def test_wholly_zero_channels_are_counted_as_such(models):
    """Output and input channels of the filters; they are no zeros in no pattern, since a build removes them."""
    net = models["original"]
    (first, second, *_) = groups(net)
    kept = {first.name: list(range(first.size - 3)), second.name: list(range(0, second.size, 2))}
    gone = sum(np.delete(at, kept[g.name], axis=0).size for g in (first, second) for t, _, at in g.weights() if t.type.rank > 1)
    made = compare({"a": net, "b": zero_channels(net, kept)})
    assert gone >= 3 + second.size // 2
    assert [f.zero_channels for f in made.facts] == [0, gone]
    assert next(r for r in made.rows() if r[0] == "zero channels")[1:] == ("0", str(gone))
    assert made.facts[1].zeros == made.facts[0].zeros == 0


def test_engines_are_measured_and_the_zeros_gain_nothing(models, tmp_path, monkeypatch):
    """Engines take a nanosecond for each operation, whatever the load of the machine."""
    monkeypatch.setattr(BoundEngine, "seconds", lambda self, repeats: [1e-9 * count_network_operations(self.network, self.shaped.env)] * repeats)
    # one engine each: if several are compared, external load may make the twins keep different ones
    config = BuildConfig(threads=1, timing_cache=str(tmp_path / "c.sqlite"), optimization_level=1, whole_engines=1)
    made = compare({k: models[k] for k in ("original", "cut", "zeroed", "masked")}, config, seconds=0.01)
    original, cut, zeroed, _ = made.facts
    assert cut.ms < 0.8 * original.ms
    assert cut.peak_bytes < original.peak_bytes
    assert zeroed.peak_bytes == original.peak_bytes
    said = next(s for s in made.said if s.startswith("zeroed"))
    assert "Measured here, interleaved: " in said
    assert "Both engines execute the same layers" in said
    dense = [s for s in made.said if s.startswith("masked: ")]  # only if the sparse tactics of all layers lost
    assert all("sparse tactics were timed and lost to dense ones" in s for s in dense)


def test_from_the_command_line(models, tmp_path):
    for name in ("original", "cut"):
        save_onnx(models[name], tmp_path / f"{name}.onnx")
    files = [str(tmp_path / f"{n}.onnx") for n in ("original", "cut")]
    done = CliRunner().invoke(group, ["compare", *files, "--noEngines"], catch_exceptions=False)
    assert "parameters" in done.output
    plain = json.loads(CliRunner().invoke(group, ["compare", *files, "--noEngines", "--json"]).output)
    assert [m["name"] for m in plain["models"]] == ["original", "cut"]
    assert plain["models"][1]["params"] == count_params(models["cut"])
    with pytest.raises(UsageError, match="at least two engines or models"):
        CliRunner().invoke(group, ["compare", files[0]], catch_exceptions=False)
    with pytest.raises(UsageError, match="a model twice"):
        CliRunner().invoke(group, ["compare", files[0], files[0]], catch_exceptions=False)
