"""ResNet-56 on CIFAR-10: prune, fine-tune, build in FP32 and INT8, measure, and print a table of all steps.

    python examples/resnet56/run.py --data DIR                    # all steps; fine-tuning takes minutes on a GPU, a day on two cores
    python examples/resnet56/run.py --data DIR --steps prune,tune --device cuda --seconds 180    # on the machine with the GPU
    python examples/resnet56/run.py --data DIR --steps build,time,judge,table    # on the target machine

The published weights and the images come from examples/fetch.py or a local folder. Every step writes files to --out, which later steps
read. Networks fine-tuned for this repository are in tuned/, so `--steps build,time,judge,table` works without a GPU.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from importlib.util import find_spec
from pathlib import Path

import needs
import tune

STEPS = ("prune", "tune", "build", "time", "judge", "table")


def main() -> None:
    """Runs the requested steps."""
    p = tune.parser()
    p.add_argument("--steps", default=",".join(STEPS), help=f"of {', '.join(STEPS)}")
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="what the engines are for")
    p.add_argument("--precisions", nargs="*", help="precisions of the engines (default: fp32 int8; on a GPU also fp16)")
    p.add_argument("--batches", nargs="*", type=int, help="batch sizes, one engine for each (default: 1; on a GPU also 128)")
    p.add_argument("--no-dynamic", action="store_true", help="do not build engines for all batches from 1 to 8")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of the engines")
    p.add_argument("--no-published", action="store_true", help="omit the published network (its weights are an extra file)")
    p.add_argument("--save", default="", help="folder for the results as JSON (resnet56.json)")
    args = p.parse_args()
    out, data = Path(args.out), Path(args.data)
    from variants import VARIANTS

    args.variants = args.variants or list(VARIANTS)
    steps = args.steps.split(",")
    if unknown := set(steps) - set(STEPS):
        p.error(f"unknown step {', '.join(sorted(unknown))}; the steps are {', '.join(STEPS)}")
    if said := needs.lacking(steps, data, not args.no_published):
        raise SystemExit(f"error: {said}")
    out.mkdir(parents=True, exist_ok=True)
    if "prune" in steps:
        prune(out, data)
    if "tune" in steps:
        tune.tune_all(out, data, args)
    if {"build", "time", "judge", "table"} & set(steps):
        import telling

        import measure

        if "build" in steps:
            measure.build_all(out, data, args)
        if "time" in steps:
            measure.timed(out, args)
        if "judge" in steps:
            measure.judged(out, data, args)
        if "table" in steps:
            telling.print_table(out, args)


def prune(out: Path, data: Path) -> None:
    """Writes every variant before fine-tuning; those of Torch-Pruning if that library is installed."""
    import model
    from variants import VARIANTS

    from whet.frontends import save_onnx
    from whet.pruning import count_flops, count_params

    net = model.load(data)
    for name, variant in VARIANTS.items():
        if variant.after:
            continue  # it continues from a fine-tuned variant
        if variant.make is not None:
            made = variant.make(net)
        elif find_spec("torch_pruning") and find_spec("onnxscript"):
            import rival

            made = rival.pruned(data, name)
        else:
            print(f"{name}: skipped; pip install torch-pruning onnxscript")
            continue
        save_onnx(made, out / f"{tune.file_of(name)}.onnx")
        print(f"{name}: {variant.about}; parameters {count_params(made):,}, FLOPs {count_flops(made) / 1e6:.1f} M "
              f"({count_flops(net) / count_flops(made):.2f} times fewer)")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped. Finished results are in --out; the same command trains only what is missing.", file=sys.stderr)
        sys.exit(130)
