"""The best predictor of a kernel's time in a network: its time with weights in the L2 cache, with weights from memory, or a mixture.

Usage: python3 benchmarks/gpu_l2.py NETWORK:BATCH ...      results in $OUT/l2.json

Each network is built in FP16; every kind of layer of the engine with the best layer times is then replayed in the whole network with each of
the options of nearly equal time (up to ten), interleaved. Each ranking selects its fastest option per kind. A row has for each ranking its
agreement with the order in the network (Spearman's rank correlation, mean over kinds with at least three options), the slowdown of the
network with its selections, one kind exchanged at a time, relative to those of the warm ranking (and the standard error of that sum), and the
network's time with all selections at once, all these engines interleaved: replayed normally, and with an evicted cache. "in network" selects
by half of the replays and is evaluated on the other half. The file's `networks` have every kind with its options: kernel, us warm, us cold,
us in the network.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _record import provenance

sys.path.insert(0, "src")
from whet import zoo
from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.candidates.enumerate import Option
from whet.builder.select import refine
from whet.frontends.onnx import network_from_onnx
from whet.measure import cold
from whet.measure.in_network import ExchangeableNetwork, LayerKind
from whet.measure.statistics import compute_standard_error

SHARES = {"warm": 0.0, "a quarter cold": 0.25, "half cold": 0.5, "cold": 1.0}  # share of the difference between both times
ROUNDS, WHOLE_ROUNDS = 40, 80


def ranked(o: Option, share: float) -> float:
    """Milliseconds for comparing an option; an option without weights has one time."""
    assert o.ms is not None
    return o.ms if o.cold_ms is None else o.ms + share * (o.cold_ms - o.ms)


def caught(net: Any) -> dict[str, Any]:
    """A build's plan, and the engine in which its kernels were selected, with the kinds of layers and their options."""
    capture: dict[str, Any] = {}
    real = refine.select_in_network

    def noting(bound: Any, kinds: Any, store: Any, seconds: float) -> Any:
        capture.update(bound=bound, kinds=kinds, store=store)
        return real(bound, kinds, store, seconds)

    refine.select_in_network = noting
    try:
        capture["plan"] = build(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False))
    finally:
        refine.select_in_network = real
    return capture


def turns(network: Any, variants: list[Any], rounds: int, other: Any = None) -> np.ndarray:
    """Microseconds [variant, round] of executables, interleaved forwards and backwards; each with an evicted cache if `other` memory is given."""
    machine = network.bound.backend
    samples = np.zeros((len(variants), rounds))
    for executable in variants:
        executable.run()
    for r in range(rounds):
        order = list(range(len(variants)))[:: 1 if r % 2 == 0 else -1]
        if other is None:
            samples[order, r] = np.multiply(1e6, machine.seconds_in_row([variants[k] for k in order]))
            continue
        for k in order:
            samples[k, r] = machine.cold_seconds(variants[k], None, other) * 1e6
    return samples


