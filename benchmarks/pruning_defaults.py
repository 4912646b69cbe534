"""Accuracy of one-shot pruning with default options: a FLOP target, recovery on 128 unlabelled CIFAR-10 images, top-1 on the 1,000 lossless
test images.

    python benchmarks/pruning_defaults.py --data FOLDER --out benchmarks/results/cpu/pruning_defaults.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from _record import provenance

from whet.frontends import network_from_onnx, save_onnx
from whet.pruning import PruneConfig, Target, prune

IMAGES = 128


def normalized(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] to float32 [N, 3, H, W] in the networks' normalization."""
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return np.ascontiguousarray(((images / 255 - mean) / deviation).transpose(0, 3, 1, 2), np.float32)


def top1(net, images: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy in percent by ONNX Runtime."""
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        path = save_onnx(net, Path(folder) / "pruned.onnx")
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        logits = session.run(None, {net.inputs[0].name: images})[0]
    return float(100 * np.mean(logits.argmax(1) == labels))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--models", nargs="+", default=["resnet56"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.4], help="FLOPs to keep")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one calibration set each")
    parser.add_argument("--multiple", type=int, help="kept channels are a multiple of this (default: that of prune)")
    parser.add_argument("--importance", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    arrays = np.load(args.data / "cifar10" / "cifar10_lossless.npz")
    images, labels, pool = normalized(arrays["x_test"]), arrays["y_test"], arrays["x_train"]
    rows = []
    for model in args.models:
        net = network_from_onnx(args.data / "cifar10" / f"{model}_cifar10.onnx")
        for share in args.shares:
            for seed in args.seeds:
                some = np.random.default_rng(seed).choice(len(pool), IMAGES, replace=False)
                config = PruneConfig(target=Target("flops", ratio=share), importance=args.importance, multiple=args.multiple)
                start = time.perf_counter()
                pruned = prune(net, config, {net.inputs[0].name: normalized(pool[some])})
                seconds = round(time.perf_counter() - start, 1)
                before, after = pruned.report.flops or (1, 1)
                rows.append({"model": model, "target": share, "seed": seed, "multiple": args.multiple, "flops": round(after / before, 4),
                             "importance": pruned.recipe.about["importance"], "branches_removed": len(pruned.recipe.removed),
                             "top1": round(top1(pruned.network, images, labels), 2), "seconds": seconds})  # fmt: skip
                print(rows[-1], flush=True)
                if args.out:
                    args.out.write_text(json.dumps({**provenance(("whet", "numpy", "onnxruntime")), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
