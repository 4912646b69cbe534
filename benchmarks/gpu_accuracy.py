"""INT8, FP8, FP16 and BF16 engines on a GPU against FP32 ones: the trained CIFAR-10 ResNets on all labelled images, paired.

    python benchmarks/gpu_accuracy.py prepare FOLDER                          models and their ranges, on the CPU; needs the shared data
    python benchmarks/gpu_accuracy.py run FOLDER LOSSLESS.npz JPEG.npz [PRECISION ...]   on a GPU: $OUT/accuracy.json
    python benchmarks/gpu_accuracy.py add FILE ...                            adds runs to results/h200/accuracy.json

Every eligible layer computes in the low precision (independent of time), on real kernels without emulation. FP32 is whet's engine on the CPU
that prepared FOLDER (NAME-fp32.npz), so that GPU time is spent on the evaluated engines. Ranges come from 128 training images by calibration on
the CPU (automatic method). Evaluated are the 1000 pixel-exact test images and the 10,000 test images as JPEG, on which these networks lose
10 points in every precision; FOLDER may contain some of the models. A row: accuracies, the paired difference in points with its 95 % interval,
the SNR of the logits in dB. FP8 (e4m3) is as --fp8 builds it: first and last layers in FP16, biases corrected, sums of skip connections and
sensitive layers in FP16 if the outputs lacked decibels (NAME-fp8-left.json). Bars: INT8 loses at most 0.5 points, FP8 0.3; for FP16 and BF16 the
interval shows no loss.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _record import alone, provenance
from accuracy_precision import BARS, CALIBRATION, calibration_images, compare

from support import datasets
from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.precision.float8_ranges import calibrate_float8_ranges, find_sensitive_layers, insert_float8
from whet.builder.precision.int8 import Calibration, get_calibrated_ranges
from whet.builder.precision.int8 import prepare as prepare_network
from whet.builder.precision.permissions import is_float8
from whet.frontends.onnx import network_from_onnx
from whet.network import Network
from whet.precision import quantize, write_cache
from whet.precision.float8 import list_excluded_layers
from whet.runtime import Runtime
from whet.tactics import is_quantized

MODELS = ("resnet20_cifar10", "resnet56_cifar10", "resnet8_mlperftiny")
PRECISIONS = ("int8", "fp8", "fp16", "bf16")
BATCH = 200  # divides both sets
RESULT = Path(__file__).parent / "results" / "h200" / "accuracy.json"


def network(path: Path) -> Network:
    """The model without its final softmax, so that logits are compared."""
    net = network_from_onnx(str(path))
    last = net.outputs[0].maker
    if last is not None and last.op == "Softmax":
        net.outputs = [last.inputs[0]]
        net.prune_dead()
    return net


def prepare(folder: Path) -> None:
    """FOLDER/NAME.onnx, its ranges, the layers excluded from FP8 and the FP32 outputs, for each model."""
    from support import realdata

    judged = sets(*(datasets.path_of(f"cifar10/cifar10_{kind}.npz") for kind in ("lossless", "jpeg60k")))
    for model in realdata.models(MODELS):
        path = folder / f"{model.name}.onnx"
        shutil.copyfile(model.path, path)
        net, images = network(path), calibration_images(model, CALIBRATION)
        samples = [{net.inputs[0].name: images[i : i + 1]} for i in range(len(images))]
        calibration = Calibration(samples=lambda samples=samples: iter(samples), cache=str(folder / f"{model.name}-int8.json"))
        ranges = get_calibrated_ranges(net, prepare_network(net, BuildConfig()), calibration, BuildConfig(), print)
        prepared = prepare_network(net, BuildConfig())
        plain, said = Calibration(samples=calibration.samples), []
        float8 = calibrate_float8_ranges(net, prepared, plain, BuildConfig(), said, said)
        left = find_sensitive_layers(prepared, float8, plain, BuildConfig(), list_excluded_layers(prepared))
        write_cache(str(folder / f"{model.name}-fp8.json"), float8)
        (folder / f"{model.name}-fp8-left.json").write_text(json.dumps(left, indent=1))
        shape = {net.inputs[0].name: (BATCH, *net.inputs[0].shape[1:])}
        run = Runtime().load(build(net, BuildConfig(profiles=((shape, shape, shape),)))).create_context().run
        np.savez(folder / f"{model.name}-fp32.npz", **{k: logits(run, net.inputs[0].name, fed(model.name, x)) for k, (x, _) in judged.items()})
        print(model.name, len(ranges.tensors), "ranges,", len(float8.corrections), "corrections for FP8", *said, *left.items(), sep="\n  ")


def sets(lossless: Path, jpeg: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(uint8 images [n, 32, 32, 3], labels) by kind."""
    from PIL import Image

    with np.load(lossless) as f:
        exact = f["x_test"], f["y_test"].astype(np.int64)
    with np.load(jpeg) as f:
        raw, ends, labels = f["test_jpeg"].tobytes(), np.cumsum(f["test_len"].astype(np.int64)), f["test_label"].astype(np.int64)
    starts = [0, *ends[:-1]]
    images = [np.asarray(Image.open(io.BytesIO(raw[a:b])).convert("RGB")) for a, b in zip(starts, ends, strict=True)]
    return {"1000 lossless": exact, "10000 JPEG": (np.stack(images), labels)}


