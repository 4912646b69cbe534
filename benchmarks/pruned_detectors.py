"""Trained detectors, cut and recovered without labels: their detection accuracy, and the speed of their engines.

    python benchmarks/pruned_detectors.py --stages make --work FOLDER [--ratios 0.1,0.2,0.3]      # cuts and recovers
    python benchmarks/distill_detectors.py --cuts FOLDER --photos FILE --models DIR --out FOLDER      # on a GPU: distilled from the uncut ones
    python benchmarks/pruned_detectors.py --stages judge,time --work FOLDER      # evaluates the folder's networks, times them on an idle machine

Three steps per ratio: as cut; with weights fitted layer by layer (least squares on 24 photos); and, if present in the folder, distilled from the
whole detector on unlabelled photos. NanoDet is evaluated by AP50 against COCO's labels, the face detector (whose photos have no labels) by the
agreement of its boxes with those of the whole detector: mean average precision with the whole detector's confident boxes as ground truth. All learn
from the even photos and are evaluated on the odd ones, by ONNX Runtime. Three kinds of cuts (`--ways`): `default`, a FLOP reduction with the
default options of `whet prune`, `chosen`, the same with second-order Taylor terms, both on those 24 photos, and `even`, the same share of each
layer's channels by their activations. A row names the importance that selected its cut, with the changes of the outputs on held-out photos where
importances were compared. Times: single images, all engines interleaved, this CPU. Needs the shared data folder
(../shared/data or WHET_DATA).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _record import median_interval, provenance

from support import datasets, detection, realdata
from whet.builder import BuildConfig, build
from whet.frontends import network_from_onnx, save_onnx
from whet.measure.compare import compare, time_calls
from whet.measure.policy import Block, Policy, Stage
from whet.network import Network
from whet.pruning import PruneConfig, Target, count_flops, count_params, prune, save_recipe
from whet.runtime import Context, Runtime

OUT = Path(__file__).parent / "results" / "cpu" / "pruned_detectors.json"
ROUNDS, EACH = 12, 10
WAYS = {"default": "fewer FLOPs", "chosen": "fewer FLOPs, chosen", "even": "of each layer"}
TIMES = ("whet_ms", "speed", "speed_low", "speed_high")
RECOVERY = 24  # photos for fitting the weights: thousands of positions each

Boxes = list[np.ndarray]  # per image [n, 6]: class, score, corners


@dataclass(frozen=True)
class Detector:
    """A model, the decoding of its boxes, its metric and its ground truth."""

    model: str
    boxes: Callable[[realdata.Outputs], np.ndarray]
    judge: str  # the name of the metric
    sure: float  # minimum score of ground truth if the whole detector is the reference
    labels: Callable[[list[int]], Boxes] | None = None


def nanodet_boxes(out: realdata.Outputs) -> np.ndarray:
    return detection.nanodet_boxes([(out[s][0], out[d][0]) for s, d in (("792", "795"), ("814", "817"), ("836", "839"))])


def face_boxes(out: realdata.Outputs) -> np.ndarray:
    scores, corners = out["scores"][0][:, 1], out["boxes"][0]
    near = np.flatnonzero(scores > 0.05)
    kept = near[detection.suppress(corners[near], scores[near], 0.4)]
    return np.concatenate([np.zeros((len(kept), 1)), scores[kept, None], corners[kept]], 1)


def coco_labels(images: list[int]) -> Boxes:
    names = datasets.coco_names()
    found = [datasets.coco_boxes(names[i]) for i in images]
    return [np.concatenate([b[:, :1], b[:, 1:3] - b[:, 3:] / 2, b[:, 1:3] + b[:, 3:] / 2], 1) for b in found]


DETECTORS = (
    Detector("nanodet_m", nanodet_boxes, "AP50 against labels", 0.4, coco_labels),
    Detector("version-RFB-320", face_boxes, "mAP against the whole detector", 0.7),
)


def samples(detector: Detector) -> tuple[Path, str, list[dict[str, np.ndarray]]]:
    """The detector's file, the name of its input, and all photos preprocessed for it."""
    (model,) = realdata.models([detector.model])
    feeds = list(model.inputs(None))
    return model.path, next(iter(feeds[0])), feeds


