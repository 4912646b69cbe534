"""INT8 against FP32 on real trained models and all their labelled images, paired: what calibration costs in accuracy.

`python benchmarks/accuracy_int8.py [--models resnet20_cifar10 ...] [--limit N] [--out FILE]`

Every quantizable layer computes in INT8 (time does not choose here). Calibration sees images that are not judged: CIFAR-10's training
part, MNIST's training part, and for ImageNet and COCO the odd images, of which the even ones are judged. A row: accuracy of both, the
paired difference in points with its 95 % interval (from the images on which the two differ), and the SNR of the INT8 outputs in dB. Of
the detector: the mean average precision of the INT8 boxes with the FP32 boxes (score from 0.4 on) as the truth.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import datasets, detection, realdata

OUT = Path(__file__).parent / "results" / "cpu" / "accuracy_int8.json"
MODELS = ("resnet20_cifar10", "resnet56_cifar10", "resnet8_mlperftiny", "lenet_mnist", "vit_mnist", "squeezenet1.1", "nanodet_m")
CALIBRATION = 128
BAR = 0.5  # points that INT8 may lose
BOXES_BAR, SCORE = 0.95, 0.4


def calibration_images(model: realdata.RealModel, count: int) -> np.ndarray:
    """Images that are not judged, preprocessed as the model wants them: f32 [count, C, H, W]."""
    if "cifar10" in model.name or "mlperftiny" in model.name:
        x, _ = datasets.cifar10_train_lossless()
        x = x[datasets.spread(len(x), count)]
        return x.astype(np.float32).transpose(0, 3, 1, 2) if "mlperftiny" in model.name else datasets.imagenet_norm(x)
    if "mnist" in model.name:
        with np.load(datasets.path_of("mnist/mnist_20k_10k.npz")) as f:
            x = f["x_train"]
        x = x[datasets.spread(len(x), count)].astype(np.float32)[:, None] / 255
        return (x - np.float32(0.1307)) / np.float32(0.3081) if "vit" in model.name else x
    odd = [next(iter(f.values())) for k, f in enumerate(model.inputs(None)) if k % 2]
    return np.concatenate(odd[: min(count, len(odd))])


def judged(model: realdata.RealModel, limit: int | None):
    """(inputs, labels) that calibration has not seen, as arrays."""
    name = next(iter(next(iter(model.inputs(1)))))
    x = np.concatenate([f[name] for f in model.inputs(limit)])
    load = {"mnist": datasets.mnist_test, "cifar": datasets.cifar10_lossless, "mlper": datasets.cifar10_lossless}
    kind = next((k for k in load if k in model.name), None)
    labels = load[kind]()[1] if kind else datasets.imagenet_sample(None)[1]
    labels = labels[datasets.spread(len(labels), limit)]
    return (x, labels) if kind else (x[::2], labels[::2])


def engines(model: realdata.RealModel, images: np.ndarray, method: str, batch: int):
    """Contexts of the FP32 and the INT8 engine, with how many layers compute in integers."""
    from whet.builder import build
    from whet.builder.config import BuildConfig
    from whet.builder.quantized import Calibration, calibrated_ranges, prepared
    from whet.frontends import network_from_onnx
    from whet.precision import find_places, quantize
    from whet.runtime import Runtime
    from whet.tactics import is_quantized

    net = network_from_onnx(str(model.path))
    name = net.inputs[0].name
    one, many = ({name: (n, *images.shape[1:])} for n in (1, batch))
    dynamic = not net.inputs[0].type.static
    config = BuildConfig(profiles=((one, many, many),) if dynamic else (), optimization_level=1, whole_engines=0, avg_timing=1, verify=False)
    made = prepared(net, config)
    start = time.perf_counter()
    samples = Calibration(samples=lambda: ({name: images[i : i + 1]} for i in range(len(images))), method=method)
    ranges = calibrated_ranges(net, made, samples, config, print)
    seconds = time.perf_counter() - start
    plans = [build(net, config), build(quantize(made, ranges), config)]
    counts = sum(map(is_quantized, plans[1].network.layers)), len(find_places(made).layers)
    return [Runtime().load(p).create_context() for p in plans], counts, seconds


def compare(floats: np.ndarray, integers: np.ndarray, labels: np.ndarray) -> dict:
    """Accuracies in percent, their paired difference with a 95 % interval, and the SNR of the outputs in dB."""
    a, b = floats.argmax(1) == labels, integers.argmax(1) == labels
    d = b.astype(float) - a.astype(float)
    half = 1.96 * d.std(ddof=1) / np.sqrt(len(d))
    noise = np.sum((integers.astype(np.float64) - floats) ** 2)
    return {
        "images": len(labels),
        "fp32_percent": 100 * float(a.mean()),
        "int8_percent": 100 * float(b.mean()),
        "difference_points": 100 * float(d.mean()),
        "interval_points": [100 * float(d.mean() - half), 100 * float(d.mean() + half)],
        "only_fp32_right": int((a & ~b).sum()),
        "only_int8_right": int((b & ~a).sum()),
        "same_answer_percent": 100 * float((floats.argmax(1) == integers.argmax(1)).mean()),
        "snr_db": float(10 * np.log10(np.sum(floats.astype(np.float64) ** 2) / noise)) if noise else None,
    }


def measure_detector(model: realdata.RealModel, method: str) -> dict:
    """NanoDet's boxes on the even photos by both engines, against each other and against the labels."""
    images = calibration_images(model, CALIBRATION)
    contexts, counts, seconds = engines(model, images, method, 1)
    levels = (("792", "795"), ("814", "817"), ("836", "839"))
    boxes = []
    for context in contexts:
        outs = [{k: v.copy() for k, v in context.run(f).items()} for f in list(model.inputs(None))[::2]]
        boxes.append([detection.nanodet_boxes([(o[s][0], o[d][0]) for s, d in levels]) for o in outs])
    sure = [b[b[:, 1] >= SCORE][:, [0, 2, 3, 4, 5]] for b in boxes[0]]
    labels = [datasets.coco_boxes(n) for n in datasets.coco_names()[::2]]
    truth = [np.concatenate([b[:, :1], b[:, 1:3] - b[:, 3:] / 2, b[:, 1:3] + b[:, 3:] / 2], 1) for b in labels]
    agree = detection.average_precision(boxes[1], sure)
    return {
        "model": model.name, "method": method, "calibration_images": len(images), "calibration_seconds": round(seconds, 1),
        "int8_layers": counts[0], "quantizable_layers": counts[1], "images": len(labels), "fp32_boxes": int(sum(map(len, sure))),
        "map_against_fp32": agree, "fp32_ap50": detection.average_precision(boxes[0], truth),
        "int8_ap50": detection.average_precision(boxes[1], truth), "boxes_match": agree >= BOXES_BAR,
    }  # fmt: skip


