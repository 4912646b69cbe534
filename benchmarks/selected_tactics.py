"""Which tactics engines select, and which tactics nothing selects: the evidence for keeping or deleting a tactic.

    python benchmarks/selected_tactics.py --backend cpu|cuda [--rows resnet50:8:fp16,...] [--jobs N] [--budget SECONDS]
    python benchmarks/selected_tactics.py --report cpu|cuda

A row is NETWORK:BATCH:PRECISION: a network of the zoo with random weights, or an ONNX file of the data folder (WHET_DATA), built at level 3 with
cold caches, without verification. A precision is fp32, fp16, bf16, int8, fp8, best, or one of them with `-sparse` (2:4 weights by magnitude). On a
GPU 8-bit types compete with FP16, with `-fp32` (as of `whet exec --int8` alone) with FP32. 8-bit types are calibrated on two random samples.
Each row is a process of its own; `--jobs` of them run at once, which makes the measurements coarser: a close race may
select another tactic than on an idle machine. Rows are added to benchmarks/results/<device>/selected_tactics.json; a row that exists is built
again only with `--again`. Without `--rows` the default rows of the backend are built.

The report lists for each tactic the rows that select it. For a tactic without rows it lists the samples of ops and fused layers that no other tactic
computes: that tactic is needed for coverage. What remains has no evidence.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

_ZOO = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "densenet121",
    "squeezenet1_1", "convnext_tiny", "swin_t", "vit_b_16", "bert_base", "unet", "yolov5s", "lenet5",
)  # fmt: skip
_DATA = (
    "cifar10/resnet20_cifar10", "cifar10/resnet8_mlperftiny", "coco_val128/nanodet_m", "coco_val128/vww_mobilenet025_96",
    "coco_val128/deeplabv3_mnv2_voc", "face/version-RFB-320", "face/version-slim-320", "imagenet_sample/mobilenetv2_backbone",
    "imagenet_sample/squeezenet1.1", "imagenet_sample/resnet50v2_stages1-3", "mnist/lenet_mnist", "mnist/vit_mnist",
)  # fmt: skip
_CONVOLUTIONAL = ("resnet18", "resnet34", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "squeezenet1_1", "yolov5s")
_DEFAULT = {
    "cpu": [
        *(f"{n}:1:{p}" for p in ("fp32", "int8") for n in _DATA),
        *(f"{n}:1:fp32" for n in _ZOO),
        *(f"{n}:1:int8" for n in _CONVOLUTIONAL),
        "vit_b_16:1:int8", "bert_base:1:int8", "resnet18:8:fp32", "resnet50:1:bf16", "mobilenet_v2:8:int8",
    ],
    "cuda": [
        *(f"{n}:1:fp16" for n in _ZOO),
        *(f"{n}:32:fp16" for n in _CONVOLUTIONAL),
        *(f"{n}:1:int8" for n in _CONVOLUTIONAL),
        *(f"{n}:1:fp32" for n in _CONVOLUTIONAL),
        *(f"{n}:1:fp16" for n in _DATA),
        *(f"{n}:1:int8" for n in _DATA),
        "resnet50:128:fp16", "resnet18:128:fp16", "yolov5s:8:fp16", "vit_b_16:32:fp16", "convnext_tiny:32:fp16", "bert_base:32:fp16",
        "resnet50:8:int8", "resnet50:1:fp8", "vit_b_16:1:fp8", "bert_base:1:bf16", "resnet50:32:fp16-sparse", "resnet50:8:int8-sparse",
        *(f"{n}:1:int8-fp32" for n in (*_CONVOLUTIONAL, *_DATA)),
        *(f"{n}:1:fp32" for n in ("vit_b_16", "bert_base", "swin_t", "convnext_tiny", "densenet121")),
        "bert_base:32:fp16-sparse", "unet:1:fp32", "unet:1:int8", "densenet121:1:int8", "resnext50_32x4d:1:int8",
    ],
}  # fmt: skip


_IN_PARTS = ("cuda/decomposed", "cpu/numpy_reference")  # compute every layer, part by part or by the reference


def load_model(name: str, batch: int) -> Any:
    """The ONNX model of a row: from the data folder if the name has a slash, else from the zoo."""
    import onnx

    from whet import zoo

    if "/" not in name:
        return zoo.build(name, batch=batch, **({"sequence": 128} if name == "bert_base" else {}))
    data = Path(os.environ.get("WHET_DATA") or HERE.parents[1] / "shared" / "data")
    return onnx.load(str(data / f"{name}.onnx"))


def count_tactics(name: str, batch: int, precision: str, backend: str) -> dict[str, Any]:
    """Builds the engine of a row; the number of layers per tactic, and the build's seconds."""
    import numpy as np
    import onnx

    import whet

    model = load_model(name, batch)
    constants = {t.name for t in model.graph.initializer}
    shapes, samples = {}, [{}, {}]
    rng = np.random.default_rng(0)
    for value in model.graph.input:
        if value.name in constants:
            continue
        tensor = value.type.tensor_type
        shape = tuple(d.dim_value or (batch if i == 0 else 128) for i, d in enumerate(tensor.shape.dim))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        shapes[value.name] = shape
        for sample in samples:
            if np.issubdtype(dtype, np.floating):
                sample[value.name] = (rng.standard_normal(shape) * 0.5).astype(dtype)
            else:
                sample[value.name] = rng.integers(0, 2, shape).astype(dtype)
    kind, *features = precision.split("-")
    options: dict[str, Any] = {"sparsity": "force"} if "sparse" in features else {}
    if kind in ("fp16", "bf16"):
        options[kind] = True
    elif kind in ("int8", "fp8", "best"):
        options |= {kind: samples, "fp16": backend == "cuda" and "fp32" not in features}
    if kind not in ("fp32", "fp16", "bf16", "int8", "fp8", "best") or set(features) - {"sparse", "fp32"}:
        raise SystemExit(f"unknown precision {precision!r}: fp32, fp16, bf16, int8, fp8, best, with or without -sparse and -fp32")
    begun = time.perf_counter()
    engine = whet.build(model.SerializeToString(), shapes=shapes, backend=backend, timing_cache="", verify=False, **options)
    chosen = Counter(c.tactic for c in engine.plan.choices.values())
    return {"build_s": round(time.perf_counter() - begun, 1), "tactics": dict(sorted(chosen.items()))}


