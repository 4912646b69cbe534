"""YOLOv5s in FP16, uncut and with 40 % of its channels removed: an engine tuned for batch 8 against one with two profiles (1, and 2 to 8).

    python benchmarks/gpu_profiles.py [--backend cuda] [--network yolov5s] [--out FILE]

Every network is built both ways (the second build reads times from the first's cache), all engines are timed interleaved at batch 1, 2 and 8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _record import provenance

import whet
from whet.backends import get_backend
from whet.pruning import PruneConfig, prune
from whet.zoo import save

ROUNDS, SECONDS, BATCHES = 7, 0.15, (1, 2, 8)
OUT = Path(__file__).parent / "results" / "h200" / "profiles.json"


def main() -> int:
    """Builds, times, prints a row per engine and batch; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--backend", default="cuda")
    p.add_argument("--network", default="yolov5s")
    p.add_argument("--precisions", nargs="*", default=["fp16"])
    p.add_argument("--level", type=int, default=3)
    p.add_argument("--out", type=Path, default=OUT)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = whet.network_from_onnx(save(args.network, Path(folder) / "net.onnx"))
    (image,) = whole.inputs

    def at(n: int) -> dict[str, tuple[int, ...]]:
        return {image.name: (n, *image.shape[1:])}

    ways = {"two profiles": ((at(1),) * 3, (at(2), at(8), at(8))), "tuned for 8": ((at(1), at(8), at(8)),)}
    engines, took = {}, {}
    for step, net in (("original", whole), ("pruned", prune(whole, PruneConfig(ratio=0.4, scope="group", multiple=32)).network)):
        for way, profiles in ways.items():
            begun = time.perf_counter()
            config = whet.BuildConfig(backend=args.backend, precisions=tuple(args.precisions), profiles=profiles, optimization_level=args.level)
            engines[step, way] = whet.Runtime(backend=args.backend).load(whet.builder.build(net, config))
            took[step, way] = round(time.perf_counter() - begun, 1)
            print(f"{step}, {way}: built and verified in {took[step, way]} s", flush=True)
    about, rows = {**provenance(("numpy",)), "device": get_backend(args.backend).describe()["model"]}, []
    for n in BATCHES:  # measured batches are kept if time runs out
        rows += timed(engines, took, image.name, at(n)[image.name])
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


def timed(engines: dict, took: dict, name: str, shape: tuple[int, ...]) -> list[dict]:
    """Rows of all engines at one batch, timed interleaved."""
    contexts, ms = {}, {k: [] for k in engines}
    for key, engine in engines.items():
        contexts[key] = context = engine.create_context()
        context.set_input_shape(name, shape)
        array = context.input_array(name)
        array[...] = np.random.default_rng(0).random(shape, np.float32)
        context.bind(name, array)
        context.execute()
    for n in range(ROUNDS):
        for key in list(contexts)[:: -1 if n % 2 else 1]:
            times, until = [], time.perf_counter() + SECONDS
            while time.perf_counter() < until:
                times += contexts[key].launches().seconds_in_row(5)
            ms[key].append(statistics.median(times) * 1e3)
    rows = []
    for (step, way), context in contexts.items():
        mine = ms[step, way]
        rows.append({"network": step, "engine": way, "batch": shape[0], "profile": context.profile_index, "ms": round(statistics.median(mine), 4),
                     "ms_low": round(min(mine), 4), "ms_high": round(max(mine), 4),
                     "speed": round(statistics.median(a / b for a, b in zip(ms[step, "tuned for 8"], mine, strict=True)), 3),
                     "peak_mib": round(engines[step, way].memory(context).peak / 2**20, 1), "build_s": took[step, way]})  # fmt: skip
        print(rows[-1], flush=True)
        context.close()
    return rows


if __name__ == "__main__":
    sys.exit(main())
