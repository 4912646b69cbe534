"""Fine-tunes networks in parallel on all GPUs, one process each, all with the same recipe and number of epochs.

First the published network is adapted to the JPEG images by their labels; it is the teacher. Then every variant, including the original,
is trained on labels and on the teacher's outputs. Then the variants in variants.LONG are trained longer, by two of the networks trained
before (teachers.py), and finally those in variants.MORE continue from there. The number of epochs that fit into the time limit is measured while
all of them run. Variants and teachers with a result in out/ are not trained again, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

TEMPERATURE = 4.0
TEACHER_SHARE = 0.12  # of the time limit
PIXELS = "pixels"


def settings(args: argparse.Namespace, lr: float, **more):
    """The common recipe."""
    from whet.training import FinetuneConfig

    return FinetuneConfig(**{
        "batch": args.batch, "lr": lr * args.batch / 256, "weight_decay": 5e-4, "augment": "crop:4,flip",
        "precision": args.precision, "device": args.device, "seed": 1, "graph": None if args.graph else False,
        "compile": args.compile, **more,
    })  # fmt: skip


def tune_all(out: Path, data: Path, args: argparse.Namespace) -> dict[str, dict]:
    """Trains out/NAME.onnx into out/NAME.tuned.onnx; returns the record of each process."""
    import data as cifar
    import teachers
    from variants import LONG, MORE, SHORT, VARIANTS

    until = time.time() + args.seconds
    every = [n for n in args.variants if VARIANTS[n].after or start_of(n, out).exists()]
    names = [n for n in every if not (out / f"{file_of(n)}.json").exists()]
    for f in (*out.glob("*.speed"), *out.glob("*.ready")):
        f.unlink()
    if names and not (out / PIXELS / "exact.y.npy").exists():  # the last file that `decoded` writes
        cifar.decoded(data, out / PIXELS, args.limit or None)
    epochs = {SHORT: args.epochs, LONG: args.long_epochs, MORE: args.more_epochs}
    parts = [(how, some) for how in epochs if (some := [n for n in names if VARIANTS[n].training is how])]
    for i, (how, some) in enumerate(parts):
        if how.teacher == "teachers":
            teachers.write(out)
        began = time.time()
        end = began + (until - began) / (len(parts) - i) if args.seconds else 0.0
        _run(some, out, data, args, epochs[how], (began, end))
    return {n: json.loads(p.read_text()) for n in ("teacher", *every) if (p := out / f"{file_of(n)}.json").exists()}


def file_of(name: str) -> str:
    """The file name of a variant."""
    return name.replace("+", "_").replace(":", "-")


def start_of(name: str, out: Path) -> Path:
    """The network with which a variant's training begins: the cut one, or one trained before."""
    from variants import VARIANTS

    if name == "teacher":
        return out / "original.onnx"
    before = VARIANTS[name].after
    return out / (f"{file_of(before)}.tuned.onnx" if before else f"{file_of(name)}.onnx")


