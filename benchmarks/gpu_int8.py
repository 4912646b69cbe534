"""INT8 on a GPU: engines calibrated on real photos, selected by time against FP16 and verified at their batch, both timed interleaved.

    python benchmarks/gpu_int8.py calibrate FOLDER resnet50 yolov5s      one cache per network, on the CPU; needs the shared data
    python benchmarks/gpu_int8.py run FOLDER resnet50:1,8,128 ... [--gpus 2] [--each 3] [--seconds 250]
                                                                         on GPUs: parts in $OUT, one per row; cases in the given order
    python benchmarks/gpu_int8.py merge PART... [--commit HASH]          results/h200/int8.json

A row: the engine of `whet exec --backend=cuda --fp16 --int8 --calib=CACHE` (whet_ms; `precision` is INT8, or FP16 if the builder kept it,
`said` quotes the builder's sentence on that), the FP16 engine (fp16_ms), both replayed as CUDA graphs in interleaved blocks, with exclusive use
of the GPU; the ratio, images per second, build seconds (with other cases on the same CPU and, alternating, GPU), the scope of verification, and
the bar if the project has one. The engine of the row is verified, the FP16 engine for comparison is not. The weights are the zoo's (random, of
the real sizes), the ranges those of real photos: 32 of the ImageNet sample, 8 of COCO at 640 pixels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _gpu_pool import Turns, alone, run_cases
from _record import provenance

from whet import zoo
from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.precision.int8 import Calibration, build_int8, get_calibrated_ranges, prepare
from whet.builder.precision.permissions import computes_on_integers
from whet.engine.plan import EnginePlan
from whet.engine.schema import encode
from whet.errors import WhetError
from whet.frontends.onnx import network_from_onnx
from whet.network import Network
from whet.precision import quantize
from whet.runtime import BoundEngine, WeightStore, bind

RESULT = Path(__file__).parent / "results" / "h200" / "int8.json"
PHOTOS = {"imagenet": 32, "coco": 8}
MS_BARS = {("resnet50", 1): 0.16, ("resnet50", 8): 0.30, ("resnet50", 128): 1.9}
BEST_IMAGES_BAR = 75_000  # per second, of ResNet-50 at its best batch
FLOATS_UP_TO = 256  # largest batch for which FP16 is built and timed
SAYS = ("INT8 pays", "--int8 is permitted but does not pay")  # prefixes of the builder's sentence on its selection
BLOCK, ROUNDS = 10, 9  # replays per block, rounds


def network(name: str) -> Network:
    """The zoo's network with a dynamic batch, so that one calibration serves all batches."""
    return network_from_onnx(zoo.build(name))


def photos(name: str, net: Network) -> Iterator[dict[str, np.ndarray]]:
    """Real photos as the network's inputs, one at a time."""
    from PIL import Image

    from support import datasets

    (x,) = net.inputs
    if "yolo" in name:
        for file in datasets.coco_names()[: PHOTOS["coco"]]:
            with Image.open(datasets.path_of(f"coco_val128/images/{Path(file).stem}.jpg")) as image:
                pixels = np.asarray(image.convert("RGB").resize(tuple(x.shape[:1:-1])), np.float32)
            yield {x.name: np.ascontiguousarray(pixels.transpose(2, 0, 1)[None] / np.float32(255))}
        return
    images, _ = datasets.imagenet_sample(PHOTOS["imagenet"])
    for a in images:
        yield {x.name: np.ascontiguousarray(datasets.imagenet_norm(a)[None])}


def calibrate(folder: Path, names: list[str]) -> None:
    """Writes folder/NAME.json for each network; existing files are kept."""
    for name in names:
        net, begun = network(name), time.perf_counter()
        calibration = Calibration(samples=lambda name=name, net=net: photos(name, net), cache=str(folder / f"{name}.json"))
        ranges = get_calibrated_ranges(net, prepare(net, BuildConfig()), calibration, BuildConfig(), print)
        print(name, len(ranges.tensors), "ranges of", ranges.samples, f"photos in {time.perf_counter() - begun:.0f} s", flush=True)