def build_rows(rows: list[str], backend: str, path: Path, jobs: int, budget: float, limit: float, again: bool) -> None:
    """Builds rows in processes and adds each to the result file as it ends."""
    from _record import alone, describe_origin, provenance

    begun = time.perf_counter()

    def build_row(row: str) -> None:
        if time.perf_counter() - begun > budget:
            print("left out:", row, flush=True)
            return
        try:
            ended = subprocess.run(
                [sys.executable, __file__, "--one", row, "--backend", backend], capture_output=True, text=True, timeout=limit, check=False
            )
            found = [line[4:] for line in ended.stdout.splitlines() if line.startswith("ROW ")]
            result = json.loads(found[0]) if found else {"failed": ended.stderr.strip()[-400:]}
        except subprocess.TimeoutExpired:
            result = {"failed": f"stopped after {limit:.0f} s"}
        with alone(path):
            record = json.loads(path.read_text()) if path.exists() else {"rows": {}}
            made_by = provenance(("numpy",))
            record |= {key: made_by[key] for key in ("date", "commit", "command", "machine", "versions")}
            record["rows"][row] = {**describe_origin(made_by), **result}
            path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{time.perf_counter() - begun:6.0f} s  {row}: {result.get('failed') or str(len(result['tactics'])) + ' tactics'}", flush=True)

    done = set() if again or not path.exists() else {r for r, v in json.loads(path.read_text())["rows"].items() if "tactics" in v}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(build_row, [row for row in rows if row not in done]))


