"""Fine-tunes networks beside each other on one device, each in a process of its own, all with the same recipe and the same number of epochs.

First the published network alone is adapted to the JPEG images by their labels: it is the teacher. Then every variant, the original too,
is trained on labels and on the teacher's outputs. Small networks leave a GPU waiting for the next launch, so several share it; how many
epochs fit into the time limit is measured while all of them run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

LR, DISTILL, TEMPERATURE = 0.05, 0.6, 4.0
TEACHER_SHARE = 0.12  # of the time limit


def settings(args: argparse.Namespace, **more):
    """The recipe that all of them share."""
    from whet.training import FinetuneConfig

    return FinetuneConfig(**{
        "batch": args.batch, "lr": LR, "weight_decay": 5e-4, "augment": "crop:4,flip",
        "precision": args.precision, "device": args.device, "seed": 1, **more,
    })  # fmt: skip


def tune_all(out: Path, data: Path, args: argparse.Namespace) -> dict[str, dict]:
    """Trains out/NAME.onnx into out/NAME.tuned.onnx; returns what each process wrote about it."""
    from variants import VARIANTS

    names = [n for n in VARIANTS if n in args.variants]
    for f in (*out.glob("*.speed"), *out.glob("*.ready"), *out.glob("*.json")):
        f.unlink()
    _run(names, out, data, args)
    return {n: json.loads((out / f"{file_of(n)}.json").read_text()) for n in ["teacher", *names]}


def file_of(name: str) -> str:
    """A variant's name as a file's."""
    return name.replace("+", "_").replace(":", "-")


def _run(names: list[str], out: Path, data: Path, args: argparse.Namespace) -> None:
    """The teacher and all variants at once; the variants load their data and wait for the teacher."""
    began = time.time()
    command = [sys.executable, str(Path(__file__)), "--out", str(out), "--data", str(data), "--device", args.device, "--precision", args.precision,
               "--epochs", str(args.epochs), "--teacher-epochs", str(args.teacher_epochs), "--limit", str(args.limit),
               "--batch", str(args.batch), "--probe", str(args.probe),
               "--began", str(began), "--end", str(began + args.seconds if args.seconds else 0.0), "--beside", *names]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = {n: subprocess.Popen([*command, "--one", n], env=env) for n in ("teacher", *names)}
    while running:
        time.sleep(0.1)
        for name, process in list(running.items()):
            if process.poll() == 0:
                del running[name]
            elif process.poll() is not None:
                for other in running.values():
                    other.kill()
                raise SystemExit(f"fine-tuning of {name} failed with code {process.returncode}; its message stands above")


def one(args: argparse.Namespace) -> None:
    """One process: its network in, the trained one and a line of JSON out."""
    import data as cifar
    import torch
    from variants import VARIANTS

    import whet
    from whet.frontends import save_onnx
    from whet.training import accuracy, finetune

    torch.backends.cudnn.benchmark = True  # sizes never change here
    name, out = args.one, Path(args.out)
    limit = args.limit or None
    train, exact, jpeg = cifar.train_set(Path(args.data), limit), cifar.exact_test(Path(args.data)), cifar.jpeg_test(Path(args.data), limit)
    teaching = name == "teacher"
    net = whet.network_from_onnx(out / ("original.onnx" if teaching else f"{file_of(name)}.onnx"))
    while not teaching and not (out / "teacher.json").exists():
        time.sleep(0.1)
    teacher = None if teaching else whet.network_from_onnx(out / "teacher.tuned.onnx")
    if teaching:
        total = args.end - args.began if args.end else 0.0
        config = settings(args, epochs=args.teacher_epochs, batch=2 * args.batch, lr=2 * LR, seconds=TEACHER_SHARE * total)
    else:
        each = {"distill": DISTILL, "temperature": TEMPERATURE, "masks": VARIANTS[name].masks}
        epochs = args.epochs
        if args.end:
            epochs = min(epochs, _epochs_that_fit(net, train, teacher, settings(args, epochs=1e6, **each), args))
        config = settings(args, epochs=epochs, seconds=max(args.end - time.time(), 1.0) if args.end else 0.0, **each)
    done = finetune(net, train, config, teacher=teacher, progress=_tell(name))
    save_onnx(done.network, out / f"{file_of(name)}.tuned.onnx")
    module = done.network.to_torch().to("cuda" if args.device == "cuda" else "cpu")
    line = {
        "name": name, "epochs": round(done.steps * config.batch / len(train), 2), "steps": done.steps, "seconds": round(done.seconds, 1),
        "exact_test": accuracy(module, exact), "jpeg_test": accuracy(module, jpeg), "history": done.history, "held": done.held,
        "settings": {k: v for k, v in config.settings().items() if v}, "images": len(train), "jpeg_test_images": len(jpeg),
    }  # fmt: skip
    written = out / f"{file_of(name)}.part"
    written.write_text(json.dumps(line, indent=1) + "\n")
    written.rename(out / f"{file_of(name)}.json")
    shown = f"{line['epochs']} epochs in {line['seconds']} s, exact {line['exact_test']:.4f}, jpeg {line['jpeg_test']:.4f}"
    print(f"{name}: {shown}", flush=True)


def _epochs_that_fit(net, train, teacher, config, args: argparse.Namespace) -> float:
    """Whole epochs that the slowest of those beside can do until the end; every process comes to the same number."""
    from whet.training import finetune

    stamps: list[float] = []

    class Enough(Exception):
        """Enough steps were timed."""

    def progress(done: int, total: int, what: str) -> None:
        stamps.append(time.time())
        if done >= 2 * args.probe:
            raise Enough

    try:
        finetune(net, train, config, teacher=teacher, progress=progress)
    except Enough:
        pass
    a_step = (stamps[-1] - stamps[len(stamps) // 2 - 1]) / (20 * (len(stamps) - len(stamps) // 2))  # progress comes every 20 steps
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
    return max(float(int((args.end - start - 4) / slowest)), 1.0)


def _tell(name: str):
    last = [0.0]

    def progress(done: int, total: int, what: str) -> None:
        if time.time() - last[0] > 10:
            last[0] = time.time()
            print(f"  {name}: step {done} of {total}, {what}", flush=True)

    return progress


def parser() -> argparse.ArgumentParser:
    """What run.py and the processes take."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", default=".resnet56", help="folder for everything that is made")
    p.add_argument("--data", default=os.environ.get("WHET_DATA", "data"), help="folder that holds cifar10/ (examples/fetch.py brings it)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--precision", default="bf16", help="what autocast computes in: fp32, bf16 or fp16")
    p.add_argument("--epochs", type=float, default=40)
    p.add_argument("--teacher-epochs", type=float, default=12)
    p.add_argument("--seconds", type=float, default=0, help="time limit of all fine-tuning; fewer epochs where they do not fit")
    p.add_argument("--limit", type=int, default=0, help="so many images only (to try the script)")
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--probe", type=int, default=60, help="steps that the speed is measured on, after as many to get going")
    p.add_argument("--variants", nargs="*", default=None)
    for name in ("one", "end", "began"):
        p.add_argument(f"--{name}", type=str if name == "one" else float, default="" if name == "one" else 0.0, help=argparse.SUPPRESS)
    p.add_argument("--beside", nargs="*", default=[], help=argparse.SUPPRESS)
    return p


if __name__ == "__main__":
    one(parser().parse_args())