def engines(net: Network, batch: int, cache: Path, times: Path, switches: dict[str, tuple[str, ...]]) -> tuple[EnginePlan | None, EnginePlan, float]:
    """(FP16, the builder's selection with INT8 permitted, seconds of that build). `times` is the timing cache, `switches` those of passes and
    tactics.

    Beyond FLOATS_UP_TO samples FP16 is not built and nothing is selected: every eligible layer is in INT8.
    """
    shape = {t.name: tuple(d if isinstance(d, int) else batch for d in t.shape) for t in net.inputs}
    with closing(Turns()) as turns:
        config = BuildConfig(
            backend="cuda", precisions=("fp16", "int8"), profiles=((shape, shape, shape),), timing_cache=str(times), **switches,
        )  # fmt: skip
        calibration, begun = Calibration(cache=str(cache)), time.perf_counter()
        if batch > FLOATS_UP_TO:
            prepared = prepare(net, config)
            plan = build(quantize(prepared, get_calibrated_ranges(net, prepared, calibration, config, print)), config, progress=turns)
            return None, plan, time.perf_counter() - begun
        plan = build_int8(net, config, calibration, progress=turns)
        took = time.perf_counter() - begun
        return build(net, replace(config, precisions=("fp16",), verify=False), progress=turns), plan, took


def in_blocks(bounds: list[BoundEngine]) -> list[list[float]]:
    """Milliseconds per replay of each, in interleaved blocks of BLOCK; the first three of each block, with the other's data in the caches, are
    omitted.
    """
    times: list[list[float]] = [[] for _ in bounds]
    for r in range(ROUNDS):
        for i in range(len(bounds)) if r % 2 == 0 else reversed(range(len(bounds))):
            times[i] += [1e3 * t for t in bounds[i].seconds(BLOCK + 3)[3:]]
    return times


