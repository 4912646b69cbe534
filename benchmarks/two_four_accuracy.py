"""Accuracy of 2:4 weights on the CIFAR-10 ResNets: one-shot by several methods, and fine-tuned, in FP32 and in sparse FP16 and INT8 engines.

    python benchmarks/two_four_accuracy.py --data FOLDER [--backend cuda] [--models resnet20_cifar10] [--epochs N]    two_four_accuracy.json
    python benchmarks/two_four_accuracy.py --data FOLDER --choose --jpeg 20000 [--epochs N] --output FILE    the choices, without test images

FOLDER has cifar10/resnet20_cifar10.onnx, resnet56_cifar10.onnx and cifar10_lossless.npz (and for --jpeg cifar10_jpeg60k.npz). Masks are by magnitude,
and with 256 unlabelled training images by the methods of `whet prune --pattern=2:4 --calibData` (METHODS; other patterns in FP32 only).

Fine-tuning (whet.training) has fixed masks and distils the dense network on the 4,000 lossless training images and on --jpeg JPEG ones, without
labels; its hyperparameters are those of TRAINING, the same for all networks. `--choose` compares its starts (METHODS, each network) and the
candidates for TRAINING (CANDIDATES, ResNet-20 only, --epochs of training each) by the Kullback-Leibler divergence of the dense network's answers from
the sparse one's on training images that neither the masks nor the candidates were made with. The result is in `choice` of the file.

Accuracy is top-1 on the 1,000 lossless test images, and with --jpeg also on the 10,000 test images as JPEG (`jpeg`). `low` and `high` bound it with
95 % confidence (Wilson's interval), `difference_points` is the difference from the dense network on the same images, in points, with its paired 95 %
interval. Engines are built by `--backend`; on CUDA those in FP16 and INT8 have no dense convolution tactics, so that every layer with 2:4 weights
runs sparse (`sparse_layers`). A run resumes: rows in the file are kept, and processes with different --models may share the file.
"""

from __future__ import annotations

import argparse
import io
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
from _record import alone, describe_origin, provenance

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.precision.calibration import Calibration
from whet.builder.precision.int8 import build_int8
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network
from whet.pruning import apply_pattern
from whet.runtime import Runtime
from whet.sparsity import list_eligible_layers, parse_pattern
from whet.sparsity.report import is_sparse, list_sparse_layers
from whet.tactics import list_tactics

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
    "distill": 1.0, "augment": "crop:4,flip,cutmix:50", "masks": "2:4", "batch_norms": "keep",
}  # fmt: skip
#: The start of fine-tuning: the method with the smallest divergence of `--choose`.
START = {"resnet20_cifar10": "permutation, data, least squares", "resnet56_cifar10": "permutation, data, least squares"}
#: Changes of TRAINING that `--choose` compares on TUNED_ON; `lossless`: without JPEG images.
CANDIDATES: dict[str, dict[str, Any]] = {
    "adamw 5e-4, lossless images only": {"batch_norms": "insert", "lossless": True},
    "adamw 5e-4": {"batch_norms": "insert"},
    "adamw 5e-4, no inserted batch norms": {},
    "adamw 2e-3": {"batch_norms": "insert", "lr": 2e-3},
    "adamw 2e-3, no cutmix": {"batch_norms": "insert", "lr": 2e-3, "augment": "crop:4,flip"},
    "sgd 2e-2": {"batch_norms": "insert", "optimizer": "sgd", "lr": 2e-2},
    "sgd 5e-3": {"batch_norms": "insert", "optimizer": "sgd", "lr": 5e-3},
}
TUNED_ON, HELD = "resnet20_cifar10", 500  # lossless images held out of `--choose`, and four times as many JPEG ones


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
    if backend == "cuda" and precision != "fp32" and list_eligible_layers(net)[0]:
        dense = [t.name for t in list_tactics("cuda") if {"Conv", "Gemm", "MatMul"} & {*t.ops} and not is_sparse(t.name, ()) and not t.fallback]
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


