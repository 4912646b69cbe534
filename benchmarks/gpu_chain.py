"""The cost of each layer in the network with overlapping launches: GPU time of whole replays with the layer minus those without it.

Usage: python3 benchmarks/gpu_chain.py [--timingCacheFile=FILE] resnet50:1 ...     results in $OUT/chain.json
Omitting a layer leaves stale values in its output, which changes no time. The differences need not add up to the whole.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import replace

sys.path.insert(0, "src")
from gpu_engines import CONFIG, network

from whet.backends import get_backend
from whet.builder import build
from whet.runtime import bind

ROUNDS = 41


def executable(machine, calls):
    stream = machine.stream()
    for call in calls:
        stream.record(call)
    return stream.finish()


def costs(bound, machine) -> list[float]:
    """Seconds of each layer: paired differences, the median over rounds."""
    steps = bound.step_calls
    whole = executable(machine, [c for group in steps for c in group])
    rounds = []
    for i in range(len(steps)):
        without = executable(machine, [c for k, group in enumerate(steps) if k != i for c in group])
        without.run()
        pairs = [(machine.seconds(whole, 1)[0], machine.seconds(without, 1)[0]) for _ in range(ROUNDS)]
        rounds.append(statistics.median(a for a, _ in pairs) - statistics.median(b for _, b in pairs))
        without.close()
    return rounds


if __name__ == "__main__":
    machine, rows = get_backend("cuda"), []
    timings = next((w.partition("=")[2] for w in sys.argv[1:] if w.startswith("--timingCacheFile=")), "")
    for name, batch in (w.split(":") for w in sys.argv[1:] if not w.startswith("--")):
        plan = build(network(name, int(batch)), replace(CONFIG, timing_cache=timings))
        bound = bind(plan, machine)
        bound.run()
        alone = bound.run_timed()
        layers = [
            {
                "layer": layer.name,
                "op": layer.composite or layer.op,
                "implementation": plan.choices[layer.name].implementation,
                "in_network_us": round(cost * 1e6, 2),
                "alone_us": round(us * 1e6, 2),
            }
            for layer, cost, us in zip(plan.network.layers, costs(bound, machine), alone, strict=True)
        ]
        ms = statistics.median(bound.seconds(100)[10:]) * 1e3
        rows.append({"network": name, "batch": int(batch), "ms": round(ms, 4), "layers": layers, "state": machine.state()})
        print(name, batch, round(ms, 4), "ms; sum of differences", round(sum(x["in_network_us"] for x in layers), 1), "us", flush=True)
        for x in layers:
            print(f"  {x['in_network_us']:7.2f} {x['alone_us']:7.2f}  {x['op']:16} {x['implementation']}  {x['layer'][-60:]}")
        with open(os.environ.get("OUT", ".") + "/chain.json", "w") as out:
            json.dump(rows, out, indent=0)
