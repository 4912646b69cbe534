"""Networks exported by PyTorch itself, unprepared, on one GPU: whet's FP16 engine against torch eager and torch.compile, interleaved.

    python benchmarks/gpu_networks.py [--rows bert_base_128:1,vit_b_16:32,...] [--exporter torchscript|dynamo] [--attention sdpa|eager]
                                      [--opset N] [--peers eager,compile,tensorrt] [--ahead N] [--budget SECONDS] [--limit SECONDS A BUILD]
                                      [--layers] [--without PASS,...] [--quantized int8,fp8] [--gpus N] [--builds]

Each row is a process of its own: the network with random weights (seed 0) is exported to ONNX at a fixed batch (by the other exporter if the first
fails; the row says which), built at FP16 with verification (without a timing cache), and timed in rounds that alternate between whet's engine, torch
eager in FP16 (channels last for images), torch.compile (max-autotune) and, where it is installed, TensorRT's engine of the same ONNX file; all are
GPU times of isolated replays of a CUDA graph. `error` is the greatest difference from torch in FP32 on the CPU, relative to the greatest output;
`build_s` includes verification, `stages_s` are its longest stages. Rows are built and timed one after the other, as they become ready, while the
networks of the next ones are made and exported by `--ahead` processes, which leave the CPUs and the GPU to the build first. With --gpus N this
happens on each of N GPUs, with its own equal share of the CPUs; each takes the next of the rows that are left. A row that fails states the error and
the stages that it has reached, a row that is stopped the stages; `banned` are kernels that verification refused. torch.compile's kernels are compiled
while the row waits, too; all timings of the processes, Inductor's and the builder's, take turns on the GPU. `compile_prepare_s` and `eager_prepare_s`
include this waiting.
--layers adds the time of each layer of whet's engine in us (consecutive launches of the same layer overlap, as in the network), with its kernel.
--without times a second engine, built without these passes, interleaved with the others. --quantized does so with engines for which INT8 or FP8 are
permitted too, calibrated on four mirrored and four shifted inputs, within an accuracy budget of 30 dB; `<type>_snr_db` is that of the outputs against
torch in FP32 (`snr_db`: of the FP16 engine), `<type>_layers` counts the layers that the choice by time and accuracy left in that type, and
`<type>_engines` has time and decibels of each engine that was compared, `<type>_stages_s` the longest stages of its build.
--builds: kernels that earlier rows compiled are not used, and `rebuild_s` is the time of a second build by the same process, with the timing cache
and the kernels of the first one; with --ahead 0 nothing else uses the row's CPUs.
Results: $OUT/gpu_networks.json.
Needs torch, torchvision, timm and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

ROUNDS, REPLAYS = 7, 30
ANSWERS = sys.stdout


def answer(text: str) -> None:
    """Writes a line for the process that started this one."""
    print(text, file=ANSWERS, flush=True)


def give_way(steps: int) -> None:
    """Lowers the CPU priority (`steps` above 0), or restores it (0, for privileged users). Threads that run already keep theirs."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, steps)