def decode_jpegs(path: Path, part: str, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8 [N, 32, 32, 3]) and labels of `part` (train or test) of cifar10_jpeg60k.npz, shuffled by a fixed seed: it is sorted by class."""
    from PIL import Image

    with np.load(path) as data:
        raw, lengths, labels = data[f"{part}_jpeg"], data[f"{part}_len"].astype(np.int64), data[f"{part}_label"].astype(np.int64)
    ends = np.cumsum(lengths)
    some = np.random.RandomState(0).permutation(len(labels))[:limit]
    images = [np.asarray(Image.open(io.BytesIO(raw[ends[i] - lengths[i] : ends[i]].tobytes())).convert("RGB")) for i in some]
    return np.stack(images), labels[some]


class Table:
    """Rows of the result, written after each."""

    def __init__(self, path: Path, images: Images, more: Images | None, backend: str, calibration: np.ndarray) -> None:
        self.path, self.images, self.more, self.backend, self.calibration = path, images, more, backend, calibration
        self._dense: dict[str, tuple[np.ndarray, np.ndarray | None, dict[str, int]]] = {}

    def missing(self, case: dict[str, Any]) -> bool:
        """True if the file has no row of this case."""
        return not any(case.items() <= row.items() for row in read(self.path)["rows"])

    def judge(self, net: Network, precision: str) -> tuple[np.ndarray, np.ndarray | None, dict[str, int]]:
        """Correctness per lossless and per JPEG image, and the number of layers by sparse tactic."""
        parts = [self.images] if self.more is None else [self.images, self.more]
        both = Images(np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts]))
        right, sparse = hits(net, both, self.backend, precision, self.calibration)
        return right[: len(self.images.y)], None if self.more is None else right[len(self.images.y) :], sparse

    def add(self, case: dict[str, Any], dense: Network, net: Network, precisions: list[str], **more: Any) -> None:
        """Builds an engine of `net` per precision and adds its row. `case` identifies the row; `dense` is the network to compare with."""
        for precision in precisions:
            if not self.missing({**case, "precision": precision}):
                continue
            if case["model"] not in self._dense:
                self._dense[case["model"]] = self.judge(dense, "fp32")
            base = self._dense[case["model"]]
            right, jpeg, sparse = base if net is dense and precision == "fp32" else self.judge(net, precision)
            row = {**case, "precision": precision, **scores(right, base[0]), "sparse_layers": sum(sparse.values()), "sparse_tactics": sparse, **more}
            if jpeg is not None and base[1] is not None:
                row["jpeg"] = scores(jpeg, base[1])
            stamp = provenance(["numpy"])
            machine = str(get_backend(self.backend).describe().get("model", self.backend))
            row |= {**describe_origin(stamp), "machine": machine}
            print(row, flush=True)
            with alone(self.path):
                found = read(self.path)
                write(self.path, {**stamp, "machine": machine, **{k: v for k, v in found.items() if k not in stamp}, "rows": [*found["rows"], row]})


def scores(right: np.ndarray, dense: np.ndarray) -> dict[str, Any]:
    """Accuracy and the difference from the dense network, each with its interval."""
    low, high = wilson(int(right.sum()), len(right))
    difference = [round(v, 2) for v in paired(dense, right)]
    return {
        "accuracy": round(100 * float(right.mean()), 2), "low": round(low, 2), "high": round(high, 2),
        "difference_points": difference[0], "difference_interval": difference[1:],
    }  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """The result file, or an empty one. Each row carries the date and commit of its run."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    about = {k: found[k] for k in ("date", "commit") if k in found}
    return {**found, "rows": [{**about, **row} for row in found["rows"]]}


def write(path: Path, data: dict[str, Any]) -> None:
    """Replaces the result file."""
    made = path.with_suffix(".new")
    made.write_text(json.dumps(data, indent=1) + "\n")
    made.replace(path)


