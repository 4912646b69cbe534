"""Accuracy of one-shot pruning with default options: a FLOP target, recovery on 128 unlabelled images, top-1 on 1,000 test images (CIFAR-10: the
lossless ones; MNIST: a random selection).

    python benchmarks/pruning_defaults.py --data FOLDER --out benchmarks/results/cpu/pruning_defaults.json
        [--models resnet56 resnet20 vit_mnist lenet_mnist] [--importance auto l1 fpgm taylor2 random --depth auto on off]
        [--hidden off on] [--workers N] [--target flops | latency --table FILE]

A row has the accuracy as cut (`top1_cut`) and after recovery without labels (`top1`), and the share of up to 3,000 other images, neither tested nor
calibrated with, that the recovered network classifies as the whole one does (`agreement`). `--hidden on` also cuts the residual width of a
transformer. `error_reconstruction` and `error_weighted_reconstruction` are the changes of the outputs on held-out images by which the default
selects one of the two (`importance`). `--target latency`: the shares are of the measured latency on one CPU thread (`latency`: that of the built
engine), with a latency table that later calls use again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from _record import provenance

from whet.builder import BuildConfig
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network
from whet.pruning import PruneConfig, Target, prune

IMAGES = 128
TESTED = 1000
AGREED = 3000
DEPTH: dict[str, bool | None] = {"auto": None, "on": True, "off": False}


def normalized(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] to float32 [N, 3, H, W] in the networks' normalization."""
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return np.ascontiguousarray(((images / 255 - mean) / deviation).transpose(0, 3, 1, 2), np.float32)


def load(data: Path, model: str) -> tuple[Network, np.ndarray, np.ndarray, np.ndarray]:
    """The network, test inputs and labels, and inputs to calibrate with."""
    if model.endswith("_mnist"):
        arrays = np.load(data / "mnist" / "mnist_20k_10k.npz")
        some = np.random.default_rng(0).choice(len(arrays["x_test"]), TESTED, replace=False)
        tested, pool = (a[:, None].astype(np.float32) / 255 for a in (arrays["x_test"][some], arrays["x_train"]))
        if model == "vit_mnist":
            tested, pool = ((a - np.float32(0.1307)) / np.float32(0.3081) for a in (tested, pool))
        return network_from_onnx(data / "mnist" / f"{model}.onnx"), tested, arrays["y_test"][some], pool
    arrays = np.load(data / "cifar10" / "cifar10_lossless.npz")
    net = network_from_onnx(data / "cifar10" / f"{model}_cifar10.onnx")
    return net, normalized(arrays["x_test"]), arrays["y_test"], normalized(arrays["x_train"])


def top1(net, images: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy in percent by ONNX Runtime."""
    return float(100 * np.mean(find_classes(net, images) == labels))


def find_classes(net: Network, images: np.ndarray) -> np.ndarray:
    """The most probable class of each image, by ONNX Runtime."""
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        path = save_onnx(net, Path(folder) / "pruned.onnx")
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        logits = session.run(None, {net.inputs[0].name: images})[0]
    return logits.argmax(1)


def measure(case: tuple) -> dict:
    """The row of one cut."""
    data, model, share, seed, multiple, importance, depth, hidden, kind, table = case
    net, images, labels, pool = load(data, model)
    some = np.random.default_rng(seed).choice(len(pool), IMAGES, replace=False)
    config = PruneConfig(target=Target(kind, ratio=share), importance=importance, multiple=multiple, seed=seed, depth=DEPTH[depth],
                         hidden=hidden, table=table, build=BuildConfig(threads=1))  # fmt: skip
    others = pool[np.setdiff1d(np.arange(len(pool)), some)[:AGREED]]
    start = time.perf_counter()
    pruned = prune(net, config, {net.inputs[0].name: pool[some]})
    seconds = round(time.perf_counter() - start, 1)
    before, after = pruned.report.flops or (1, 1)
    floor = pruned.report.floor
    errors = {} if floor is None else {"output_error": round(floor.chosen, 4), "uniform_error": round(floor.uniform, 4),
                                       **{f"error_{kind}": round(e, 4) for kind, e in floor.by_importance.items()}}  # fmt: skip
    times = pruned.report.engine_ms
    latency = {} if times is None else {"latency": round(times[1] / times[0], 4), "ms": [round(t, 4) for t in times]}
    return {"model": model, "target": share, "seed": seed, **latency, "multiple": multiple, "flops": round(after / before, 4),
            "parameters": round(pruned.report.params[1] / pruned.report.params[0], 4), "hidden": hidden,
            "importance": pruned.recipe.about["importance"], "depth": depth, "branches_removed": len(pruned.recipe.removed), **errors,
            "top1_whole": round(top1(net, images, labels), 2), "top1_cut": round(top1(pruned.cut, images, labels), 2),
            "top1": round(top1(pruned.network, images, labels), 2),
            "agreement": round(top1(pruned.network, others, find_classes(net, others)), 2), "seconds": seconds}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/ and mnist/")
    parser.add_argument("--models", nargs="+", default=["resnet56"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.4], help="of the target to keep")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one calibration set each")
    parser.add_argument("--multiple", type=int, help="kept channels are a multiple of this (default: that of prune)")
    parser.add_argument("--importance", nargs="+", default=["auto"])
    parser.add_argument("--depth", nargs="+", default=["auto"], choices=list(DEPTH), help="removal of residual branches")
    parser.add_argument("--hidden", nargs="+", default=["off"], choices=["off", "on"], help="cut the residual width through norms")
    parser.add_argument("--target", default="flops", choices=["flops", "latency"], help="what the shares are of")
    parser.add_argument("--table", help="with latencies: latency table to use and extend")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [
        (args.data, model, share, seed, args.multiple, importance, depth, hidden == "on", args.target, args.table)
        for model in args.models for share in args.shares for importance in args.importance for depth in args.depth
        for hidden in args.hidden for seed in args.seeds
    ]  # fmt: skip
    rows = []
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as workers:
        for row in workers.map(measure, cases):
            rows.append(row)
            print(row, flush=True)
            if args.out:
                args.out.write_text(json.dumps({**provenance(("whet", "numpy", "onnxruntime")), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