def take_share(things: Sequence[Any], part: int, parts: int) -> Sequence[Any]:
    """The things of one of `parts` equal parts, in order."""
    return things[part * len(things) // parts : (part + 1) * len(things) // parts]


class Stages:
    """A build's progress that prints the seconds since the start at the beginning of each stage."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()

    def stage(self, name: str, total: int) -> None:
        answer(f"STAGE {name} ({total}) from {time.perf_counter() - self.begun:.1f} s")

    def step(self, stage: str, done: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        if text.startswith("banned"):
            answer(f"STAGE {shorten_ban(text)!r}")


def shorten_ban(text: str, most: int = 400) -> str:
    """A note of a banned kernel in at most `most` characters: its beginning, and its end with tactic, error and allowed error."""
    kept = most // 4
    return text if len(text) <= most else f"{text[:kept]} ... {text[-(most - kept - 5) :]}"


def in_channels_last(t: Any) -> Any:
    """A tensor of images with channels last in memory; one of another rank (YOLO's grids of anchors have five axes) as it is."""
    import torch

    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def layer_times(plan: Any, bound: Any) -> list[tuple[str, str, float, str, str]]:
    """Kind, name, us, kernel and result shape of each layer, with launches."""
    rounds = [bound.run_timed() for _ in range(5)]
    rows = []
    for i, layer in enumerate(plan.network.layers):
        us = statistics.median(r[i] for r in rounds) * 1e6
        if us:
            kernel, shape = plan.choices[layer.name].implementation, "x".join(map(str, layer.outputs[0].shape))
            rows.append((layer.composite or layer.op, layer.name[-60:], round(us, 2), kernel, shape))
    return rows


def snr_db(want: Any, got: Any) -> float:
    """The signal-to-noise ratio of outputs in decibels."""
    import numpy as np

    noise = float(np.square(got.astype(np.float64) - want).sum())
    return round(10 * float(np.log10(np.square(want.astype(np.float64)).sum() / max(noise, 1e-30))), 2)


def build_quantized(path: str, kind: str, named: dict[str, Any]) -> Any:
    """The engine of an ONNX file with FP16 and `kind` ("int8", "fp8") permitted, within 30 dB on mirrored and shifted inputs."""
    from whet.builder import BuildConfig
    from whet.builder.precision.calibration import Calibration
    from whet.builder.precision.float8 import build_float8
    from whet.builder.precision.int8 import build_int8
    from whet.frontends.onnx import network_from_onnx
    from whet.precision.budget import Budget

    changes = (lambda v: v.flip(-1), lambda v: v.roll(7, -1))
    count = min(4, *(len(v) for v in named.values()))
    samples = [{n: change(v)[i : i + 1].numpy() for n, v in named.items()} for change in changes for i in range(count)]
    build_engine = build_int8 if kind == "int8" else build_float8
    config = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="")
    return build_engine(network_from_onnx(path), config, Calibration(lambda: samples), budget=Budget("snr", 30.0), progress=Stages())


def share(backend: Any, turn: Any) -> None:
    """Makes every timed comparison of a class of backends wait for its turn on the GPU."""
    watch = backend.watch

    @contextmanager
    def watch_in_turn(self: Any) -> Iterator[Any]:
        with turn, watch(self) as load:
            yield load

    backend.watch = watch_in_turn


def capture_torch(net: Any, values: tuple, peers: list[str], turn: Any, row: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """CUDA graphs of a module in FP16, channels last for images: eager, and compiled. `row` gets the seconds of each and what failed; the module
    and its parameters are converted in place."""
    import torch
    from _inductor import compiled
    from gpu_peers import graphed

    replays: dict[str, Callable[[], Any]] = {}
    if not peers:
        return replays
    with torch.no_grad():
        fast = net.half().cuda()
        inputs = [v.cuda().half() if v.is_floating_point() else v.cuda() for v in values]
        if inputs[0].dim() == 4:
            inputs = [in_channels_last(v) for v in inputs]
            for t in (*fast.parameters(), *fast.buffers()):
                t.data = in_channels_last(t.data)
        for peer in peers:
            begun = time.perf_counter()
            run = partial(fast if peer == "eager" else compiled(fast), *inputs)
            try:
                if peer == "compile":
                    run()  # compiles; takes turns by itself
                with turn:
                    replays[peer] = graphed(run)
            except Exception as e:  # noqa: BLE001 - a peer that fails leaves the row of whet; torch raises exceptions of many classes
                row[f"{peer}_failed"] = f"{type(e).__name__}: {e}"[:200]
                continue
            row[f"{peer}_prepare_s"] = round(time.perf_counter() - begun, 1)
    return replays


def measure_row(args: argparse.Namespace) -> dict[str, Any]:
    """The result of one network; runs in a process of its own, which waits for a line of standard input before it builds."""
    import numpy as np
    import torch
    from _inductor import Turn, exclusive
    from _networks import ATTENTION, EXPORTERS, FRESH, NETWORKS, export
    from _record import count_tactics
    from _tensorrt_runner import TensorRtRunner
    from gpu_peers import by_events, graphed

    from whet.backends import get_backend
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.errors import WhetError
    from whet.frontends.onnx import network_from_onnx
    from whet.runtime import Runtime, bind
    from whet.tactics._fused import is_quantized

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # the row that builds meanwhile compiles its kernels on all CPUs
    ATTENTION["implementation"] = args.attention
    name, batch = args.one.split(":")
    net, named = {**NETWORKS, **FRESH}[name](int(batch))
    net.eval()
    values = tuple(named.values())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        want = net(*values).float().numpy()
        path = f"{folder}/model.onnx"
        begun = time.perf_counter()
        row: dict[str, Any] = {"exporter": export(net, named, path, tuple(sorted(EXPORTERS, key=lambda e: e != args.exporter)), args.opset)}
        row["export_s"] = round(time.perf_counter() - begun, 1)
        peers = [p for p in args.peers.split(",") if p]
        turn = Turn(os.environ.get("CUDA_VISIBLE_DEVICES", "0"), queues=True)
        if "compile" in peers:
            exclusive(turn)
        replays = capture_torch(net, values, [p for p in peers if p != "tensorrt"], turn, row)
        answer("EXPORTED")
        sys.stdin.readline()
        give_way(0)
        os.sched_setaffinity(0, map(int, args.cpus.split(",")))
        turn.queues = False
        torch.set_num_threads(threads)
        gpu = get_backend("cuda")
        share(type(gpu), turn)
        begun = time.perf_counter()
        config = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=f"{folder}/times.json" if args.builds else "")
        if args.builds:
            os.environ["WHET_CUDA_CACHE"] = f"{folder}/kernels"
        plan = build(network_from_onnx(path), config, progress=Stages())
        row["build_s"] = round(time.perf_counter() - begun, 1)
        row["stages_s"] = {k: round(s, 1) for k, s in sorted(plan.report.phase_seconds.items(), key=lambda x: -x[1])[:5]}
        if args.builds:
            begun = time.perf_counter()
            build(network_from_onnx(path), config)
            row["rebuild_s"] = round(time.perf_counter() - begun, 1)
        row["layers"] = len(plan.network.layers)
        row["layer_kinds"] = dict(Counter(layer.composite or layer.op for layer in plan.network.layers).most_common(12))
        row["tactics"] = count_tactics(plan)
        write_engine(plan, f"{folder}/model.engine")
        with Runtime().load(f"{folder}/model.engine") as engine:
            got = next(iter(engine.create_context().run({n: v.numpy() for n, v in named.items()}).values()))
        row["error"] = float(f"{np.abs(got.astype(np.float32) - want).max() / max(float(np.abs(want).max()), 1e-9):.2g}")
        row["banned"] = [list(b) for b in plan.report.banned]
        row["device"] = gpu.describe()["model"]
        bound = bind(plan, gpu)
        bound.run()
        if "tensorrt" in peers:
            begun = time.perf_counter()
            try:
                replays["tensorrt"] = graphed(TensorRtRunner(path, {n: v.cuda() for n, v in named.items()}, ("fp16",)))
            except WhetError as e:
                row["tensorrt_failed"] = str(e)[:200]
            row["tensorrt_build_s"] = round(time.perf_counter() - begun, 1)
        timed = {"layer_us": (plan, bound)}
        sides: dict[str, Callable[[int], float]] = {"whet": lambda count: statistics.median(bound.seconds(count)) * 1e3}
        if args.without:
            row["without"] = args.without.split(",")
            passes = tuple(f"-{n}" for n in row["without"])
            other = build(network_from_onnx(path), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", passes=passes))
            other_bound = bind(other, gpu)
            other_bound.run()
            row["without_layers"] = len(other.network.layers)
            timed["without_layer_us"] = (other, other_bound)
            sides["without"] = lambda count: statistics.median(other_bound.seconds(count)) * 1e3
        for kind in [k for k in args.quantized.split(",") if k]:
            begun = time.perf_counter()
            quantized = build_quantized(path, kind, named)
            row[f"{kind}_build_s"] = round(time.perf_counter() - begun, 1)
            seconds = sorted(quantized.report.phase_seconds.items(), key=lambda x: -x[1])
            row[f"{kind}_stages_s"] = {k: round(s, 1) for k, s in seconds[:8]}
            compared = quantized.report.precision_choice
            row[f"{kind}_engines"] = [
                {"what": c.what, "ms": round(c.ms, 4), "snr_db": c.accuracy and round(c.accuracy, 2), "kept": c.kept} for c in compared
            ]
            row[f"{kind}_banned"] = [list(b) for b in quantized.report.banned]
            row[f"{kind}_layers"] = sum(map(is_quantized, quantized.network.layers))
            write_engine(quantized, f"{folder}/{kind}.engine")
            with Runtime().load(f"{folder}/{kind}.engine") as engine:
                values8 = next(iter(engine.create_context().run({n: v.numpy() for n, v in named.items()}).values()))
            row["snr_db"], row[f"{kind}_snr_db"] = snr_db(want, got), snr_db(want, values8)
            bound8 = bind(quantized, gpu)
            bound8.run()
            timed[f"{kind}_layer_us"] = (quantized, bound8)
            sides[kind] = lambda count, bound8=bound8: statistics.median(bound8.seconds(count)) * 1e3
    for peer, replay in replays.items():
        sides[peer] = lambda count, replay=replay: by_events(replay, count)
    times: dict[str, list[float]] = {s: [] for s in sides}
    with torch.no_grad(), turn:
        for _ in range(ROUNDS):
            for side, measure in sides.items():
                times[side].append(measure(REPLAYS))
    for side, measured in times.items():
        row[f"{side}_ms"] = round(statistics.median(measured), 4)
        if side != "whet":
            row[f"against_{side}"] = round(statistics.median(b / a for a, b in zip(times["whet"], measured, strict=True)), 3)
    answer("TIMED " + json.dumps(row))
    if args.layers:
        with turn:
            for key, (its_plan, its_bound) in timed.items():
                row[key] = layer_times(its_plan, its_bound)
    return row


class Worker:
    """The process of one row: exports, and waits until it may build and time. It is stopped `limit` seconds after the start of either, and at
    `end` (of time.perf_counter)."""

    def __init__(self, networks: str, args: argparse.Namespace, end: float, lane: int) -> None:
        self.asked, self.limit, self.end = networks, args.limit, end
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.gpus)))).split(",")
        cpus = take_share(sorted(os.sched_getaffinity(0)), lane, args.gpus)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[lane]} if args.gpus > 1 else dict(os.environ)
        passed_on = ("exporter", "attention", "opset", "peers", "without", "quantized")
        options = (
            [f"--{n}={getattr(args, n)}" for n in passed_on]
            + ["--layers"] * args.layers
            + ["--builds"] * args.builds
            + ["--cpus", ",".join(map(str, cpus))]
        )
        self.errors = tempfile.TemporaryFile("w+")
        pipe = subprocess.PIPE
        command = [sys.executable, __file__, "--one", networks, *options]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=environment)
        self.stages: list[str] = []
        self.timed: dict[str, Any] = {}

    def _next(self, *words: str) -> str:
        """The next line of output that begins with one of the words; empty at the end of the output, or after the limit."""
        assert self.process.stdout is not None
        timer = threading.Timer(max(0.1, min(self.limit, self.end - time.perf_counter())), self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith(words):
                    return line
                if line.startswith("STAGE "):
                    self.stages.append(line[6:].strip())
                elif line.startswith("TIMED "):
                    self.timed = json.loads(line[6:])
            return ""
        finally:
            timer.cancel()

    def row(self) -> dict[str, Any]:
        """The row: waits for the export, lets the process build and time. If it ends while layers are timed, the row has all but those."""
        begun = time.perf_counter()
        line = self._next("EXPORTED", "FAILED")
        if line.startswith("EXPORTED"):
            assert self.process.stdin is not None
            print(file=self.process.stdin, flush=True)
            line = self._next("ROW", "FAILED")
        self.process.kill()
        code = self.process.wait()
        word, _, text = line.partition(" ")
        if word == "ROW":
            return json.loads(text)
        if word == "FAILED":
            return {**self.timed, **json.loads(text), "stages": self.stages}
        self.errors.seek(0)
        failed = f"stopped after {time.perf_counter() - begun:.0f} s, or ended by {code}"
        return {**self.timed, "failed": failed, "stages": self.stages, "errors": self.errors.read().strip()[-300:]}


def take_ready(workers: list[Worker], end: float) -> Worker:
    """Removes and returns the first worker that has printed something, so that a slow export holds nobody up; at `end` (of time.perf_counter)
    the first one."""
    ready, _, _ = select.select([w.process.stdout for w in workers], [], [], max(0.0, end - time.perf_counter()))
    return workers.pop(next((i for i, w in enumerate(workers) if w.process.stdout in ready), 0))


def run_one(args: argparse.Namespace) -> None:
    """Prints the row of one network, or its error in brief. Its libraries are imported on its own CPUs, so that they start that many threads."""
    global ANSWERS
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # exporters print, too
    cpus = [int(c) for c in args.cpus.split(",")]
    os.sched_setaffinity(0, cpus[: len(cpus) - len(cpus) // 3 * bool(args.ahead)])  # a third is left to the row that builds
    give_way(10)
    try:
        answer("ROW " + json.dumps(measure_row(args)))
    except Exception as e:  # noqa: BLE001 - any class: the row states what failed
        text = f"{type(e).__name__}: {e}"
        answer("FAILED " + json.dumps({"failed": text if len(text) < 700 else f"{text[:350]} ... {text[-350:]}"}))


class Record:
    """The rows measured so far, by all GPUs: printed and written after each."""

    def __init__(self) -> None:
        from _record import provenance

        self.rows: list[dict[str, Any]] = []
        self.origin = provenance(("numpy", "torch", "torchvision", "timm", "transformers"))
        self.guard = threading.Lock()

    def add(self, row: dict[str, Any]) -> None:
        with self.guard:
            self.rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if not k.endswith("layer_us")}), flush=True)
            device = next((r["device"] for r in self.rows if "device" in r), "")
            text = json.dumps({**self.origin, "device": device, "rows": self.rows}, indent=1)
            Path(os.environ.get("OUT", "."), "gpu_networks.json").write_text(text + "\n")


