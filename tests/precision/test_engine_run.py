"""Calibration without oneDNN, as on machines for GPUs."""

import numpy as np
from test_calibration import samples, small_network

import whet.builder.verify.engine_values as engine_run
from whet.network import Network, parse_type
from whet.precision import calibrate, find_quantization_sites


def test_without_onednn_the_reference_computes(monkeypatch):
    net = small_network()
    names = find_quantization_sites(net).names()
    usual = calibrate(net, samples(2), run=engine_run.EngineRun(net, names), method="minmax")
    monkeypatch.setattr(engine_run, "load_error", lambda: "oneDNN cannot be loaded")
    engine_run.list_tactic_sources.cache_clear()
    try:
        run = engine_run.EngineRun(net, names)
        found = calibrate(net, samples(2), run=run, method="minmax")
        (plan,) = run.plans
        assert {c.tactic.rpartition("/")[2] for c in plan.choices.values()} <= {"numpy_reference", "numpy_reformat"}
    finally:
        engine_run.list_tactic_sources.cache_clear()
    for name, r in usual.tensors.items():
        assert np.allclose([r.low, r.high], [found.tensors[name].low, found.tensors[name].high], rtol=1e-5, atol=1e-6)


def test_networks_that_share_parts_keep_their_own_weights():
    """Two networks with layers of one kind: the second lists no candidates again, packs only its own weights, and computes its own values."""
    rng, nets = np.random.default_rng(0), []
    common = rng.standard_normal((16, 16)).astype(np.float32)
    for _ in range(2):
        net = Network("products")
        x = net.add_input("x", parse_type("f32[4,16]"))
        y = net.add("MatMul", net.add("MatMul", x, net.constant(common)), net.constant(rng.standard_normal((16, 16)).astype(np.float32)))
        net.mark_output(y, "y")
        nets.append(net)
    shared, feeds = engine_run.SharedParts(), {"x": rng.standard_normal((4, 16)).astype(np.float32)}
    for net in nets:
        kinds = set(shared.listed)
        run = engine_run.EngineRun(net, ["y"], shared)
        got = run(feeds)["y"]
        np.testing.assert_array_equal(got, engine_run.EngineRun(net, ["y"])(feeds)["y"])
        want = feeds["x"].astype(np.float64) @ common @ net.layers[-1].needs(1).array()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert kinds
    assert set(shared.listed) == kinds, "the second network has no new kind of layer"
