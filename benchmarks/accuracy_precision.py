"""INT8, FP8, FP16 and BF16 against FP32 on real trained models and all their labelled images, paired: the cost of low precision.

`python benchmarks/accuracy_precision.py [--models resnet20_cifar10 ...] [--precisions int8 fp8 fp16 bf16] [--limit N] [--out FILE]`

Every eligible layer computes in the low precision, independent of time. INT8 runs on the machine's integer kernels; FP8 (e4m3, one scale per
tensor and per weight channel, min-max; first and last layers excluded and biases corrected, as --fp8 builds it), FP16 and BF16 (inputs, weights
and outputs of every layer rounded) are emulated in FP32 with rounding at the same positions. "int8 steps" is INT8 with --calibSteps=all, "fp8"
is the result of --fp8: sums of skip connections and single layers stay in floating point if the outputs had too few decibels; "fp8 all" has
every eligible layer in FP8, "fp8 round" is "fp8" with --calibSteps=round. With --jpeg the CIFAR-10 networks are also evaluated on the 10,000
JPEG test images (recompressed, so harder than the training images). Calibration images are not evaluated: CIFAR-10's training set, MNIST's
training set, otherwise every other image, at most 128; the rest is evaluated. A row: accuracy of both, the paired difference in points with
its 95 % interval (from the images on which the two differ), and the SNR of the outputs in dB (before a final softmax). For detectors (NanoDet
on COCO, three face detectors): the mean average precision of their boxes at IoU 0.5 with the FP32 boxes (score at least 0.4, faces 0.7) as ground
truth, and the mean over IoU 0.5 to 0.95. Bars: INT8 loses at most 0.5 points, FP8 0.3; for FP16 and BF16 the interval shows no loss; the
detectors' boxes agree to 0.95 at IoU 0.5.
"""

import argparse
import io
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _record import alone, describe_origin, provenance

from support import datasets, detection, realdata

OUT = Path(__file__).parent / "results" / "cpu" / "accuracy_precision.json"
MODELS = ("resnet20_cifar10", "resnet56_cifar10", "resnet8_mlperftiny", "lenet_mnist", "vit_mnist", "squeezenet1.1", "nanodet_m",
          "version-slim-320", "version-RFB-320", "version-RFB-640")  # fmt: skip
FACES = "version-"  # prefix of the names of the face detectors
CALIBRATION = 128
PRECISIONS = ("int8", "int8 steps", "fp8", "fp8 all", "fp8 round", "fp16", "bf16")
BARS = {"int8": 0.5, "fp8": 0.3}  # points that may be lost; for the others no loss that the interval can resolve
BOXES_BAR, SCORE, FACE_SCORE = 0.95, 0.4, 0.7


def calibration_images(model: realdata.RealModel, count: int) -> np.ndarray:
    """Images that are not evaluated, preprocessed for the model: f32 [count, C, H, W]."""
    if "cifar10" in model.name or "mlperftiny" in model.name:
        x, _ = datasets.cifar10_train_lossless()
        x = x[datasets.spread(len(x), count)]
        return x.astype(np.float32).transpose(0, 3, 1, 2) if "mlperftiny" in model.name else datasets.imagenet_norm(x)
    if "mnist" in model.name:
        with np.load(datasets.path_of("mnist/mnist_20k_10k.npz")) as f:
            x = f["x_train"]
        x = x[datasets.spread(len(x), count)].astype(np.float32)[:, None] / 255
        return (x - np.float32(0.1307)) / np.float32(0.3081) if "vit" in model.name else x
    feeds = list(model.inputs(None))
    return np.concatenate([next(iter(feeds[k].values())) for k in calibrated_on(len(feeds))])


def calibrated_on(images: int) -> list[int]:
    """Indices of a model's calibration images if no separate set exists: every other image, at most CALIBRATION."""
    return list(range(1, images, 2))[:CALIBRATION]


def judged(model: realdata.RealModel, limit: int | None):
    """(inputs, labels) not used by calibration, as arrays."""
    name = next(iter(next(iter(model.inputs(1)))))
    x = np.concatenate([f[name] for f in model.inputs(limit)])
    load = {"mnist": datasets.mnist_test, "cifar": datasets.cifar10_lossless, "mlper": datasets.cifar10_lossless}
    kind = next((k for k in load if k in model.name), None)
    labels = load[kind]()[1] if kind else datasets.imagenet_sample(None)[1]
    labels = labels[datasets.spread(len(labels), limit)]
    if kind:
        return x, labels
    unseen = np.setdiff1d(np.arange(len(x)), calibrated_on(len(x)))
    return x[unseen], labels[unseen]