def sparse_network(net: Network, how: str, pattern: str, calibration: np.ndarray) -> tuple[Network, dict[str, float]]:
    """The network with `pattern` by a method of METHODS; the removed share and the seconds."""
    options, begun = METHODS[how], time.perf_counter()
    feeds = {net.inputs[0].name: calibration} if options.get("data") else None
    done = apply_pattern(net, parse_pattern(pattern, 0.5), feeds, **{k: v for k, v in options.items() if k != "data"})
    removed = sum(done.removed.values()) / len(done.removed)
    return done.network, {"removed": round(removed, 3), "seconds": round(time.perf_counter() - begun, 1)}


def start_network(net: Network, how: str, calibration: np.ndarray, folder: Path | None, model: str) -> Network:
    """The 2:4 network by a method of METHODS that training starts from; kept in `folder` if given (the search of a permutation has a time limit)."""
    kept = None if folder is None else folder / f"{model}_start.onnx"
    if kept is not None and kept.exists():
        return network_from_onnx(kept)
    made, _ = sparse_network(net, how, "2:4", calibration)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_onnx(made, kept)
    return made


def tuned(net: Network, teacher: Network, images: np.ndarray, epochs: float, seconds: float = 0.0, **changes: Any) -> tuple[Network, float, int]:
    """The network fine-tuned with its 2:4 masks by distillation on uint8 images, the seconds and the steps."""
    from whet.training import FinetuneConfig, TrainingData, finetune

    data = TrainingData({net.inputs[0].name: normalized(images)})
    done = finetune(net, data, FinetuneConfig(epochs=epochs, seconds=seconds, **{**TRAINING, **changes}), teacher=teacher)
    return done.network, done.seconds, done.steps


