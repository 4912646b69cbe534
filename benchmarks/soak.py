"""Faults and concurrency for hours: kills, terminations, threads, growth of memory. Writes a table and exits with 1 if a case failed.

    python benchmarks/soak.py --seconds 3600            # `make soak SECONDS=3600`
    python benchmarks/soak.py --seconds 60 --cases kill_build threads
    python benchmarks/soak.py --cases growth_runs growth_builds --runs 100000 --builds 300 --engineThreads 1

Each case runs for its share of the time; those of growth end earlier after `--runs` runs and `--builds` builds. `--engineThreads` are the CPU
threads of engines: with one, a run does not wait for others on a machine that is shared. Random moments come from --seed. Results:
benchmarks/results/cpu/soak.json; a row names its commit, date and command, and replaces the earlier row of its case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _record import provenance

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "builder")]
WHET = [sys.executable, "-m", "whet.cli"]


class Soak:
    """Cases in a folder; each returns its row of the table, with `failures`."""

    def __init__(self, folder: Path, seed: int, *, threads: int = 24, runs: int = 100_000, builds: int = 300, engine_threads: int = 0):
        """`threads` of the case of that name; most `runs` and `builds` of the cases of growth; CPU threads of engines (0: all)."""
        self.folder, self.random = folder, random.Random(seed)
        self.count, self.runs, self.builds, self.engine_threads = threads, runs, builds, engine_threads
        paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))  # dependencies may be in other folders
        self.environment = os.environ | {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder / "caches"), "OPENBLAS_NUM_THREADS": "1"}

    def model(self) -> Path:
        """A small convolutional network as an ONNX file."""
        path = self.folder / "model.onnx"
        if not path.exists():
            from nets import residual

            import whet

            whet.save_onnx(residual(), path)
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*WHET, *arguments], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def kill_build(self, seconds: float) -> dict[str, Any]:
        """SIGKILL and SIGTERM at random moments of builds that share a timing cache and write one engine file."""
        build = ["exec", f"--onnx={self.model()}", "--saveEngine=killed.engine", "--timingCacheFile=killed.cache", "--skipInference"]
        return self._kill(seconds, build, self.folder / "killed.engine", self._opens, self.folder / "killed.cache")

    def kill_prune(self, seconds: float) -> dict[str, Any]:
        """The same for `whet prune`, whose output is an ONNX file."""
        out = self.folder / "pruned.onnx"
        return self._kill(seconds, ["prune", str(self.model()), "--ratio=0.3", "-o", str(out)], out, self._reads, None)

    def kill_finetune(self, seconds: float) -> dict[str, Any]:
        """The same for `whet finetune` with a checkpoint, which the next run continues from."""
        rng, data, out = np.random.default_rng(0), self.folder / "data.npz", self.folder / "tuned.onnx"
        np.savez(data, x=rng.standard_normal((64, 3, 10, 10)).astype("f4"), y=rng.integers(0, 10, 64))
        command = ["finetune", str(self.model()), f"--data={data}", "--epochs=4", "--batch=2", "-o", str(out)]
        return self._kill(seconds, [*command, "--checkpoint=tuned.ckpt", "--checkpointSeconds=0.2"], out, self._reads, None)

    def _kill(self, seconds: float, command: list[str], out: Path, check: Callable[[Path], None], cache: Path | None) -> dict[str, Any]:
        failures: list[str] = []
        started = time.monotonic()
        process = self.start(*command)
        said = process.communicate(timeout=600)[0]
        whole = dict.fromkeys((False, True), time.monotonic() - started)  # seconds of the command, without and with an earlier cache
        if process.returncode or not out.exists():
            return {"rounds": 0, "failures": [f"the command itself failed: {said[-500:]}"]}
        kills = terminations = finished = 0
        while time.monotonic() - started < seconds or kills + terminations == 0:
            number, warm = self.random.choice([signal.SIGKILL, signal.SIGTERM]), bool((kills + terminations) % 2)
            if cache is not None and not warm:
                cache.unlink(missing_ok=True)
            process, begun, moment = self.start(*command), time.monotonic(), self.random.uniform(0, 1.1 * whole[warm])
            try:
                said = process.communicate(timeout=moment)[0]
                whole[warm] = time.monotonic() - begun
            except subprocess.TimeoutExpired:
                process.send_signal(number)
                said = process.communicate(timeout=600)[0]
            kills, terminations = kills + (number == signal.SIGKILL), terminations + (number == signal.SIGTERM)
            finished += process.returncode == 0
            if number == signal.SIGTERM and process.returncode not in (0, 143, -signal.SIGTERM):  # the last: before Python had started
                failures.append(f"SIGTERM after {moment:.2f} s: exit code {process.returncode}: {said[-300:]}")
            try:
                check(out)
                if cache is not None:
                    with sqlite3.connect(cache) as db:
                        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            except Exception as e:  # noqa: BLE001  any exception is a finding
                failures.append(f"{number.name} after {moment:.2f} s: {type(e).__name__}: {e}")
        last = self.start(*command)
        said = last.communicate(timeout=600)[0]
        if last.returncode:
            failures.append(f"the run after all interruptions failed: {said[-500:]}")
        return {"rounds": kills + terminations, "SIGKILL": kills, "SIGTERM": terminations, "finished first": finished, "failures": failures}

    def _opens(self, path: Path) -> None:
        import whet

        whet.Runtime().load(path).create_context()

    def _reads(self, path: Path) -> None:
        import whet

        whet.network_from_onnx(path)

    def shared_cache(self, seconds: float) -> dict[str, Any]:
        """Four builds at once with one timing cache."""
        failures, rounds, started = [], 0, time.monotonic()
        while time.monotonic() - started < seconds or not rounds:
            rounds += 1
            names = [f"--saveEngine=shared{k}.engine" for k in range(4)]
            some = [self.start("exec", f"--onnx={self.model()}", "--timingCacheFile=shared.cache", "--skipInference", n) for n in names]
            for process in some:
                said = process.communicate(timeout=600)[0]
                if process.returncode:
                    failures.append(said[-300:])
        return {"rounds": rounds, "failures": failures}

    def _engine(self) -> tuple[Any, dict[str, np.ndarray]]:
        from nets import inputs, residual

        import whet

        net = residual()
        return whet.Runtime().load(whet.builder.build(net, self._config())), inputs(net)

    def _config(self) -> Any:
        import whet

        return whet.BuildConfig(timing_cache=str(self.folder / "t.cache"), avg_timing=1, whole_engines=1, threads=self.engine_threads)

    def threads(self, seconds: float) -> dict[str, Any]:
        """Many threads with one engine: each result equals the first."""
        count = self.count
        engine, feed = self._engine()
        with engine.create_context() as context:
            want = context.run(feed)["y"]
        stop, failures, runs = time.monotonic() + seconds, [], [0] * count

        def work(k: int) -> None:
            try:
                while time.monotonic() < stop:
                    with engine.create_context() as own:
                        for _ in range(50):
                            runs[k] += 1
                            if not np.array_equal(own.run(feed)["y"], want):
                                failures.append(f"thread {k}, run {runs[k]}: another result")
                                return
            except Exception as e:  # noqa: BLE001  any exception is a finding
                failures.append(f"thread {k}: {type(e).__name__}: {e}")

        workers = [threading.Thread(target=work, args=(k,)) for k in range(count)]
        for w in workers:
            w.start()
        for w in workers:
            w.join(seconds + 300)
        if any(w.is_alive() for w in workers):
            failures.append("a thread hangs")
        return {"rounds": sum(runs), "threads": count, "failures": failures}

    def growth_runs(self, seconds: float) -> dict[str, Any]:
        """Resident memory over runs, after a tenth of them."""
        engine, feed = self._engine()
        with engine.create_context() as context:
            return self._growth(seconds, self.runs, lambda: context.run(feed), 4 << 20)

    def growth_builds(self, seconds: float) -> dict[str, Any]:
        """Resident memory over builds, after a tenth of them; at most 100 KiB for each build."""
        from nets import residual

        import whet

        config = self._config()
        return self._growth(seconds, self.builds, lambda: whet.builder.build(residual(), config), 8 << 20, each=100 << 10)

    def _growth(self, seconds: float, most: int, act: Callable[[], Any], allowed: int, each: int = 0) -> dict[str, Any]:
        started, rounds = time.monotonic(), 0
        while rounds < most / 10 and time.monotonic() - started < seconds / 3:
            act()
            rounds += 1
        first, begin = rounds, _resident()
        while rounds < most and time.monotonic() - started < seconds:
            act()
            rounds += 1
        grown = _resident() - begin
        failures = [f"{grown / 2**20:.1f} MiB in {rounds - first} rounds"] if grown > allowed + each * (rounds - first) else []
        return {"rounds": rounds, "grown KiB": grown >> 10, "failures": failures}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CASES = ("kill_build", "kill_prune", "kill_finetune", "shared_cache", "threads", "growth_runs", "growth_builds")


def run_cases(cases: list[str], seconds: float, soak: Soak) -> dict[str, dict[str, Any]]:
    """The table: for each case its row."""
    table = {}
    for case in cases:
        started = time.monotonic()
        table[case] = getattr(soak, case)(seconds / len(cases)) | {"seconds": round(time.monotonic() - started, 1)}
        print(f"{case:14} {'FAILED' if table[case]['failures'] else 'passed':7} {table[case]}", flush=True)
    return table


def merge_rows(earlier: list[dict[str, Any]], table: dict[str, dict[str, Any]], about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table in the order of CASES, with earlier rows of other cases."""
    rows = {row["case"]: row for row in earlier}
    for case, row in table.items():
        rows[case] = {"case": case, **row, "failed": len(row["failures"]), **about}
    return [rows[case] for case in CASES if case in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=24, help="threads of the case of that name (default 24)")
    parser.add_argument("--runs", type=int, default=100_000, help="most runs of growth_runs (default 100,000)")
    parser.add_argument("--builds", type=int, default=300, help="most builds of growth_builds (default 300)")
    parser.add_argument("--engineThreads", type=int, default=0, help="CPU threads of the engines (default 0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu/soak.json")
    options = parser.parse_args()
    from whet.backends import get_backend

    with tempfile.TemporaryDirectory(prefix="whet-soak-") as folder:
        soak = Soak(
            Path(folder), options.seed, threads=options.threads, runs=options.runs, builds=options.builds, engine_threads=options.engineThreads
        )
        table = run_cases(options.cases, options.seconds, soak)
    machine = get_backend("cpu").describe()
    about = provenance(("numpy",)) | {"device": f"{machine['model']}, {machine['cpus']} CPUs", "seed": options.seed}
    earlier = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    options.out.write_text(json.dumps({"rows": merge_rows(earlier, table, about)}, indent=1) + "\n")
    sys.exit(1 if any(row["failures"] for row in table.values()) else 0)


if __name__ == "__main__":
    main()
