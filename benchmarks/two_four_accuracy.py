"""Accuracy of 2:4 weights on the CIFAR-10 ResNets: one-shot by several methods, and fine-tuned, in FP32 and in sparse FP16 and INT8 engines.

    python benchmarks/two_four_accuracy.py --data FOLDER [--backend cuda] [--models resnet20_cifar10] [--epochs N]    two_four_accuracy.json

FOLDER has cifar10/resnet20_cifar10.onnx, resnet56_cifar10.onnx and cifar10_lossless.npz. Masks are by magnitude, and with 256 unlabelled training
images by the methods of `whet prune --pattern=2:4 --calibData` (METHODS; other patterns in FP32 only). Fine-tuning (whet.training) starts from the
last method's weights with fixed masks and distils the dense network on the 4000 training images, without labels; its hyperparameters are those of
TRAINING, the same for all networks.

Accuracy is top-1 on the 1000 test images. `low` and `high` bound it with 95 % confidence (Wilson's interval), `difference_points` is the
difference from the dense network on the same images, in points, with its paired 95 % interval. Engines are built by `--backend`; on CUDA those in
FP16 and INT8 have no dense convolution tactics, so that every layer with 2:4 weights runs sparse (`sparse_layers`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from _record import provenance

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.precision.calibration import Calibration
from whet.builder.precision.int8 import build_int8
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network
from whet.pruning import apply_pattern
from whet.runtime import Runtime
from whet.sparsity import eligible_layers, parse_pattern
from whet.sparsity.report import is_sparse, list_sparse_layers
from whet.tactics import tactics_of

RESULTS = Path(__file__).parent / "results"
MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
SAMPLES, BATCH = 256, 250
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {},
    "data, least squares": {"data": True},
    "permutation, data, least squares": {"data": True, "permute_seconds": 30.0},
}
TRAINING: dict[str, Any] = {
    "optimizer": "adamw", "lr": 5e-4, "clip": 1.0, "batch": 128, "weight_decay": 1e-4,
    "distill": 1.0, "augment": "crop:4,flip,cutmix:50", "masks": "2:4",
}  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Test images [N, 3, 32, 32] float32 and labels [N]."""

    x: np.ndarray
    y: np.ndarray