class Prepared:
    """A model with the data shared by its rows: network, calibration images, the FP32 engine."""

    def __init__(self, model: realdata.RealModel, batch: int):
        from whet.builder import build
        from whet.builder.config import BuildConfig
        from whet.builder.precision.calibration import prepare
        from whet.frontends import network_from_onnx
        from whet.runtime import Runtime

        self.model, self.images = model, calibration_images(model, CALIBRATION)
        self.net = network_from_onnx(str(model.path))
        last = self.net.outputs[0].maker
        if len(self.net.outputs) == 1 and last is not None and last.op == "Softmax":
            self.net.outputs = [last.inputs[0]]
            self.net.prune_dead()
        self.name = self.net.inputs[0].name
        one, many = ({self.name: (n, *self.images.shape[1:])} for n in (1, batch))
        profiles = ((one, many, many),) if not self.net.inputs[0].type.static else ()
        self.config = BuildConfig(profiles=profiles, optimization_level=1, whole_engines=0, avg_timing=1, verify=False)
        self.made = prepare(self.net, self.config)
        self.floats = Runtime().load(build(self.net, self.config)).create_context().run
        self.ranges: dict[str, object] = {}
        self.notes: list[str] = []

    def samples(self):
        return ({self.name: self.images[i : i + 1]} for i in range(len(self.images)))

    def calibrated(self, method: str, steps: tuple[str, ...] = ()):
        from whet.builder.precision.calibration import Calibration, get_calibrated_ranges

        key = f"{method} {steps}"
        if key not in self.ranges:
            calibration = Calibration(samples=self.samples, method=method, steps=steps)
            self.ranges[key] = get_calibrated_ranges(self.net, self.made, calibration, self.config, self.notes.append)
        return self.ranges[key]

    def low(self, precision: str, method: str):
        """run(feeds) in this precision, and the additional fields of the row."""
        from whet.builder import build
        from whet.builder.precision.calibration import Calibration
        from whet.builder.precision.float8_ranges import ENOUGH_DB, calibrate_float8_ranges, find_sensitive_layers
        from whet.builder.verify.engine_values import EngineRun
        from whet.precision import emulate_network, find_quantization_sites, quantize
        from whet.precision.float8 import list_excluded_layers
        from whet.runtime import Runtime
        from whet.tactics import is_quantized

        start = time.perf_counter()
        if precision.startswith("int8"):
            ranges = self.calibrated(method, ("equalize", "smooth", "bias") if precision == "int8 steps" else ())
            seconds = time.perf_counter() - start
            plan = build(quantize(self.made, ranges), self.config)
            said = {"calibration_seconds": round(seconds, 1), "int8_layers": sum(map(is_quantized, plan.network.layers)), "by": "integer kernels"}
            if self.notes and precision == "int8 steps":
                said["steps"] = self.notes[-1]
            return Runtime().load(plan).create_context().run, said
        ranges, kind, only, dropped, notes = None, precision.split()[0], None, {}, []
        if kind == "fp8":
            calibration = Calibration(samples=self.samples, steps=("round",) if precision == "fp8 round" else ())
            enough_db = 0 if precision == "fp8 all" else ENOUGH_DB
            ranges = calibrate_float8_ranges(self.net, self.made, calibration, self.config, notes, enough_db=enough_db)
            dropped = list_excluded_layers(self.made)
            if precision != "fp8 all":
                dropped |= find_sensitive_layers(self.made, ranges, calibration, self.config, dropped)
            only = [x.name for x in find_quantization_sites(self.made).layers if x.name not in dropped]
        net = emulate_network(self.made, kind, ranges, only)
        said = {"calibration_seconds": round(time.perf_counter() - start, 1), "by": "emulation"}
        if kind == "fp8":
            sums = sorted(ranges.float_sums)
            said |= {"fp8_layers": len(only), "float_layers": dropped, "sums_in_floats": len(sums), "notes": notes}
        return EngineRun(net, [t.name for t in self.made.outputs]), said


