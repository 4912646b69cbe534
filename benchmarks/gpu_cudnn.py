"""cuDNN compared with whet's own kernels: networks built without libraries, by default, and with +CUDNN; the winner of each convolution.

Usage: python3 benchmarks/gpu_cudnn.py resnet50:1:fp16 resnet18:1:tf32 resnext50_32x4d:8:fp16 ...      results in $OUT/cudnn.json
The last part is the permitted rounding: fp16, tf32 (f32 storage), or f32 (none). Each build is verified and its time that of isolated
replays of its CUDA graph.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter

from _record import provenance

sys.path.insert(0, "src")
from whet import zoo
from whet.backends import get_backend
from whet.backends.cuda.cudnn import library
from whet.builder import BuildConfig, build
from whet.engine.schema import encode
from whet.errors import WhetError
from whet.frontends.onnx import network_from_onnx
from whet.runtime import bind
from whet.tactics import get_root_layer

VARIANTS = {"own": ("-CUBLASLT",), "default": (), "+CUDNN": ("+CUDNN",)}
ROUNDING = {"fp16": (("fp16",), ()), "tf32": ((), ()), "f32": ((), ("-TF32",))}


LIBRARIES = ("cublaslt", "cudnn")


def best_of(rows: list, library: str) -> float | None:
    """Microseconds of the fastest timed candidate of a library, or of whet's kernels ("own")."""
    times = [c.ms * 1e3 for c in rows if next((x for x in LIBRARIES if x in c.tactic), "own") == library and c.ms is not None]
    return round(min(times), 2) if times else None


def row_of(name: str, batch: int, rounding: str, variant: str, net) -> dict:
    """One network, one set of tactics."""
    precisions, off = ROUNDING[rounding]
    config = BuildConfig(backend="cuda", precisions=precisions, timing_cache="", tactic_sources=(*VARIANTS[variant], *off))
    row = {"network": name, "batch": batch, "rounding": rounding, "tactics": variant}
    begun, machine = time.perf_counter(), get_backend("cuda")
    try:
        plan = build(net, config)
    except WhetError as e:
        return {**row, "failed": str(e)[:300]}
    bound = bind(plan, machine)
    bound.run()
    times = bound.seconds(60)[10:]
    convolutions = []
    for layer in plan.network.layers:
        rows = plan.report.candidates.get(layer.name, [])
        if get_root_layer(layer).op in ("Conv", "ConvTranspose"):
            shown = {"layer": layer.name, "chosen": rows[0].tactic, "implementation": rows[0].implementation}
            convolutions.append({**shown, **{k: best_of(rows, k) for k in ("own", *LIBRARIES)}})
    both = [c for c in convolutions if c["own"] and c["cudnn"]]
    return {
        **row,
        "ms": round(statistics.median(times) * 1e3, 4),
        "min_ms": round(min(times) * 1e3, 4),
        "build_s": round(time.perf_counter() - begun, 1),
        "graph": bound.executable.graph_refused or "captured",
        "verification": encode(plan.report.verification),
        "chosen": dict(Counter(c.tactic.rpartition("/")[2] for c in plan.choices.values())),
        "convolutions": len(convolutions),
        "by_cudnn": sum("cudnn" in c["chosen"] for c in convolutions),
        "own_sum_us": round(sum(c["own"] for c in both), 1) if both else None,
        "cudnn_sum_us": round(sum(c["cudnn"] for c in both), 1) if both else None,
        "timed_both": len(both),
        "bytes": bound.nbytes(),
        "layers": convolutions,
    }


if __name__ == "__main__":
    rows: list[dict] = []
    gpu = get_backend("cuda")
    made = provenance(("numpy", "cuda-bindings")) | {"device": gpu.describe()["model"]}
    made["versions"]["cudnn"] = library.get_version().removeprefix("cudnn ")
    for word in sys.argv[1:]:
        network, size, what, *only = word.split(":")
        source = network_from_onnx(zoo.build(network, batch=int(size)))
        for kind in only or VARIANTS:
            rows.append(row_of(network, int(size), what, kind, source))
            print({k: v for k, v in rows[-1].items() if k not in ("layers", "verification", "bytes")}, flush=True)
            with open(os.environ.get("OUT", ".") + "/cudnn.json", "w") as out:
                json.dump({**made, "rows": rows}, out, indent=1)
