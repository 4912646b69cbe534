"""Calibration without oneDNN, as on machines for GPUs."""

import numpy as np
from test_calibration import samples, small_network

import whet.builder.verify.engine_values as engine_run
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