def visible_gpus(device: str) -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES for one process each: every visible GPU, or one empty string without any."""
    import torch

    count = torch.cuda.device_count() if device != "cpu" else 0
    named = [w for w in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if w]
    return named[:count] if len(named) >= count > 0 else [str(i) for i in range(count)] or [""]


def _training(name: str):
    """The training settings of a variant; the teacher has the default ones."""
    from variants import SHORT, VARIANTS

    return VARIANTS[name].training if name in VARIANTS else SHORT


def spread(names: list[str], out: Path, gpus: list[str]) -> dict[str, str]:
    """Assigns variants to GPUs: the costliest first, each to the least loaded GPU. The step time of a small network is proportional to its
    number of layers, so layers are counted."""
    import whet

    cost = {n: len(whet.network_from_onnx(start_of(n, out)).layers) for n in names}
    busy, made = dict.fromkeys(gpus, 0.0), {}
    for n in sorted(names, key=lambda n: -cost[n]):
        made[n] = min(busy, key=busy.__getitem__)
        busy[made[n]] += cost[n]
    return made


def _run(names: list[str], out: Path, data: Path, args: argparse.Namespace, epochs: float, time_of: tuple[float, float]) -> None:
    """Trains the teacher, if needed and missing, and all variants at once; the variants load their data and wait for the teacher."""
    from variants import SHORT

    command = [sys.executable, str(Path(__file__)), "--out", str(out), "--data", str(data), "--device", args.device, "--precision", args.precision,
               "--epochs", str(epochs), "--teacher-epochs", str(args.teacher_epochs), "--limit", str(args.limit),
               "--batch", str(args.batch), "--probe", str(args.probe), "--mantissa", str(args.mantissa),
               *([] if args.graph else ["--no-graph"]), *(["--compile"] if args.compile else []),
               "--began", str(time_of[0]), "--end", str(time_of[1]), "--beside", *names]  # fmt: skip
    gpus = visible_gpus(args.device)
    place = spread(names, out, gpus) | {"teacher": gpus[0]}
    print(f"{len(gpus)} GPUs: {place}" if gpus[0] else "no GPU: on the CPU", flush=True)
    todo = names if _training(names[0]) is not SHORT or (out / "teacher.json").exists() else ["teacher", *names]
    running = {}
    for n in todo:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | ({"CUDA_VISIBLE_DEVICES": place[n]} if place[n] else {})
        running[n] = subprocess.Popen([*command, "--one", n], env=env)
    while running:
        time.sleep(0.1)
        for name, process in list(running.items()):
            if process.poll() == 0:
                del running[name]
            elif process.poll() is not None:
                for other in running.values():
                    other.kill()
                raise SystemExit(f"fine-tuning of {name} failed with code {process.returncode}; see its message above")


def train_network(args: argparse.Namespace) -> None:
    """One process: reads its network, writes the trained one and a line of JSON."""
    import data as cifar
    import torch
    from variants import SHORT, VARIANTS

    import whet
    from whet.frontends import save_onnx
    from whet.training import accuracy, finetune

    torch.backends.cudnn.benchmark = True  # sizes are constant
    name, out, how = args.one, Path(args.out), _training(args.one)
    train, exact, jpeg = (cifar.read_decoded(out / PIXELS, part) for part in ("train", "exact", "jpeg"))
    teaching = name == "teacher"
    net = whet.network_from_onnx(start_of(name, out))
    while not teaching and how is SHORT and not (out / "teacher.json").exists():
        time.sleep(0.1)
    teacher = None if teaching else whet.network_from_onnx(out / f"{how.teacher}.tuned.onnx")
    if teaching:
        total = args.end - args.began if args.end else 0.0
        config = settings(args, how.lr, epochs=args.teacher_epochs, seconds=TEACHER_SHARE * total)
    else:
        each = {"lr": how.lr, "distill": how.distill, "temperature": TEMPERATURE, "masks": VARIANTS[name].masks}
        each |= {"views": how.views, "augment": how.augment}
        epochs = args.epochs
        if args.end and args.probe:
            epochs = min(epochs, _epochs_that_fit(net, train, teacher, settings(args, epochs=1e6, **each), args))
        config = settings(args, epochs=epochs, seconds=max(args.end - time.time(), 1.0) if args.end else 0.0, **each)
    done = finetune(net, train, config, teacher=teacher, progress=_tell(name))
    made = _rounded(done.network, args.mantissa)
    save_onnx(made, out / f"{file_of(name)}.tuned.onnx")
    module = made.to_torch().to("cuda" if args.device == "cuda" else "cpu")
    line = {
        "name": name, "epochs": round(done.steps * config.batch / len(train), 2), "steps": done.steps, "seconds": round(done.seconds, 1),
        "exact_test": accuracy(module, exact), "jpeg_test": accuracy(module, jpeg), "history": done.history, "held": done.masked_weights,
        "settings": {k: v for k, v in config.settings().items() if v}, "images": len(train), "jpeg_test_images": len(jpeg),
    }  # fmt: skip
    written = out / f"{file_of(name)}.part"
    written.write_text(json.dumps(line, indent=1) + "\n")
    written.rename(out / f"{file_of(name)}.json")
    shown = f"{line['epochs']} epochs in {line['seconds']} s, exact {line['exact_test']:.4f}, jpeg {line['jpeg_test']:.4f}"
    print(f"{name}: {shown}", flush=True)


def _rounded(net, bits: int):
    """The network to write, with a shorter mantissa if requested; this network is scored."""
    if not bits:
        return net
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _smaller import rounded

    return rounded(net, bits)


def _epochs_that_fit(net, train, teacher, config, args: argparse.Namespace) -> float:
    """Whole epochs that the slowest process can finish in time; every process computes the same number."""
    from whet.training import finetune

    stamps: list[float] = []

    class Enough(Exception):
        """Raised when enough steps were timed."""

    def progress(done: int, total: int, stage: str) -> None:
        stamps.append(time.time())
        if done >= 2 * args.probe:
            raise Enough

    try:
        finetune(net, train, config, teacher=teacher, progress=progress)
    except Enough:
        pass
    a_step = (stamps[-1] - stamps[len(stamps) // 2 - 1]) / (20 * (len(stamps) - len(stamps) // 2))  # progress is reported every 20 steps
    out = Path(args.out)
    mine = out / f"{file_of(args.one)}.speed"
    mine.with_suffix(".part").write_text(str(a_step * (len(train) // config.batch)))
    mine.with_suffix(".part").rename(mine)
    others = [out / f"{file_of(n)}.speed" for n in args.beside]
    while not all(f.exists() for f in others):
        time.sleep(0.2)
    ready = out / f"{file_of(args.one)}.ready"
    ready.write_text(str(time.time()))
    readies = [out / f"{file_of(n)}.ready" for n in args.beside]
    while not all(f.exists() and f.read_text() for f in readies):
        time.sleep(0.05)
    start = max(float(f.read_text()) for f in readies)
    slowest = max(float(f.read_text()) for f in others)
    return max(float(int((args.end - start - 8) / slowest)), 1.0)


def _tell(name: str):
    last = [0.0]

    def progress(done: int, total: int, stage: str) -> None:
        if time.time() - last[0] > 10:
            last[0] = time.time()
            print(f"  {name}: step {done} of {total}, {stage}", flush=True)

    return progress


def parser() -> argparse.ArgumentParser:
    """Options of run.py and of the processes."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", default=".resnet56", help="output folder")
    p.add_argument("--data", default=os.environ.get("WHET_DATA", "data"), help="folder that contains cifar10/ (see examples/fetch.py)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--precision", default="bf16", help="type of autocast: fp32, bf16 or fp16")
    p.add_argument("--epochs", type=float, default=100)
    p.add_argument("--long-epochs", type=float, default=130, help="epochs of the variants that are trained longer")
    p.add_argument("--more-epochs", type=float, default=400, help="epochs of the variants that continue from those")
    p.add_argument("--teacher-epochs", type=float, default=40)
    p.add_argument("--seconds", type=float, default=0, help="time limit of all fine-tuning in seconds; reduces the number of epochs if necessary")
    p.add_argument("--limit", type=int, default=0, help="use only this many images (to try the script)")
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--no-graph", dest="graph", action="store_false", help="do not record a step as a CUDA graph")
    p.add_argument("--compile", action="store_true", help="steps by torch.compile")
    p.add_argument("--mantissa", type=int, default=0, help="bits of mantissa to write (0: all); fewer compress better")
    p.add_argument("--probe", type=int, default=100, help="steps for measuring the speed, after as many warm-up steps; 0: train the requested epochs")
    p.add_argument("--variants", nargs="*", default=None)
    for name in ("one", "end", "began"):
        p.add_argument(f"--{name}", type=str if name == "one" else float, default="" if name == "one" else 0.0, help=argparse.SUPPRESS)
    p.add_argument("--beside", nargs="*", default=[], help=argparse.SUPPRESS)
    return p


if __name__ == "__main__":
    train_network(parser().parse_args())