def divergence(teacher: Network, net: Network, images: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of the teacher's answers from the network's, in 0.001 nats."""
    import torch

    parts = []
    with torch.no_grad():
        one, other = (n.to_torch().eval() for n in (teacher, net))
        for i in range(0, len(images), BATCH):
            x = torch.from_numpy(normalized(images[i : i + BATCH]))
            p, q = (torch.log_softmax(m(x), 1) for m in (one, other))
            parts.append((p.exp() * (p - q)).sum(1))
    return round(1000 * float(torch.cat(parts).mean()), 3)


def choose(
    models: dict[str, Network], calibration: np.ndarray, lossless: np.ndarray, jpeg: np.ndarray, epochs: float, output: Path, starts: Path | None
) -> None:
    """Compares starts and candidates on training images (see the module's text) and writes `choice`."""
    held, training, held_jpeg, jpeg = lossless[-HELD:], lossless[:-HELD], jpeg[-HELD * 4 :], jpeg[: -HELD * 4]
    choice: dict[str, Any] = read(output).get("choice", {"start": {}, "training": {}})

    def errors(teacher: Network, net: Network) -> dict[str, float]:
        return {"lossless": divergence(teacher, net, held), "jpeg": divergence(teacher, net, held_jpeg)}

    def keep(part: str, name: str, metrics: dict[str, float]) -> None:
        choice[part][name] = metrics
        print(name, metrics, flush=True)
        write(output, {**provenance(["numpy", "torch"]), **{k: v for k, v in read(output).items() if k in ("rows", "machine")}, "choice": choice})

    def best(model: str) -> str:
        return min(METHODS, key=lambda how: sum(choice["start"][f"{model}: {how}"].values()))

    for model, net in models.items():
        for how in METHODS:
            if f"{model}: {how}" not in choice["start"]:
                keep("start", f"{model}: {how}", errors(net, sparse_network(net, how, "2:4", calibration)[0]))
        start_network(net, best(model), calibration, starts, model)
    if not epochs:
        return
    net = models[TUNED_ON]
    start = start_network(net, best(TUNED_ON), calibration, starts, TUNED_ON)
    for name, candidate in CANDIDATES.items():
        if name not in choice["training"]:
            changes = dict(candidate)
            images = training if changes.pop("lossless", False) else np.concatenate([training, jpeg])
            passes = epochs * (len(training) + len(jpeg)) / len(images)  # the same number of steps
            done, seconds, steps = tuned(start, net, images, passes, **changes)
            keep("training", name, {**errors(net, done), "steps": steps, "seconds": round(seconds, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--models", default="resnet20_cifar10,resnet56_cifar10")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--patterns", default="2:4", help="as 2:4,1:4,2:8")
    parser.add_argument("--precisions", help="of fp32, fp16, int8 (cuda: all, cpu: fp32 and int8)")
    parser.add_argument("--epochs", type=float, default=0.0, help="of fine-tuning (0: none)")
    parser.add_argument("--seconds", type=float, default=0.0, help="time limit of one fine-tuning, which its schedule is fitted to (0: none)")
    parser.add_argument("--limit", type=float, default=1e9, help="no engine of one-shot weights is built after so many seconds")
    parser.add_argument("--jpeg", type=int, default=0, help="JPEG training images to fine-tune with; also tests on the JPEG test images")
    parser.add_argument("--choose", action="store_true", help="compare starts and hyperparameters on training images")
    parser.add_argument("--starts", type=Path, help="folder of the networks that fine-tuning starts from")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="images for masks and calibration")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--save", type=Path, help="folder for the fine-tuned models")
    given = parser.parse_args()
    began = time.monotonic()
    output = given.output or RESULTS / ("h100" if given.backend == "cuda" else given.backend) / "two_four_accuracy.json"
    precisions = given.precisions.split(",") if given.precisions else ["fp32", "fp16", "int8"] if given.backend == "cuda" else ["fp32", "int8"]
    data = np.load(given.data / "cifar10" / "cifar10_lossless.npz")
    training = data["x_train"]
    calibration = normalized(training[:: len(training) // given.samples][: given.samples])
    jpegs = given.data / "cifar10" / "cifar10_jpeg60k.npz"
    jpeg = decode_jpegs(jpegs, "train", given.jpeg)[0] if given.jpeg else training[:0]
    models = {m: network_from_onnx(given.data / "cifar10" / f"{m}.onnx") for m in given.models.split(",")}
    if given.choose:
        return choose(models, calibration, training, jpeg, given.epochs, output, given.starts)
    more = None
    if given.jpeg:
        x, y = decode_jpegs(jpegs, "test")
        more = Images(normalized(x), y)
    table = Table(output, Images(normalized(data["x_test"]), data["y_test"].reshape(-1)), more, given.backend, calibration)
    for model, net in models.items():
        if given.epochs:
            start = START[model]
            case = {"model": model, "pattern": "2:4", "how": "fine-tuned", "epochs": given.epochs, "start": start}
            case |= {"jpeg_images": len(jpeg), "training": TRAINING}
            if any(table.missing({**case, "precision": p}) for p in precisions):
                sparse = start_network(net, start, calibration, given.starts, model)
                sparse, seconds, steps = tuned(sparse, net, np.concatenate([training, jpeg]), given.epochs, given.seconds)
                table.add(case, net, sparse, precisions, seconds=round(seconds, 1), steps=steps)
                if given.save:
                    given.save.mkdir(parents=True, exist_ok=True)
                    save_onnx(sparse, given.save / f"{model}_2of4.onnx")
        table.add({"model": model, "pattern": "dense", "how": "dense"}, net, net, precisions)
        for pattern in (*(p for p in given.patterns.split(",") if p != "2:4"), "2:4"):
            for how in METHODS:
                if pattern != "2:4" and "permute_seconds" in METHODS[how]:
                    continue
                case = {"model": model, "pattern": pattern, "how": how}
                kinds = precisions if pattern == "2:4" else ["fp32"]
                if any(table.missing({**case, "precision": p}) for p in kinds) and time.monotonic() - began < given.limit:
                    sparse, about = sparse_network(net, how, pattern, calibration)
                    table.add(case, net, sparse, kinds, **about)


if __name__ == "__main__":
    main()
