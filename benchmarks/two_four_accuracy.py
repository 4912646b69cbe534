"""Accuracy of one-shot sparsity patterns on the CIFAR-10 ResNets, without fine-tuning and without labels.

    python benchmarks/two_four_accuracy.py --data FOLDER     results/cpu/two_four_accuracy.json

FOLDER has cifar10/resnet20_cifar10.onnx, resnet56_cifar10.onnx and cifar10_lossless.npz. Patterns are applied by magnitude, and with 256 unlabelled
training images by the energy of the inputs with a least-squares update of the kept weights (`whet prune --pattern`, with --calibData). Accuracy is
top-1 on the 1000 test images in FP32, computed by the reference; `low` and `high` bound it with 95 % confidence (Wilson's interval).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from _record import provenance

from whet.frontends import network_from_onnx
from whet.network import Network
from whet.ops import run_network
from whet.pruning import apply_pattern
from whet.sparsity import parse_pattern

RESULT = Path(__file__).parent / "results" / "cpu" / "two_four_accuracy.json"
MEAN, STD = np.array([0.4914, 0.4822, 0.4465], np.float32), np.array([0.2470, 0.2435, 0.2616], np.float32)
SAMPLES, BATCH = 256, 250


def normalized(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] as the networks' input, float32 [N, 3, H, W]."""
    return np.ascontiguousarray(((images.astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2))


def correct(net: Network, images: np.ndarray, labels: np.ndarray) -> int:
    """Number of images whose largest output is their label."""
    name = net.inputs[0].name
    return sum(
        int((next(iter(run_network(net, {name: images[i : i + BATCH]}).values())).argmax(1) == labels[i : i + BATCH]).sum())
        for i in range(0, len(images), BATCH)
    )


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion, in per cent."""
    p = hits / count
    middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return 100 * (middle - half) / (1 + z * z / count), 100 * (middle + half) / (1 + z * z / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--patterns", default="2:4,1:4,2:8")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    data = np.load(given.data / "cifar10" / "cifar10_lossless.npz")
    images, labels = normalized(data["x_test"]), data["y_test"].reshape(-1)
    training = data["x_train"]
    calibration = normalized(training[:: len(training) // SAMPLES][:SAMPLES])
    rows: list[dict[str, Any]] = []

    def add(model: str, pattern: str, how: str, net: Network, seconds: float, removed: float) -> None:
        hits = correct(net, images, labels)
        low, high = wilson(hits, len(images))
        accuracy = 100 * hits / len(images)
        dense = next((r["accuracy"] for r in rows if r["model"] == model and r["pattern"] == "dense"), accuracy)
        rows.append({"model": model, "pattern": pattern, "how": how, "accuracy": round(accuracy, 2), "low": round(low, 2), "high": round(high, 2),
                     "difference_points": round(accuracy - dense, 2), "removed": round(removed, 3), "seconds": round(seconds, 1)})  # fmt: skip
        print(rows[-1], flush=True)

    for model in ("resnet20_cifar10", "resnet56_cifar10"):
        net = network_from_onnx(given.data / "cifar10" / f"{model}.onnx")
        add(model, "dense", "", net, 0.0, 0.0)
        for text in given.patterns.split(","):
            for how, feeds in (("magnitude", None), ("data, least squares", {net.inputs[0].name: calibration})):
                begun = time.perf_counter()
                done = apply_pattern(net, parse_pattern(text, 0.5), feeds)
                removed = sum(done.removed.values()) / len(done.removed)
                add(model, text, how, done.network, time.perf_counter() - begun, removed)
    given.output.write_text(json.dumps({**provenance(["numpy"]), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