def row(name: str, batch: int, cache: Path, machine: Any, times: Path, switches: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """The figures of one network at one batch."""
    net, known = network(name), times.exists()
    floats, plan, took = engines(net, batch, cache, times, switches)
    store, bounds = WeightStore(machine), []
    for p in (plan, *([floats] if floats else [])):
        bounds.append(bind(p, machine, store=store))
        bounds[-1].run()
    with alone():
        replays = in_blocks(bounds)
        layer_s = [b.run_timed() for b in bounds]
        state = machine.state()
    ms, other = statistics.median(replays[0]), statistics.median(replays[1]) if floats else None
    verification = encode(plan.report.verification)
    layers = sum(map(computes_on_integers, plan.network.layers))
    bar = MS_BARS.get((name, batch))
    return {
        "case": f"{name} batch {batch}", "network": name, "batch": batch, "precision": "int8" if layers else "fp16",
        "whet_ms": round(ms, 4), "spread_ms": round(float(np.subtract(*np.quantile(replays[0], [0.75, 0.25]))) / 2, 4),
        "fp16_ms": round(other, 4) if other else None, "ratio": round(ms / other, 3) if other else None,
        "bar": bar, "within_bar": None if bar is None else ms <= bar, "images_per_s": round(1e3 * batch / ms),
        "quantized_layers": layers, "layers": len(plan.network.layers),
        "build_s": round(took, 1), "timing_cache": "known" if known else "new", "switches": switches, "choice": encode(plan.report.precision_choice),
        "said": next((t for t in (*plan.report.notes, *plan.report.info) if t.startswith(SAYS)), None),
        "notes": plan.report.notes, "info": plan.report.info,
        "verified": {k: verification[k] for k in ("layers", "images", "worst_layer", "network_error", "network_bound", "turned_error")},
        "banned": plan.report.banned, "calibration": json.loads(cache.read_text())["samples"], "state": state,
        "layer_us": layer_rows(plan, layer_s[0]), "fp16_layer_us": layer_rows(floats, layer_s[1]) if floats else None,
    }  # fmt: skip


def layer_rows(plan: EnginePlan, seconds: list[float]) -> list[list[Any]]:
    """[name, tactic, implementation, us] of each layer."""
    chosen = [plan.choices[x.name] for x in plan.network.layers]
    return [
        [x.name, c.tactic.removeprefix("cuda/"), c.implementation, round(s * 1e6, 2)]
        for x, c, s in zip(plan.network.layers, chosen, seconds, strict=True)
    ]


def measure_case(folder: Path, name: str, batch: int, times: str, switches: dict[str, tuple[str, ...]]) -> None:
    """One row, in a separate process; a case that cannot be built is recorded with its reason."""
    machine, out = get_backend("cuda"), Path(os.environ.get("OUT", "."))
    try:
        with tempfile.TemporaryDirectory() as own:
            made = row(name, batch, folder / f"{name}.json", machine, Path(times or own) / f"times-{name}-{batch}.sqlite", switches)
    except WhetError as error:
        made = {"case": f"{name} batch {batch}", "network": name, "batch": batch, "failed": f"{type(error).__name__}: {error}"[:2000]}
    (out / f"int8-{name}-{batch}.json").write_text(json.dumps({**provenance(["numpy"]), "gpu": machine.describe(), "rows": [made]}, indent=1))
    long = ("layer_us", "fp16_layer_us", "state", "choice", "notes", "info", "verified")
    print({k: v for k, v in made.items() if k not in long}, made.get("notes"), flush=True)


def merge(parts: list[Path], commit: str) -> None:
    """Merges the parts of one run into a run of the result file, after the existing ones. `commit`: of the tree that ran, if the machine had
    a copy of it outside the repository.
    """
    found = [json.loads(p.read_text()) for p in parts]
    rows = sorted(({"ms": r.get("whet_ms"), **r} for f in found for r in f["rows"]), key=lambda r: (r["network"], r["batch"]))
    large = [r["images_per_s"] for r in rows if r["network"] == "resnet50" and r["batch"] >= 128 and "images_per_s" in r]
    best = {"value": max(large), "bar": BEST_IMAGES_BAR, "within_bar": max(large) >= BEST_IMAGES_BAR} if large else None
    run = {
        "what": __doc__.splitlines()[0], "date": min(f["date"] for f in found), "device": found[0]["gpu"]["model"],
        "commit": commit or ", ".join(sorted({f["commit"] for f in found})), "command": "; ".join(sorted({f["command"] for f in found})),
        "versions": {**found[0]["versions"], "driver": found[0]["gpu"]["driver"], "nvrtc": found[0]["gpu"]["nvrtc"]},
        "note": f"Ranges of {PHOTOS['imagenet']} photos of the ImageNet sample (YOLOv5s: {PHOTOS['coco']} of COCO val2017), random weights; "
        "every engine verified at its batch; the FP16 engine beside it is built without verification.",
        **({"resnet50_best_images_per_s": best} if best else {}), "rows": rows,
    }  # fmt: skip
    before = json.loads(RESULT.read_text()) if RESULT.exists() else []
    RESULT.write_text(json.dumps([*before, run], indent=0) + "\n")
    print(RESULT, len(rows), "rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("calibrate", "run", "one", "merge"))
    parser.add_argument("words", nargs="+")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--each", type=int, default=3, help="processes on a GPU: one times, the others compile or verify")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--times", default="", help="folder of timing caches, a file a row: what is timed stays there, and is taken from there")
    parser.add_argument("--passes", default="", help="switches for passes, as of whet exec; joined by commas")
    parser.add_argument("--tacticSources", dest="tactic_sources", default="", help="the same for tactics")
    parser.add_argument("--commit", default="", help="for merge: the commit of the tree that ran")
    given = parser.parse_args()
    words = given.words
    if given.what == "merge":
        merge([Path(p) for p in words], given.commit)
    elif given.what == "calibrate":
        calibrate(Path(words[0]), words[1:])
    elif given.what == "one":
        switches = {k: tuple(w for w in getattr(given, k).split(",") if w) for k in ("passes", "tactic_sources")}
        measure_case(Path(words[0]), words[1], int(words[2]), given.times, switches)
    else:
        pairs = [(name, b) for name, _, batches in (w.partition(":") for w in words[1:]) for b in batches.split(",")]
        more = [f"--{k}={v}" for k, v in (("times", given.times), ("passes", given.passes), ("tacticSources", given.tactic_sources)) if v]
        run_cases([("one", words[0], name, b, *more) for name, b in pairs], given.gpus, given.each, given.seconds)