def stem_of(detector: Detector, ratio: float, way: str) -> str:
    """Prefix of the files of a cut."""
    return f"{detector.model}-{ratio:g}-{way}"


def config_of(ratio: float, way: str) -> PruneConfig:
    """The units to remove."""
    if way == "even":
        return PruneConfig(ratio=ratio, scope="group", importance="activation")
    target = Target("flops", ratio=1 - ratio)
    return PruneConfig(target=target, importance="taylor2") if way == "chosen" else PruneConfig(target=target)


def make(detector: Detector, cuts: list[tuple[float, str]], work: Path) -> None:
    """Writes each cut unrecovered and recovered, with its recipe."""
    path, name, feeds = samples(detector)
    recovery = {name: np.concatenate([f[name] for f in feeds[::2]][:RECOVERY])}
    whole = network_from_onnx(path)
    for ratio, way in cuts:
        begun, stem = time.perf_counter(), stem_of(detector, ratio, way)
        made = prune(whole, config_of(ratio, way), recovery)
        save_onnx(made.cut, work / f"{stem}.cut.onnx")
        save_onnx(made.network, work / f"{stem}.recovered.onnx")
        save_recipe(made.recipe, work / f"{stem}.recipe.json")
        floor = made.report.floor
        errors = {} if floor is None else {f"error_{kind}": round(e, 4) for kind, e in floor.by_importance.items()}
        choice = {"importance": made.recipe.about["importance"], **errors}
        (work / f"{stem}.choice.json").write_text(json.dumps(choice) + "\n")
        print(f"{stem}: {made.report.lines()[0]}; {choice}; cut and recovered in {time.perf_counter() - begun:.0f} s", flush=True)


def networks(detector: Detector, cuts: list[tuple[float, str]], work: Path) -> list[tuple[str, Network]]:
    """(step, network) of the whole detector and of its variants."""
    made = [("whole", network_from_onnx(samples(detector)[0]))]
    for ratio, way in cuts:
        for step, file in (("", ".cut"), (", recovered", ".recovered"), (", taught", "")):
            if (path := work / f"{stem_of(detector, ratio, way)}{file}.onnx").exists():
                made.append((f"{ratio:.0%} {WAYS[way]}{step}", network_from_onnx(path)))
    return made


def contexts_of(nets: list[tuple[str, Network]]) -> list[Context]:
    return [Runtime(backend="cpu").load(build(net, BuildConfig())).create_context() for _, net in nets]