def engines(net: Network, folder: Path, name: str, precisions: tuple[str, ...]) -> dict[str, tuple]:
    """For each precision run(images) -> logits, and the engine's fields of the row."""
    shape = {net.inputs[0].name: (BATCH, *net.inputs[0].shape[1:])}
    times = str(folder / "times.sqlite")
    config = BuildConfig(backend="cuda", profiles=((shape, shape, shape),), tactic_sources=("-TF32",), timing_cache=times)
    prepared = prepare_network(net, config)
    ranges = get_calibrated_ranges(net, prepared, Calibration(cache=str(folder / f"{name}-int8.json")), config, print)
    results = {}
    for precision in precisions:
        begun = time.perf_counter()
        if precision == "int8":
            plan = build(quantize(prepared, ranges), replace(config, precisions=("int8",)))
        elif precision == "fp8":
            float8 = get_calibrated_ranges(net, prepared, Calibration(cache=str(folder / f"{name}-fp8.json")), config, print)
            left = json.loads((folder / f"{name}-fp8-left.json").read_text())
            plan = build(insert_float8(prepared, float8, left), replace(config, precisions=("fp16", "fp8")))
        else:
            plan = build(net, replace(config, precisions=(precision,), layer_precisions=(("*", precision),), precision_constraints="prefer"))
        kinds: dict[str, int] = {}
        for x in plan.network.layers:
            kind = "fp8" if is_float8(x) else "int8" if is_quantized(x) else plan.choices[x.name].outputs[0][1]
            kinds[kind] = kinds.get(kind, 0) + 1
        checked = plan.report.verification
        said = {"layers": kinds, "network_error": checked.network_error, "network_bound": checked.network_bound}
        results[precision] = Runtime("cuda").load(plan).create_context().run, said | {"build_s": round(time.perf_counter() - begun, 1)}
    return results


def fed(model: str, images: np.ndarray) -> np.ndarray:
    """uint8 images [n, 32, 32, 3], preprocessed for a model."""
    return images.astype(np.float32).transpose(0, 3, 1, 2) if "mlperf" in model else datasets.imagenet_norm(images)


def logits(run, name: str, x: np.ndarray) -> np.ndarray:
    """[n, 10] of images [n, ...]."""
    parts = [next(iter(run({name: np.ascontiguousarray(x[i : i + BATCH])}).values())).copy() for i in range(0, len(x), BATCH)]
    return np.concatenate(parts).reshape(len(x), -1)


def measure(folder: Path, lossless: Path, jpeg: Path, *precisions: str) -> list[dict]:
    """All rows; the file is written after each model."""
    rows: list[dict] = []
    wanted = precisions or PRECISIONS
    judged = sets(lossless, jpeg)
    for name in (n for n in MODELS if (folder / f"{n}.onnx").exists()):
        net = network(folder / f"{name}.onnx")
        floats = np.load(folder / f"{name}-fp32.npz")
        with tempfile.TemporaryDirectory() as times:
            for file in folder.glob(f"{name}*"):
                shutil.copy(file, times)
            made = engines(net, Path(times), name, wanted)
        for kind, (images, labels) in judged.items():
            outs = {p: logits(run, net.inputs[0].name, fed(name, images)) for p, (run, _) in made.items()}
            for precision in wanted:
                bar, r = BARS.get(precision), compare(floats[kind], outs[precision], labels)
                within = r["interval_points"][1] >= 0 if bar is None else r["difference_points"] >= -bar
                said = {"bar_points": bar or 0.0, "within_bar": within, **made[precision][1]}
                rows.append({"model": name, "set": kind, "precision": precision, **r, **said})
                low, high = r["interval_points"]
                print(f"{name:20s} {kind:14s} {precision}: FP32 {r['fp32_percent']:.2f} %, here {r['low_percent']:.2f} %, "
                      f"{r['difference_points']:+.2f} [{low:+.2f}, {high:+.2f}], {r['snr_db']:.1f} dB {said}", flush=True)  # fmt: skip
        data = {"what": __doc__.splitlines()[0], **provenance(["numpy"]), "machine": get_backend("cuda").describe(), "rows": rows}
        (Path(os.environ.get("OUT", ".")) / "accuracy.json").write_text(json.dumps(data, indent=1) + "\n")
    return rows


def add(files: list[Path]) -> None:
    """Adds the runs of `files` to those of RESULT, by date; existing runs are not changed."""
    with alone(RESULT):
        runs = {run["date"]: run for run in json.loads(RESULT.read_text())}
        for run in (json.loads(f.read_text()) for f in files):
            runs.setdefault(run["date"], run)
        RESULT.write_text(json.dumps([runs[date] for date in sorted(runs)], indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    elif len(sys.argv) >= 3 and sys.argv[1] == "add":
        add([Path(f) for f in sys.argv[2:]])
    elif len(sys.argv) >= 5 and sys.argv[1] == "run":
        sys.exit(0 if all(r["within_bar"] for r in measure(*map(Path, sys.argv[2:5]), *sys.argv[5:])) else 1)
    else:
        sys.exit(__doc__)
