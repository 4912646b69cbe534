"""Accuracy of whet's engines on the real trained models and all their real data, compared with the scores in their README.

    python benchmarks/accuracy_real.py --batch 16                        # whet: builds, verifies and runs an engine per model
    python benchmarks/accuracy_real.py --predict onnxruntime             # the peer: the README's own scores
    python benchmarks/accuracy_real.py --predict mine:make --models lenet_mnist nanodet_m --limit 100

`--predict module:function` names a function that takes an ONNX path and the batch and returns predict(inputs) -> outputs, both
dictionaries from name to array. Needs the shared data folder (../shared/data or WHET_DATA). Exit 1 if a full run misses a stated score.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _record import provenance

from support import datasets, realdata


def whet_predict(path: Path, batch: int) -> realdata.Predict:
    """An engine for batches up to `batch` (static models unchanged), and its context's run()."""
    import whet

    net = whet.network_from_onnx(path)
    profiles = ()
    if any(not t.type.static for t in net.inputs):
        shapes = [{t.name: tuple(d if isinstance(d, int) else n for d in t.shape) for t in net.inputs} for n in (1, batch, batch)]
        profiles = (tuple(shapes),)
    plan = whet.builder.build(net, whet.BuildConfig(profiles=profiles, optimization_level=1, avg_timing=2))
    return whet.Runtime().load(plan).create_context().run


def table(make: Callable[[Path, int], realdata.Predict], models: list[realdata.RealModel], *, limit: int | None = None,
          batch: int = 1) -> list[dict]:
    """Prints one line per metric: measured, stated, verdict; returns them as flat records."""
    rows = []
    print(f"{'model':40s} {'metric':26s} {'samples':>7s} {'measured':>10s} {'stated':>10s}  {'':8s} {'s':>6s}")
    for model in models:
        start = time.perf_counter()
        found = realdata.evaluate(model, make(model.path, batch), limit=limit, batch=batch)
        seconds = time.perf_counter() - start
        samples = model.samples if limit is None else min(limit, model.samples)
        for metric in model.metrics:
            reached = abs(found[metric.name] - metric.stated) <= metric.tolerance
            verdict = ("as stated" if reached else "DIFFERS") if samples == model.samples else "sample"
            rows.append({"model": model.name, "metric": metric.name, "samples": samples, "measured": round(float(found[metric.name]), 5),
                         "stated": metric.stated, "verdict": verdict})  # fmt: skip
            print(f"{model.name:40s} {metric.name:26s} {samples:7d} {found[metric.name]:10.5g} {metric.stated:10.5g}  {verdict:8s} "
                  f"{seconds:6.1f}", flush=True)
    return rows


def main() -> int:
    """The command line; returns the exit code."""
    scored = [m.name for m in realdata.models() if m.metrics]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", default="whet", help="whet (default), onnxruntime, or module:function")
    parser.add_argument("--models", nargs="+", choices=scored, default=scored, metavar="NAME", help=", ".join(scored))
    parser.add_argument("--limit", type=int, help="samples a model, spread evenly; all if absent")
    parser.add_argument("--batch", type=int, default=1, help="samples run together where the model allows it")
    parser.add_argument("--out", help="also write the rows as a result file (JSON)")
    args = parser.parse_args()
    if datasets.root() is None:
        parser.error("there is no shared data folder: set WHET_DATA to it")
    make = {"whet": whet_predict, "onnxruntime": lambda path, _: realdata.onnxruntime_predict(path)}.get(args.predict)
    if make is None:
        module, _, function = args.predict.partition(":")
        make = getattr(import_module(module), function or "make")
    rows = table(make, realdata.models(args.models), limit=args.limit, batch=args.batch)
    if args.out:
        head = provenance(("whet", "numpy", "onnxruntime", "onednn-cpu-gomp"))
        Path(args.out).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 1 if any(r["verdict"] == "DIFFERS" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
