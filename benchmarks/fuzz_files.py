"""Reads many mutated model and data files: each must be refused with one of whet's errors, or be read; no crash, hang or flood of memory.

    python benchmarks/fuzz_files.py --files 1000000 --seconds 3600 --resume build/fuzz/files.jsonl

Targets: ONNX models (read, checked, written again; small ones lowered and built), Caffe (prototxt and caffemodel), timing caches, tactic
locks (read, and a build with them), recipes of pruning and of whet auto, latency tables, calibration caches. Mutations
(tests/support/mutations.py) are structured (fields of protobuf messages, JSON values, lines) or of bytes. Worker processes have limits of
time and memory and open one file at a time; the files of a bad outcome are kept in --crashes. A seed gives the same mutation again
(--seed N --files 1), with --resume outcomes are appended to a file and its seeds are not repeated; --merge PART... adds results of other seeds.
Engine files: benchmarks/fuzz_engine.py. Results: benchmarks/results/cpu/fuzz_files.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path

from _record import provenance
from fuzz_engine import ADDRESS_SPACE, GROWTH, Pool, _peak, merge_files, run, summarize

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("WHET_DATA") or ROOT.parent / "shared" / "data")
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "frontends")]

WEIGHTS = {"onnx": 10, "caffe": 4, "cache": 2, "lock": 2, "recipe": 2, "auto": 2, "table": 1, "calibration": 1}
LARGEST_BUILD = 1 << 20  # elements of all tensors of a network that is built
REAL = ("mnist/lenet_mnist.onnx", "cifar10/resnet8_mlperftiny.onnx", "audio/silero_vad_16k_op15.onnx", "coco_val128/vww_mobilenet025_96.onnx")


class Targets:
    """One method per target: writes the mutated files to `folder`, reads them, and returns "read"; whet's errors pass through."""

    def __init__(self, folder: Path, infer_types: bool = True):
        """`infer_types`: the check of a model also runs ONNX's type inference, in a process of its own."""
        import test_onnx_fuzz

        from whet import zoo

        self.folder, self.infer_types = folder, infer_types
        self.models = [*test_onnx_fuzz.seeds(), zoo.build("lenet5")]
        self.real = [(DATA / name).read_bytes() for name in REAL if (DATA / name).is_file()]
        self._small_files(folder.parent / "good")

    def _small_files(self, good: Path) -> None:
        from whet.builder import BuildConfig, build
        from whet.builder.lock.lock import save_lock
        from whet.frontends import network_from_onnx
        from whet.measure.timing_cache import TimingCache
        from whet.precision.cache import write_cache
        from whet.precision.quantization_sites import find_quantization_sites
        from whet.precision.ranges import Range, Ranges
        from whet.pruning import groups
        from whet.pruning.latency_table import LatencyTable, Row
        from whet.pruning.recipe import make_pruning_recipe

        good.mkdir(parents=True, exist_ok=True)
        self.net = network_from_onnx(self.models[0], shapes={"x": (1, 3, 8, 8)})
        plan = build(self.net, BuildConfig(optimization_level=1, avg_timing=1, timing_cache=str(good / "cache.db")))
        save_lock(plan, good / "lock.json")
        self.good_lock = json.loads((good / "lock.json").read_text())
        with TimingCache(good / "cache.db") as cache:
            self.keys = [row[0] for row in cache._run("SELECT key FROM timings ORDER BY key LIMIT 3", ())]
        self.good_cache = (good / "cache.db").read_bytes()
        channel_groups = groups(self.net)
        self.good_recipe = make_pruning_recipe(self.net, {g.name: range(g.size // 2) for g in channel_groups[:1]}).to_json()
        names = find_quantization_sites(self.net).names()
        ranges = Ranges({n: Range(-1.0, 1.0) for n in names}, "digest", 4)
        write_cache(good / "ranges.json", ranges)
        write_cache(good / "ranges.txt", ranges)
        self.ranges = (json.loads((good / "ranges.json").read_text()), (good / "ranges.txt").read_text())
        table = LatencyTable(good / "table.json")
        table.put("k", Row("device", "fp32", "", "Relu", "cpu/onednn_eltwise", 1.0, 0.1))
        table.save()
        self.good_table = json.loads((good / "table.json").read_text())

    def attempt(self, kind: str, rng: random.Random) -> str:
        """Writes and reads one case in an empty folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        method: Callable[[random.Random], str] = getattr(self, kind)
        return method(rng)

    def onnx(self, rng: random.Random) -> str:
        import onnx

        from support.mutations import mutate_bytes, mutate_message
        from whet.builder import BuildConfig, build
        from whet.frontends import check_onnx, network_from_onnx, onnx_from_network
        from whet.passes import lower

        if self.real and rng.randrange(4) == 0:
            model = onnx.ModelProto.FromString(rng.choice(self.real))
        else:
            model = rng.choice(self.models)
        data = mutate_bytes(rng, model.SerializeToString()) if rng.randrange(4) == 0 else mutate_message(rng, model).SerializeToString()
        path = self._write("model.onnx", data)
        if rng.randrange(8) == 0:
            check_onnx(path, infer_types=self.infer_types)
        net = network_from_onnx(path)
        onnx_from_network(net)
        lowered, _ = lower(net, level=rng.randrange(6))
        size = sum(prod(d for d in t.shape if isinstance(d, int)) for t in lowered.tensors())
        if rng.randrange(8) or size > LARGEST_BUILD or any("Loop" in x.op or "Scan" in x.op for x in net.layers):
            return "read"
        build(net, BuildConfig(optimization_level=0, timing_cache="", threads=1))
        return "built"

    def caffe(self, rng: random.Random) -> str:
        from support.mutations import mutate_bytes, mutate_message, mutate_text
        from whet.frontends import check_caffe, network_from_caffe
        from whet.frontends._caffe_schema import get_binary_net

        name = rng.choice(["det1", "det2", "det3"])
        text, weights = (DATA / f"caffe/{name}.prototxt").read_text(), (DATA / f"caffe/{name}.caffemodel").read_bytes()
        if rng.randrange(2):
            text = mutate_text(rng, text)
        elif rng.randrange(2):
            weights = mutate_bytes(rng, weights)
        else:
            weights = mutate_message(rng, get_binary_net().FromString(weights)).SerializeToString()
        path = self._write("net.prototxt", text.encode())
        self._write("net.caffemodel", weights)
        if rng.randrange(8) == 0:
            check_caffe(path)
        network_from_caffe(path)
        return "read"

    def cache(self, rng: random.Random) -> str:
        from support.mutations import mutate_bytes
        from whet.measure.timing_cache import Timed, TimingCache

        path = self._write("cache.db", mutate_bytes(rng, self.good_cache))
        notes: list[str] = []
        with TimingCache(path, notes.append) as cache:
            for key in self.keys:
                cache.get(key)
                cache.peek(key)
            cache.put("new", Timed(1.0, 0.1, 3), {})
            len(cache)
        return "noted" if notes else "read"

    def lock(self, rng: random.Random) -> str:
        from support.mutations import mutate_bytes, mutate_json
        from whet.builder import BuildConfig, build

        text = mutate_json(rng, self.good_lock).encode() if rng.randrange(4) else mutate_bytes(rng, json.dumps(self.good_lock).encode())
        build(self.net, BuildConfig(optimization_level=1, avg_timing=1, lock=str(self._write("lock.json", text)), timing_cache=""))
        return "built"

    def recipe(self, rng: random.Random) -> str:
        from support.mutations import mutate_bytes, mutate_json
        from whet.pruning.recipe import apply_recipe, load_recipe

        text = mutate_json(rng, self.good_recipe).encode() if rng.randrange(4) else mutate_bytes(rng, json.dumps(self.good_recipe).encode())
        apply_recipe(self.net, load_recipe(self._write("recipe.json", text)))
        return "read"

    def auto(self, rng: random.Random) -> str:
        import yaml

        from support.mutations import mutate_bytes, mutate_json, mutate_text
        from support.search_case import RECIPE
        from whet.search.recipe.recipe import load_recipe

        match rng.randrange(3):
            case 0:
                data = mutate_bytes(rng, yaml.safe_dump(RECIPE).encode())
            case 1:
                data = mutate_text(rng, yaml.safe_dump(RECIPE)).encode(errors="replace")
            case _:
                data = mutate_json(rng, RECIPE).encode()
        load_recipe(self._write("recipe.yaml", data))
        return "read"

    def table(self, rng: random.Random) -> str:
        from support.mutations import mutate_bytes, mutate_json
        from whet.pruning.latency_table import LatencyTable

        text = mutate_json(rng, self.good_table).encode() if rng.randrange(4) else mutate_bytes(rng, json.dumps(self.good_table).encode())
        table = LatencyTable(self._write("table.json", text))
        table.get("k")
        return "read"

    def calibration(self, rng: random.Random) -> str:
        from support.mutations import mutate_bytes, mutate_json, mutate_text
        from whet.precision.cache import read_cache

        tree, text = self.ranges
        data = [mutate_json(rng, tree), mutate_text(rng, text)][rng.randrange(2)].encode(errors="replace")
        read_cache(self._write("ranges.cache", data if rng.randrange(4) else mutate_bytes(rng, data)), self.net, "digest")
        return "read"

    def _write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path


def worker(folder: Path) -> None:
    """Reads seeds from stdin, writes one JSON line each. The files of the current seed are in `folder`."""
    from whet.errors import WhetError

    warnings.simplefilter("ignore")
    targets = Targets(folder)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for line in sys.stdin:
        seed = int(line)
        rng = random.Random(seed)
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        before, start = _peak(), time.perf_counter()
        try:
            outcome = targets.attempt(kind, rng)
        except WhetError as e:
            outcome = f"refused: {type(e).__name__}: {e}" if str(e) else "BAD an error without a text"
        except BaseException as e:  # noqa: BLE001 - any other exception is what is looked for
            last = e.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            where = f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}" if last is not None else "?"
            outcome = f"BAD {type(e).__name__} at {where}: {e}"
        grown, seconds = _peak() - before, time.perf_counter() - start
        if grown > GROWTH:
            outcome = f"BAD memory grew by {grown >> 20} MiB: {outcome}"
        print(json.dumps({"seed": seed, "kind": kind, "outcome": outcome[:300], "seconds": seconds, "grown": grown}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, help="start no further file after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--resume", help="file of outcomes, one JSON line per seed: seeds in it are not repeated")
    parser.add_argument("--crashes", default=str(ROOT / "build/fuzz/crashes"), help="folder for the files of bad outcomes")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/cpu/fuzz_files.json"))
    parser.add_argument("--merge", nargs="+", metavar="PART", help="add these results of other seeds to the output file")
    options = parser.parse_args()
    if options.merge:
        return merge_files(Path(options.output), [Path(p) for p in options.merge])
    if options.worker:
        worker(Path(options.worker))
        return 0
    if options.resume:
        Path(options.resume).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        folders: dict[Pool, Path] = {}

        def start(k: int) -> Pool:
            folder = Path(work) / str(k) / "case"
            folder.mkdir(parents=True)
            pool = Pool((__file__, "--worker", str(folder)))
            folders[pool] = folder
            return pool

        def keep(seed: int, pool: Pool) -> None:
            target = Path(options.crashes) / str(seed)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folders[pool], target)

        resume = Path(options.resume) if options.resume else None
        results = run(options.files, options.seed, options.workers, resume, start=start, keep=keep, seconds=options.seconds)
    summary = summarize(results)
    print(json.dumps({k: v for k, v in summary.items() if k != "commonest_reasons"}, indent=1))
    if len(results) >= 1000:
        Path(options.output).write_text(json.dumps({**provenance(("numpy", "onnx")), "workers": options.workers, **summary}, indent=1) + "\n")
    return 1 if summary["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