def run_on_photos(net: Network, feeds: list[dict[str, np.ndarray]]) -> list[realdata.Outputs]:
    """The outputs for each photo, by ONNX Runtime: accuracy needs no timed engine."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # more would wait for each other on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        session = ort.InferenceSession(str(save_onnx(net, Path(folder) / "net.onnx")), options, providers=["CPUExecutionProvider"])
    names = [t.name for t in session.get_outputs()]
    return [dict(zip(names, session.run(None, feed), strict=True)) for feed in feeds]


def judge(detector: Detector, cuts: list[tuple[float, str]], work: Path) -> list[dict]:
    """A row for the whole detector and two or three for each ratio: as cut, recovered, and distilled."""
    _, _, feeds = samples(detector)
    judged = list(range(1, len(feeds), 2))
    nets = networks(detector, cuts, work)
    found = [[detector.boxes(out) for out in run_on_photos(net, [feeds[i] for i in judged])] for _, net in nets]
    sure = [b[b[:, 1] >= detector.sure][:, [0, 2, 3, 4, 5]] for b in found[0]]
    truth = detector.labels(judged) if detector.labels else sure
    rows = []
    choices = {f"{ratio:.0%} {WAYS[way]}": work / f"{stem_of(detector, ratio, way)}.choice.json" for ratio, way in cuts}
    for (step, net), boxes in zip(nets, found, strict=True):
        choice = choices.get(step.partition(", recovered")[0].partition(", taught")[0])
        chosen = json.loads(choice.read_text()) if choice is not None and choice.exists() else {}
        rows.append(
            {
                "case": detector.model, "step": step, **chosen, "parameters": count_params(net),
                "mflops": round(count_flops(net) / 1e6, 1), "judge": detector.judge, "photos": len(judged),
                "score": round(detection.average_precision(boxes, truth), 4),
                "agreement": round(detection.average_precision(boxes, sure), 4),
            }
        )  # fmt: skip
        print(f"  {step:36s} {rows[-1]['mflops']:8.1f} MFLOPs  {detector.judge} {rows[-1]['score']:.3f}", flush=True)
    return rows


def timed(detector: Detector, cuts: list[tuple[float, str]], work: Path, rows: list[dict]) -> None:
    """Adds the times to the detector's rows."""
    _, name, feeds = samples(detector)
    nets = networks(detector, cuts, work)
    times = time_contexts(contexts_of(nets), {name: feeds[0][name]})
    for (step, _), ms in zip(nets, times, strict=True):
        row = next(r for r in rows if (r["case"], r["step"]) == (detector.model, step))
        ratio, low, high = median_interval([w / t for w, t in zip(times[0], ms, strict=True)])
        row |= dict(zip(TIMES, (round(median(ms), 4), round(ratio, 3), round(low, 3), round(high, 3)), strict=True))
        print(f"  {step:36s} {row['whet_ms']:.3f} ms ({row['speed']:.2f}x)", flush=True)


def time_contexts(contexts: list[Context], feed: dict[str, np.ndarray]) -> list[list[float]]:
    """Milliseconds of each context: medians of interleaved rounds."""
    for c in contexts:
        for name, a in feed.items():
            c.input_array(name)[...] = a
            c.bind(name, c.input_array(name))
        c.execute()
    rules = Policy(stages=(Stage(rounds=(ROUNDS, ROUNDS)),), block=Block(seconds=inf, most=EACH))
    ranking = compare([time_calls(c.execute) for c in contexts], rules)
    return [[1e3 * s for s in samples] for samples in ranking.samples]


def main() -> int:
    """The command line; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--ratios", default="0.1,0.2,0.3")
    p.add_argument("--detectors", nargs="+", choices=[d.model for d in DETECTORS], default=[d.model for d in DETECTORS])
    p.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="how the cuts are chosen")
    p.add_argument("--stages", default="make,judge,time", help="of these, in this order (default: all)")
    p.add_argument("--work", type=Path, default=Path(".detectors"), help="folder of the networks")
    p.add_argument("--out", type=Path, default=OUT)
    args = p.parse_args()
    if datasets.root() is None:
        p.error("there is no shared data folder: set WHET_DATA to it")
    stages, cuts = args.stages.split(","), [(float(r), way) for way in args.ways for r in args.ratios.split(",")]
    chosen = [d for d in DETECTORS if d.model in args.detectors]
    args.work.mkdir(parents=True, exist_ok=True)
    if "make" in stages:
        for d in chosen:
            make(d, cuts, args.work)
    if not {"judge", "time"} & set(stages):
        return 0
    about = provenance(("whet", "numpy", "onnxruntime", "onednn-cpu-gomp"))
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for d in chosen:
        if "judge" in stages:
            times = {r["step"]: {k: r[k] for k in TIMES if k in r} for r in rows if r["case"] == d.model}  # kept for networks that did not change
            rows = [r for r in rows if r["case"] != d.model] + [r | times.get(r["step"], {}) for r in judge(d, cuts, args.work)]
        if "time" in stages:
            timed(d, cuts, args.work, rows)
    rows.sort(key=lambda r: [d.model for d in DETECTORS].index(r["case"]))
    told = {k: v for f in sorted(args.work.glob("*.told.json")) for k, v in json.loads(f.read_text()).items()}
    args.out.write_text(json.dumps({**about, **({"distillation": told} if told else {}), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