def normalized(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] as the networks' input, float32 [N, 3, H, W]."""
    return np.ascontiguousarray(((images.astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2))


def hits(net: Network, images: Images, backend: str, precision: str, calibration: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
    """True for each correctly classified image, and the number of layers by sparse tactic."""
    name = net.inputs[0].name
    shapes = {name: (BATCH, *images.x.shape[1:])}
    sources: tuple[str, ...] = ("-TF32",) if backend == "cuda" else ()
    if backend == "cuda" and precision != "fp32" and eligible_layers(net)[0]:
        dense = [t.name for t in tactics_of("cuda") if {"Conv", "Gemm", "MatMul"} & {*t.ops} and not is_sparse(t.name, ()) and not t.fallback]
        sources = tuple(f"-{n}" for n in dense)
    precisions = () if precision == "fp32" else (precision,)
    quick: dict[str, Any] = {"optimization_level": 1, "timing_cache": "", "verify": backend != "cuda"}  # the selection does not affect accuracy
    profiles = ((shapes,) * 3,)
    config = BuildConfig(backend=backend, precisions=precisions, profiles=profiles, sparsity="enable", tactic_sources=sources, **quick)
    if precision == "int8":
        config = replace(config, precision_constraints="prefer", layer_precisions=(("*", "int8"),))
    if precision == "int8":
        plan = build_int8(net, config, Calibration(samples=lambda: [{name: calibration[i : i + 1]} for i in range(min(64, len(calibration)))]))
    else:
        plan = build(net, config)
    with Runtime(backend).load(plan) as engine, engine.create_context() as context:
        found = [next(iter(context.run({name: images.x[i : i + BATCH]}).values())).argmax(1) for i in range(0, len(images.x), BATCH)]
    picked = Counter(plan.choices[n].tactic for n in list_sparse_layers(plan))
    return np.concatenate(found) == images.y, dict(picked)


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion, in per cent."""
    p = right / count
    middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return 100 * (middle - half) / (1 + z * z / count), 100 * (middle + half) / (1 + z * z / count)


def paired(dense: np.ndarray, other: np.ndarray, z: float = 1.96) -> tuple[float, float, float]:
    """The difference of two accuracies on the same images with its 95 % interval, in points."""
    count, gained, lost = len(dense), int((~dense & other).sum()), int((dense & ~other).sum())
    mean = (gained - lost) / count
    half = z * math.sqrt(max(gained + lost - count * mean * mean, 0.0)) / count
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


class Table:
    """Rows of the result, written after each."""

    def __init__(self, path: Path, images: Images, backend: str, calibration: np.ndarray) -> None:
        self.path, self.images, self.backend, self.calibration = path, images, backend, calibration
        self.rows: list[dict[str, Any]] = []
        self._dense: dict[str, np.ndarray] = {}

    def add(self, model: str, how: str, net: Network, precisions: list[str], *, pattern: str = "2:4", **more: Any) -> None:
        """Builds an engine per precision and adds its row; the first network of a model is the dense one."""
        for precision in precisions:
            right, sparse = hits(net, self.images, self.backend, precision, self.calibration)
            low, high = wilson(int(right.sum()), len(right))
            difference = [round(v, 2) for v in paired(self._dense.setdefault(model, right), right)]
            row = {
                "model": model, "pattern": pattern, "how": how, "precision": precision,
                "accuracy": round(100 * float(right.mean()), 2), "low": round(low, 2), "high": round(high, 2),
                "difference_points": difference[0], "difference_interval": difference[1:], "sparse_layers": sum(sparse.values()),
                "sparse_tactics": sparse,
            }  # fmt: skip
            self.rows.append(row | more)
            print(self.rows[-1], flush=True)
            machine = str(get_backend(self.backend).describe().get("model", self.backend))
            self.path.write_text(json.dumps({**provenance(["numpy"]), "machine": machine, "rows": self.rows}, indent=1) + "\n")


def tuned(net: Network, teacher: Network, images: np.ndarray, epochs: float) -> tuple[Network, float]:
    """The network fine-tuned with its 2:4 masks by distillation on uint8 images, and the seconds."""
    from whet.training import FinetuneConfig, TrainingData, finetune

    data = TrainingData({net.inputs[0].name: normalized(images)})
    done = finetune(net, data, FinetuneConfig(epochs=epochs, **TRAINING), teacher=teacher)
    return done.network, done.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--models", default="resnet20_cifar10,resnet56_cifar10")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--patterns", default="2:4", help="as 2:4,1:4,2:8")
    parser.add_argument("--precisions", help="of fp32, fp16, int8 (cuda: all, cpu: fp32 and int8)")
    parser.add_argument("--epochs", type=float, default=0.0, help="of fine-tuning (0: none)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="images for masks and calibration")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--save", type=Path, help="folder for the fine-tuned models")
    given = parser.parse_args()
    output = given.output or RESULTS / ("h100" if given.backend == "cuda" else given.backend) / "two_four_accuracy.json"
    precisions = given.precisions.split(",") if given.precisions else ["fp32", "fp16", "int8"] if given.backend == "cuda" else ["fp32", "int8"]
    data = np.load(given.data / "cifar10" / "cifar10_lossless.npz")
    training = data["x_train"]
    calibration = normalized(training[:: len(training) // given.samples][: given.samples])
    table = Table(output, Images(normalized(data["x_test"]), data["y_test"].reshape(-1)), given.backend, calibration)
    for model in given.models.split(","):
        net = network_from_onnx(given.data / "cifar10" / f"{model}.onnx")
        table.add(model, "dense", net, precisions, pattern="dense")
        sparse = net
        for pattern in (*(p for p in given.patterns.split(",") if p != "2:4"), "2:4"):
            for how, options in METHODS.items():
                if pattern != "2:4" and "permute_seconds" in options:
                    continue
                begun = time.perf_counter()
                feeds = {net.inputs[0].name: calibration} if options.get("data") else None
                done = apply_pattern(net, parse_pattern(pattern, 0.5), feeds, **{k: v for k, v in options.items() if k != "data"})
                sparse, seconds = done.network, time.perf_counter() - begun
                removed = sum(done.removed.values()) / len(done.removed)
                kinds = precisions if pattern == "2:4" else ["fp32"]
                table.add(model, how, sparse, kinds, pattern=pattern, removed=round(removed, 3), seconds=round(seconds, 1))
        if given.epochs:
            sparse, seconds = tuned(sparse, net, training, given.epochs)
            table.add(model, "fine-tuned", sparse, precisions, seconds=round(seconds, 1), epochs=given.epochs)
            if given.save:
                given.save.mkdir(parents=True, exist_ok=True)
                save_onnx(sparse, given.save / f"{model}_2of4.onnx")


if __name__ == "__main__":
    main()