def measure(model: realdata.RealModel, limit: int | None, method: str, batch: int = 8) -> dict:
    images = calibration_images(model, CALIBRATION)
    contexts, counts, seconds = engines(model, images, method, batch)
    x, labels = judged(model, limit)
    outs = []
    for context in contexts:
        name = context.input_names[0]
        size = batch if model.dynamic_batch else 1
        parts = [next(iter(context.run({name: np.ascontiguousarray(x[i : i + size])}).values())) for i in range(0, len(x), size)]
        outs.append(np.concatenate(parts).reshape(len(x), -1))
    row = {"model": model.name, "method": method, "calibration_images": len(images), "calibration_seconds": round(seconds, 1),
           "int8_layers": counts[0], "quantizable_layers": counts[1], **compare(outs[0], outs[1], labels)}  # fmt: skip
    row["loses_at_most_half_a_point"] = row["difference_points"] >= -BAR
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--limit", type=int, help="images a model; all if absent")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if datasets.root() is None:
        parser.error("there is no shared data folder: set WHET_DATA to it")
    rows = []
    for model in realdata.models(args.models):
        if model.name == "nanodet_m":
            rows.append(row := measure_detector(model, args.method))
            print(f"{row['model']:20s} {row['images']:6d} images  INT8 boxes against FP32 boxes: mAP {row['map_against_fp32']:.3f}  "
                  f"AP50 against labels FP32 {row['fp32_ap50']:.3f}, INT8 {row['int8_ap50']:.3f}", flush=True)  # fmt: skip
            write(args.out, rows, args)
            continue
        rows.append(row := measure(model, args.limit, args.method))
        low, high = row["interval_points"]
        print(f"{row['model']:20s} {row['images']:6d} images  FP32 {row['fp32_percent']:6.2f} %  INT8 {row['int8_percent']:6.2f} %  "
              f"{row['difference_points']:+.2f} points [{low:+.2f}, {high:+.2f}]  SNR {row['snr_db']:.1f} dB  "
              f"{row['int8_layers']} INT8 layers  calibration {row['calibration_seconds']:.0f} s", flush=True)  # fmt: skip
        write(args.out, rows, args)
    return 0 if all(r.get("loses_at_most_half_a_point", r.get("boxes_match")) for r in rows) else 1


def write(path: Path, rows: list[dict], args) -> None:
    """The table so far, with what the file holds of other models; the file appears whole."""
    from whet.backends import get_backend

    machine = get_backend("cpu").describe()
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    names = {r["model"] for r in rows}
    rows = sorted([*rows, *(r for r in kept if r["model"] not in names)], key=lambda r: MODELS.index(r["model"]))
    data = {"what": __doc__.splitlines()[0], "machine": machine.get("model"), "limit": args.limit, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