def compare(floats: np.ndarray, low: np.ndarray, labels: np.ndarray) -> dict:
    """Accuracies in percent, their paired difference with a 95 % interval, and the SNR of the outputs in dB."""
    a, b = floats.argmax(1) == labels, low.argmax(1) == labels
    d = b.astype(float) - a.astype(float)
    half = 1.96 * d.std(ddof=1) / np.sqrt(len(d))
    noise = np.sum((low.astype(np.float64) - floats) ** 2)
    return {
        "images": len(labels),
        "fp32_percent": 100 * float(a.mean()),
        "low_percent": 100 * float(b.mean()),
        "difference_points": 100 * float(d.mean()),
        "interval_points": [100 * float(d.mean() - half), 100 * float(d.mean() + half)],
        "only_fp32_right": int((a & ~b).sum()),
        "only_low_right": int((b & ~a).sum()),
        "same_answer_percent": 100 * float((floats.argmax(1) == low.argmax(1)).mean()),
        "snr_db": float(10 * np.log10(np.sum(floats.astype(np.float64) ** 2) / noise)) if noise else None,
    }


def found_boxes(model: realdata.RealModel, outs: dict[str, np.ndarray]) -> np.ndarray:
    """A detector's detections in one image: [k, 6] class, score, corners in 0..1."""
    if not model.name.startswith(FACES):
        return detection.nanodet_boxes([(outs[s][0], outs[d][0]) for s, d in (("792", "795"), ("814", "817"), ("836", "839"))])
    scores, corners = outs["scores"][0][:, 1], outs["boxes"][0]
    near = np.flatnonzero(scores > 0.1)
    kept = near[detection.suppress(corners[near], scores[near], 0.4)]
    return np.column_stack([np.zeros(len(kept)), scores[kept], corners[kept]])


def measure_detector(ready: Prepared, precision: str, method: str) -> dict:
    """A detector's boxes on the photos outside calibration, by both engines, against each other and against labels if they exist."""
    run, said = ready.low(precision, method)
    feeds = list(ready.model.inputs(None))
    unseen = np.setdiff1d(np.arange(len(feeds)), calibrated_on(len(feeds)))
    boxes = [[found_boxes(ready.model, r(feeds[k])) for k in unseen] for r in (ready.floats, run)]
    faces = ready.model.name.startswith(FACES)
    sure = [b[b[:, 1] >= (FACE_SCORE if faces else SCORE)][:, [0, 2, 3, 4, 5]] for b in boxes[0]]
    agree = [detection.average_precision(boxes[1], sure, iou) for iou in np.arange(0.5, 0.96, 0.05)]
    row = {
        "model": ready.model.name, "precision": precision, "method": method, "calibration_images": len(ready.images), **said,
        "images": len(unseen), "fp32_boxes": int(sum(map(len, sure))), "map_against_fp32": agree[0],
        "map_50_95_against_fp32": float(np.mean(agree)), "within_bar": agree[0] >= BOXES_BAR,
    }  # fmt: skip
    if not faces:
        names = datasets.coco_names()
        labels = [datasets.coco_boxes(names[k]) for k in unseen]
        truth = [np.concatenate([b[:, :1], b[:, 1:3] - b[:, 3:] / 2, b[:, 1:3] + b[:, 3:] / 2], 1) for b in labels]
        row |= {f"{n}_ap50": detection.average_precision(b, truth) for n, b in zip(("fp32", "low"), boxes, strict=True)}
    return row


def answers(ready: Prepared, run, x: np.ndarray, batch: int) -> list[np.ndarray]:
    """Outputs of the FP32 engine and of `run`, [images, classes]."""
    size = batch if ready.model.dynamic_batch else 1
    outs = []
    for r in (ready.floats, run):
        parts = [next(iter(r({ready.name: np.ascontiguousarray(x[i : i + size])}).values())).copy() for i in range(0, len(x), size)]
        outs.append(np.concatenate(parts).reshape(len(x), -1))
    return outs