def measure_lane(waiting: deque[str], args: argparse.Namespace, end: float, record: Record, lane: int) -> None:
    """Measures rows on one GPU until none is left, or until `end` (of time.perf_counter). The first rows are dealt: each GPU gets long ones."""
    workers = [Worker(asked, args, end, lane) for asked in args.dealt[lane :: args.gpus]]
    while True:
        with record.guard:
            while waiting and len(workers) <= args.ahead and time.perf_counter() < end:
                workers.append(Worker(waiting.popleft(), args, end, lane))
        if not workers:
            return
        if time.perf_counter() > end:
            print("left out:", *[w.asked for w in workers], flush=True)
            for worker in workers:
                worker.process.kill()
            return
        worker = take_ready(workers, end)
        name, batch = worker.asked.split(":")
        record.add({"network": name, "batch": int(batch), **worker.row()})


def main() -> None:
    from _networks import EXPORTERS, NETWORKS

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", default=",".join(f"{n}:1" for n in NETWORKS), help="NETWORK:BATCH, separated by commas")
    p.add_argument("--exporter", choices=EXPORTERS, default=EXPORTERS[0], help="which of torch.onnx.export's two exporters is tried first")
    p.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="the attention that transformers' models compute")
    p.add_argument("--opset", type=int, default=18)
    p.add_argument("--peers", default="eager", help="eager, compile, tensorrt, or several separated by commas")
    p.add_argument("--ahead", type=int, default=2, help="rows that are exported while another one is built")
    p.add_argument("--budget", type=float, default=1e9, help="seconds after which the current row is stopped and no other begins")
    p.add_argument("--limit", type=float, default=420, help="seconds after which a row is stopped: its export, then its build and timing")
    p.add_argument("--layers", action="store_true", help="the time of each layer, too")
    p.add_argument("--without", default="", help="passes, separated by commas, that a second engine is built without")
    p.add_argument("--quantized", default="", help="int8, fp8 or both: engines with these types permitted within 30 dB, too")
    p.add_argument("--gpus", type=int, default=1, help="GPUs that measure rows, each with an equal share of the CPUs")
    p.add_argument("--builds", action="store_true", help="times builds without and with the files that a build leaves")
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("--cpus", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        return run_one(args)
    rows, at_once = args.rows.split(","), args.gpus * (args.ahead + 1)
    end, record, args.dealt, waiting = time.perf_counter() + args.budget, Record(), rows[:at_once], deque(rows[at_once:])
    with ThreadPoolExecutor(args.gpus) as lanes:
        list(lanes.map(partial(measure_lane, waiting, args, end, record), range(args.gpus)))
    if waiting:
        print("left out:", *waiting, flush=True)


if __name__ == "__main__":
    main()