def list_coverage(backend: str) -> dict[str, list[str]]:
    """The samples of ops and fused layers that exactly one tactic computes on a device, by tactic.

    References, tactics that are used by name only, and those that run a fused layer in parts are not counted. CUDA tactics are asked without a GPU,
    for Hopper and for the GPUs before it.
    """
    import whet.composites  # noqa: F401  (their samples)
    from whet.backends import get_backend
    from whet.backends.cuda.compile_only import CompileOnlyGpu
    from whet.ops import OPS, sample_layer
    from whet.tactics import list_tactics

    devices: list[Any] = [CompileOnlyGpu("sm_90"), CompileOnlyGpu("sm_80")] if backend == "cuda" else [get_backend(backend)]
    counted = [t for t in list_tactics(backend) if not t.opt_in and t.name not in _IN_PARTS]
    only: dict[str, list[str]] = {}
    for op in sorted(OPS):
        for i, sample in enumerate(OPS[op].samples):
            _, layer, _ = sample_layer(op, sample)
            for device in devices:
                able = [t.name for t in counted if not t.why_not(layer) and any(not t.refuses(layer, s, device) for s in t.signatures(layer, device))]
                if len(able) == 1:
                    where = f" on {device.architecture}" if device is not devices[0] else ""
                    only.setdefault(able[0], []).append(f"{op}-{i}{where}")
    return only


def print_report(backend: str, path: Path) -> int:
    """One line per tactic; the number of tactics without evidence."""
    from whet.tactics import list_tactics

    rows = {row: v["tactics"] for row, v in json.loads(path.read_text())["rows"].items() if "tactics" in v}
    coverage, without = list_coverage(backend), 0
    by_name = {t.name for t in list_tactics(backend) if t.opt_in}
    print(f"{len(rows)} engines")
    for name in sorted(t.name for t in list_tactics(backend)):
        selecting = [row for row, tactics in rows.items() if name in tactics]
        if selecting:
            print(f"{name:36} {sum(rows[r][name] for r in selecting):5} layers of {len(selecting):3} engines: {', '.join(selecting[:3])}")
        elif name in coverage:
            print(f"{name:36} coverage: the only tactic for {len(coverage[name])} samples, such as {', '.join(coverage[name][:3])}")
        elif name in by_name or name in _IN_PARTS:
            print(f"{name:36} {'used by name only (--tacticSources, --allowFallback)' if name in by_name else 'computes every layer in parts'}")
        else:
            without += 1
            print(f"{name:36} NO EVIDENCE")
    return without


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--rows", default="", help="NETWORK:BATCH:PRECISION, separated by commas; default: the backend's list")
    p.add_argument("--jobs", type=int, default=1, help="builds at once")
    p.add_argument("--budget", type=float, default=1e9, help="no row begins after this many seconds")
    p.add_argument("--limit", type=float, default=600, help="seconds after which a row is stopped")
    p.add_argument("--again", action="store_true", help="build rows that the result file has already")
    p.add_argument("--out", type=Path, help="the result file; default: benchmarks/results/<device>/selected_tactics.json")
    p.add_argument("--report", choices=("cpu", "cuda"), help="print what the result file of a backend says")
    p.add_argument("--one", help=argparse.SUPPRESS)
    args = p.parse_args()
    backend = args.report or args.backend
    path = args.out or HERE / "results" / {"cpu": "cpu", "cuda": "h200"}[backend] / "selected_tactics.json"
    if args.one:
        name, batch, precision = args.one.rsplit(":", 2)
        print("ROW " + json.dumps(count_tactics(name, int(batch), precision, backend)), flush=True)
    elif args.report:
        print_report(backend, path)
    else:
        build_rows([r for r in args.rows.split(",") if r] or _DEFAULT[backend], backend, path, args.jobs, args.budget, args.limit, args.again)


if __name__ == "__main__":
    main()
