"""Energy of an engine on a real GPU: gross, and net of the power of a GPU with an idle context."""

from __future__ import annotations

import numpy as np
import pytest

from whet.builder import BuildConfig, build
from whet.network import Network, parse_type
from whet.runtime import Runtime

pytestmark = pytest.mark.gpu


def test_net_energy_is_proportional_to_the_load(gpu):
    """Sixty-four products in a row raise a GPU's power well above idle; twice the work costs twice the net energy.

    (One product with its copies does not: an H200 drew 126 W, 6 W above idle, and the resolution of 1 W is a sixth of that.)
    """
    from whet.search.jobs.device_locks import find_physical_gpu
    from whet.search.stages.energy import Meter
    from whet.search.stages.measure import make_run

    meter = Meter(find_physical_gpu("cuda"))
    if meter.read is None:
        pytest.skip(meter.about)
    net = Network("products")
    value = net.add_input("x", parse_type("f16[256,4096]"))
    weights = net.constant((np.random.default_rng(0).standard_normal((4096, 4096)) / 64).astype(np.float16), "w")
    for _ in range(64):
        value = net.add("MatMul", value, weights)
    net.mark_output(value)
    plan = build(net, BuildConfig(backend="cuda", timing_cache="", avg_timing=2, whole_engines=1, optimization_level=1, verify=False))
    context = Runtime("cuda").load(plan).create_context()
    meter.measure_idle(1.5)
    assert meter.idle is not None
    assert 5 < meter.idle < 500
    run = make_run(context, {"x": np.random.default_rng(1).standard_normal((256, 4096)).astype(np.float16)})
    cold = meter.measure_energy(run, 1, 1.0)
    found = meter.measure_energy(run, 1, 1.5)
    twice = meter.measure_energy(lambda: (run(), run()), 1, 1.5)
    others = gpu.state().get("other_processes")
    for name, e in (("cold", cold), ("once", found), ("twice", twice)):
        print(name, {k: round(v, 2) for k, v in e.items() if k != "about"}, f"others {others}")
    if others:
        pytest.skip(f"other processes use the GPU ({others}): what it draws is theirs too")
    assert found["watts"] > 1.2 * meter.idle
    assert 0 < found["net_mj"] < found["mj"]
    assert found["net_mj"] == pytest.approx(found["mj"] * (1 - meter.idle / found["watts"]), rel=1e-6)
    assert twice["net_mj"] == pytest.approx(2 * found["net_mj"], rel=0.2)