def jpeg_images(model: realdata.RealModel, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10's test images as JPEG, preprocessed as the model wants them, and labels."""
    from PIL import Image

    with np.load(datasets.path_of("cifar10/cifar10_jpeg60k.npz")) as f:
        raw, lengths, labels = f["test_jpeg"].tobytes(), f["test_len"].astype(np.int64), f["test_label"].astype(np.int64)
    ends = np.cumsum(lengths)
    chosen = datasets.spread(len(labels), limit)
    x = np.stack([np.asarray(Image.open(io.BytesIO(raw[ends[i] - lengths[i] : ends[i]])).convert("RGB")) for i in chosen])
    return (x.astype(np.float32).transpose(0, 3, 1, 2) if "mlperftiny" in model.name else datasets.imagenet_norm(x)), labels[chosen]


def measure(ready: Prepared, precision: str, limit: int | None, method: str, batch: int, jpeg: bool) -> dict:
    run, said = ready.low(precision, method)
    x, labels = judged(ready.model, limit)
    row = {"model": ready.model.name, "precision": precision, "method": method, "calibration_images": len(ready.images), **said,
           **compare(*answers(ready, run, x, batch), labels)}  # fmt: skip
    if jpeg and any(n in ready.model.name for n in ("cifar10", "mlperftiny")):
        x, labels = jpeg_images(ready.model, limit)
        row["jpeg"] = compare(*answers(ready, run, x, batch), labels)
    bar = BARS.get(precision.split()[0])
    row["bar_points"] = 0.0 if bar is None else bar
    # FP16 and BF16: a loss is significant if its whole interval is below zero.
    judged_on = [row, *([row["jpeg"]] if "jpeg" in row else [])]
    row["within_bar"] = all(r["interval_points"][1] >= 0 if bar is None else r["difference_points"] >= -bar - 1e-9 for r in judged_on)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--limit", type=int, help="images a model; all if absent")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--jpeg", action="store_true", help="the 10,000 JPEG test images of CIFAR-10 too")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if datasets.root() is None:
        parser.error("there is no shared data folder: set WHET_DATA to it")
    rows = []
    for model in realdata.models(args.models):
        detector = model.name == "nanodet_m" or model.name.startswith(FACES)
        ready = Prepared(model, 1 if detector else args.batch)
        for precision in args.precisions:
            start = time.perf_counter()
            if detector:
                row = measure_detector(ready, precision, args.method)
            else:
                row = measure(ready, precision, args.limit, args.method, args.batch, args.jpeg)
            row |= {"seconds": round(time.perf_counter() - start, 1), **describe_origin(provenance([]))}
            rows.append(row)
            tell(row)
            write(args.out, rows, args)
    return 0 if all(r["within_bar"] for r in rows) else 1


def tell(row: dict) -> None:
    """One line."""
    verdict = "" if row["within_bar"] else "  BEYOND THE BAR"
    if "map_against_fp32" in row:
        labels = f"  AP50 against labels FP32 {row['fp32_ap50']:.3f}, here {row['low_ap50']:.3f}" if "fp32_ap50" in row else ""
        print(f"{row['model']:20s} {row['precision']:10s} {row['images']:6d} images  boxes against FP32 boxes: mAP {row['map_against_fp32']:.3f} "
              f"(IoU 0.5 to 0.95: {row['map_50_95_against_fp32']:.3f}){labels}{verdict}", flush=True)  # fmt: skip
        return
    low, high = row["interval_points"]
    print(f"{row['model']:20s} {row['precision']:10s} {row['images']:6d} images  FP32 {row['fp32_percent']:6.2f} %  "
          f"here {row['low_percent']:6.2f} %  {row['difference_points']:+.2f} points [{low:+.2f}, {high:+.2f}]  "
          f"SNR {row['snr_db'] or np.inf:.1f} dB{verdict}", flush=True)  # fmt: skip


def write(path: Path, rows: list[dict], args) -> None:
    """The current table merged with the file's rows of other models and precisions; the file is replaced atomically.

    Several runs may add to one file at the same time: each reads and writes it under a lock.
    """
    from whet.backends import get_backend

    machine = get_backend("cpu").describe()
    own = {(r["model"], r["precision"]) for r in rows}
    with alone(path):
        kept = json.loads(path.read_text())["rows"] if path.exists() else []
        every = [*rows, *(r for r in kept if (r["model"], r["precision"]) not in own and r["precision"] in PRECISIONS)]
        every.sort(key=lambda r: (MODELS.index(r["model"]), PRECISIONS.index(r["precision"])))
        data = {
            "what": __doc__.splitlines()[0], "machine": machine.get("model"), **provenance(["numpy", "onnx"]), "limit": args.limit, "rows": every,
        }  # fmt: skip
        partial = path.with_suffix(f".{os.getpid()}.part")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
