"""Whole networks on a GPU in FP16 and INT8 through the builder, timed as isolated replays of their CUDA graph.

Usage: python3 benchmarks/gpu_int8.py resnet50:1:fp16 resnet50:128:int8 resnet50:8:choice ...     results in $OUT/int8.json
`int8` has every layer that can be in 8 bits, `choice` lets the builder choose between both by time. Ranges are invented: times are real,
outputs are not. Batch 1 is verified layer by layer; the kernels of other batches by tests/cuda/test_large.py.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import replace

sys.path.insert(0, "src")
from gpu_engines import CONFIG, network

from whet.backends import get_backend
from whet.builder import build
from whet.builder.quantized import Calibration, build_int8, invented_ranges, prepared
from whet.engine.plan import EnginePlan
from whet.errors import WhetError
from whet.network import Network
from whet.precision import quantize
from whet.runtime.steps import bind


def engine(net: Network, precision: str, verify: bool) -> EnginePlan:
    """The network's engine in a precision; see above."""
    config = replace(CONFIG, verify=verify)
    if precision == "fp16":
        return build(net, config)
    config = replace(config, precisions=("fp16", "int8"))
    if precision == "choice":
        return build_int8(net, config, Calibration())
    made = prepared(net, config)
    return build(quantize(made, invented_ranges(made)), config)


def measure(wanted: list[tuple[str, int, str]]) -> None:
    """A row of numbers for each network; one that cannot be built says why and the others go on."""
    machine, rows = get_backend("cuda"), []
    for name, batch, precision in wanted:
        net, begun = network(name, batch), time.perf_counter()
        try:
            plan = engine(net, precision, batch == 1)
        except WhetError as error:
            print(name, batch, precision, str(error)[:1500], flush=True)
            continue
        took = time.perf_counter() - begun
        bound = bind(plan, machine)
        bound.run()
        times = bound.seconds(60)[10:]
        layers = []
        for layer, us in zip(plan.network.layers, bound.run_timed(), strict=True):
            c = plan.choices[layer.name]
            out = [f"{t.type}:{o[1]}" for t, o in zip(layer.outputs, c.outputs, strict=True)]
            layers.append({"layer": layer.name, "out": out, "tactic": c.tactic, "by": c.implementation, "us": round(us * 1e6, 2)})
        rows.append(
            {
                "network": name,
                "batch": batch,
                "precision": precision,
                "ms": round(statistics.median(times) * 1e3, 4),
                "min_ms": round(min(times) * 1e3, 4),
                "images_per_s": round(batch / statistics.median(times)),
                "build_s": round(took, 1),
                "choice": plan.report.get("precision_choice"),
                "notes": plan.report.get("notes"),
                "state": machine.state(),
                "layers": layers,
            }
        )
        shown = {k: v for k, v in rows[-1].items() if k not in ("layers", "state", "choice")}
        print(shown, [(c["what"], round(c["ms"], 4)) for c in rows[-1]["choice"] or ()], flush=True)
        with open(os.environ.get("OUT", ".") + "/int8.json", "w") as out:
            json.dump(rows, out, indent=0)


if __name__ == "__main__":
    measure([(name, int(batch), precision) for name, batch, precision in (word.split(":") for word in sys.argv[1:])])
