"""Accuracy of the real trained models on all their real data, with any predict function in the model's place.

    python benchmarks/accuracy_real.py                                   # ONNX Runtime: the README's own numbers
    python benchmarks/accuracy_real.py --predict mine:make --models lenet_mnist nanodet_m --limit 100

`--predict module:function` names a function that takes an ONNX path and returns predict(inputs) -> outputs, both
dictionaries from name to array. Needs the shared data folder (../shared/data or WHET_DATA). Exit 1 if a full run misses a stated number.
"""

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import datasets, realdata


def table(make: Callable[[Path], realdata.Predict], models: list[realdata.RealModel], *, limit: int | None = None,
          batch: int = 1) -> bool:
    """Prints one line a metric: measured, stated, verdict. True if none was missed (a sample is never judged)."""
    print(f"{'model':40s} {'metric':26s} {'samples':>7s} {'measured':>10s} {'stated':>10s}  {'':8s} {'s':>6s}")
    fine = True
    for model in models:
        start = time.perf_counter()
        found = realdata.evaluate(model, make(model.path), limit=limit, batch=batch)
        seconds = time.perf_counter() - start
        samples = model.samples if limit is None else min(limit, model.samples)
        for metric in model.metrics:
            reached = abs(found[metric.name] - metric.stated) <= metric.tolerance
            verdict = ("as stated" if reached else "DIFFERS") if samples == model.samples else "sample"
            fine &= verdict != "DIFFERS"
            print(f"{model.name:40s} {metric.name:26s} {samples:7d} {found[metric.name]:10.5g} {metric.stated:10.5g}  {verdict:8s} "
                  f"{seconds:6.1f}", flush=True)
    return fine


def main() -> int:
    """The command line; returns the exit code."""
    scored = [m.name for m in realdata.models() if m.metrics]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", help="module:function; ONNX Runtime if absent")
    parser.add_argument("--models", nargs="+", choices=scored, default=scored, metavar="NAME", help=", ".join(scored))
    parser.add_argument("--limit", type=int, help="samples a model, spread evenly; all if absent")
    parser.add_argument("--batch", type=int, default=1, help="samples run together where the model allows it")
    args = parser.parse_args()
    if datasets.root() is None:
        parser.error("there is no shared data folder: set WHET_DATA to it")
    make = realdata.onnxruntime_predict
    if args.predict:
        module, _, function = args.predict.partition(":")
        make = getattr(import_module(module), function or "make")
    return 0 if table(make, realdata.models(args.models), limit=args.limit, batch=args.batch) else 1


if __name__ == "__main__":
    sys.exit(main())