def agreement(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation."""
    first, second = (np.argsort(np.argsort(x)).astype(float) for x in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def row_of(name: str, batch: int) -> dict[str, Any]:
    capture = caught(network_from_onnx(zoo.build(name, batch=batch)))
    plan, bound, network = capture["plan"], capture["bound"], ExchangeableNetwork(capture["bound"], capture["store"])
    orders: dict[str, list[float]] = {what: [] for what in SHARES}
    slower: dict[str, list[np.ndarray]] = {what: [] for what in (*SHARES, "in network")}
    picks: dict[str, dict[LayerKind, Option]] = {what: {} for what in (*SHARES, "in network")}
    kinds = []
    for kind in capture["kinds"]:
        options = [kind.incumbent, *kind.others]
        if any(o.cold_ms is not None for o in options):
            options = [o for o in options if o.cold_ms is not None]  # compares times of the same kind only
        calls = [{network._steps[n]: network._record(n, o) for n in kind.layers} for o in options]
        able = [k for k, c in enumerate(calls) if all(x is not None for x in c.values())]
        options, calls = [options[k] for k in able], [calls[k] for k in able]
        if len(options) < 2:
            continue
        samples = turns(network, [network._finish(c) for c in calls], ROUNDS)
        whole = np.median(samples, axis=1)
        first = {what: int(np.argmin([ranked(o, share) for o in options])) for what, share in SHARES.items()}
        first["in network"] = int(np.argmin(np.median(samples[:, ::2], axis=1)))
        for what, k in first.items():
            picks[what][kind] = options[k]
            slower[what].append(samples[k, 1::2] - samples[first["warm"], 1::2])
        if len(options) >= 3 and options[0].cold_ms is not None:
            for what, share in SHARES.items():
                orders[what].append(agreement([ranked(o, share) for o in options], list(whole)))
        shown = [[o.kernel.implementation, o.ms and round(o.ms * 1e3, 3), o.cold_ms and round(o.cold_ms * 1e3, 3), round(float(w), 2)]
                 for o, w in zip(options, whole, strict=True)]  # fmt: skip
        kinds.append({"work": kind.text.splitlines()[0][:160], "layers": len(kind.layers), "options": shown})
    engines = {what: network._finish(_exchanged(network, chosen)) for what, chosen in picks.items()}
    times = turns(network, list(engines.values()), WHOLE_ROUNDS)
    emptied = turns(network, list(engines.values()), WHOLE_ROUNDS, bound.backend.allocate(2 * bound.backend.capabilities.cache_bytes[2]))
    compared = {}
    for k, what in enumerate(engines):
        errors = [compute_standard_error(list(d)) for d in slower[what]]
        compared[what] = {
            "order": round(float(np.mean(orders[what])), 3) if orders.get(what) else None, "kinds": len(orders.get(what, ())),
            "slower_us": round(float(sum(median(d) for d in slower[what])), 2), "error_us": round(float(np.sqrt(np.sum(np.square(errors)))), 2),
            "picks_other": sum(o is not picks["warm"][kind] for kind, o in picks[what].items()),
            "engine_us": round(float(np.median(times[k])), 2), "engine_error_us": round(compute_standard_error(list(times[k])), 2),
            "emptied_us": round(float(np.median(emptied[k])), 2), "emptied_error_us": round(compute_standard_error(list(emptied[k])), 2),
        }  # fmt: skip
    t = plan.report.timing
    return {
        "network": name, "batch": batch, "weights_mb": round(bound.shaped.packed_bytes / 1e6, 1), "arena_mb": round(plan.arenas[0].total / 1e6, 1),
        "rankings": compared, "kept_us": round(plan.report.latency_ms * 1e3, 2), "build_s": round(plan.report.build_seconds, 2),
        "timing_s": round(plan.report.phase_seconds["timing"], 2), "cold_s": t.cold_seconds, "cold_timed": t.cold_timed, "kinds": kinds,
    }  # fmt: skip


def _exchanged(network: Any, chosen: dict[LayerKind, Option]) -> dict[int, list[Any]]:
    return {network._steps[n]: network._record(n, o) for kind, o in chosen.items() for n in kind.layers}


def main() -> None:
    cold.COLD_FINALIST, cold.COLD_FINALISTS = 1.3, 20  # every option that may be fastest in the network
    machine, networks = get_backend("cuda"), []
    l2 = machine.capabilities.cache_bytes[2]
    for word in sys.argv[1:]:
        name, batch = word.split(":")
        networks.append(row_of(name, int(batch)))
        r = networks[-1]
        print(f"{word}: weights {r['weights_mb']} MB, arena {r['arena_mb']} MB, L2 {l2 / 1e6:.0f} MB; built in {r['build_s']} s, "
              f"of them timing {r['timing_s']}, with cold weights {r['cold_s']} ({r['cold_timed']} options); kept {r['kept_us']} us", flush=True)
        for what, c in r["rankings"].items():
            print(f"  {what:15} {c}", flush=True)
        rows = [{"network": n["network"], "batch": n["batch"], "ranking": what, **c} for n in networks for what, c in n["rankings"].items()]
        record = {**provenance(("numpy", "cuda-bindings")), "device": machine.describe()["model"], "l2_bytes": l2, "rows": rows}
        text = json.dumps(record | {"state": machine.state(), "networks": networks}, indent=1)
        (Path(os.environ.get("OUT", ".")) / "l2.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
