"""Opens many damaged and hostile engine files: each must raise EngineError or be a good engine, with the answers of the unmodified one if the edit
left network and weights alone. No crash, hang or flood of memory.

    python benchmarks/fuzz_engine.py --files 1000000 --resume fuzz.jsonl

The corpus (tests/engine/corpus.py, trial.py) has engines of whole networks and of tactics of every family of both backends, CUDA's on a simulated
device. Workers are processes that open one file at a time; a watchdog ends one that takes longer than the limit. Files come from seeds
(tests/engine/mutants.py), so that a finding is repeated with --seed N --files 1. With --resume outcomes are appended to a file, and seeds in it are
not repeated. --merge PART... adds the counts of several results, of other seeds, to --output. Results: benchmarks/results/cpu/fuzz_engine.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from _record import provenance

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "engine")]

SECONDS = 20  # of processor time for one file, or
PATIENCE = 300  # seconds of wall time: on a busy machine a worker may not be scheduled
GROWTH = 400 << 20  # bytes of resident memory that one file may add
ADDRESS_SPACE = 12 << 30  # address space limit of a worker: excess memory ends as MemoryError, which is counted as bad


def worker() -> None:
    """Reads seeds from stdin, writes one JSON line each."""
    from corpus import family_engines
    from mutants import RAW, SAME_ANSWERS, mutant
    from trial import answers_of, attempt, base_engines, refuse_marked_configs

    bases = [*base_engines(), *family_engines().values()]
    refuse_marked_configs()
    answers = {base: answers_of(base) for base in bases}
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for base in bases:
        assert attempt(base) == "opened and ran", attempt(base)
    for line in sys.stdin:
        seed = int(line)
        kind, data, base = mutant(seed, bases)
        before, start = _peak(), time.perf_counter()
        outcome = attempt(data, answers[base] if kind in SAME_ANSWERS else None)
        grown, seconds = _peak() - before, time.perf_counter() - start
        if kind in RAW and data != base and not outcome.startswith(("refused", "BAD")):
            outcome = f"BAD opened although damaged: {outcome}"
        if grown > GROWTH:
            outcome = f"BAD memory grew by {grown >> 20} MiB: {outcome}"
        print(json.dumps({"seed": seed, "kind": kind, "outcome": outcome[:300], "seconds": seconds, "grown": grown}), flush=True)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Pool:
    """One worker process at a time, with a watchdog."""

    def __init__(self, command: Sequence[str] = (__file__, "--worker")) -> None:
        self.command = command
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.head_start = 60.0  # a fresh worker builds the good engines first
        self.process = subprocess.Popen(
            [sys.executable, *self.command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )

    def give(self, seed: int) -> None:
        self.seed, self.since, self.used = seed, time.monotonic(), self.processor()
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()

    def take(self) -> dict:
        """The next available answer; a worker that died is replaced."""
        line = self.process.stdout.readline()
        if line:
            self.head_start = 0.0
            return json.loads(line)
        code = self.process.wait()
        self.start()
        return {"seed": self.seed, "kind": "?", "outcome": f"BAD worker ended with {code}", "seconds": 0.0, "grown": 0}

    def processor(self) -> float:
        """Seconds of processor time that the worker has used."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def overdue(self) -> dict | None:
        if self.processor() - self.used < SECONDS + self.head_start and time.monotonic() - self.since < PATIENCE:
            return None
        self.process.kill()
        self.process.wait()
        self.start()
        return {"seed": self.seed, "kind": "?", "outcome": f"BAD hang: more than {SECONDS} s of work or {PATIENCE} s", "seconds": 0.0, "grown": 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, help="start no further file after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--resume", help="file of outcomes, one JSON line per seed: seeds in it are not repeated")
    parser.add_argument("--retry", action="store_true", help="open the bad ones of the results file again, and note what came out")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/cpu/fuzz_engine.json"))
    parser.add_argument("--merge", nargs="+", metavar="PART", help="add these results of other seeds to the output file")
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    if options.merge:
        return merge_files(Path(options.output), [Path(p) for p in options.merge])
    if options.retry:
        return retry(Path(options.output))
    results = run(options.files, options.seed, options.workers, Path(options.resume) if options.resume else None, seconds=options.seconds)
    summary = summarize(results)
    print(json.dumps(summary, indent=1))
    if options.files >= 1000:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        result = {**provenance(("numpy", "onednn-cpu-gomp")), "workers": options.workers, **summary}
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if summary["bad"] else 0


def merge_files(output: Path, parts: list[Path]) -> int:
    """Adds the counts of results of other seeds to a result file; each is listed under `runs` with its date, commit and command."""
    merged = merge_summaries([json.loads(p.read_text()) for p in ([output] if output.exists() else []) + parts])
    output.write_text(json.dumps(merged, indent=1) + "\n")
    print(f"{merged['files']} files in {len(merged['runs'])} runs, {len(merged['bad'])} bad")
    return 1 if merged["bad"] else 0


def merge_summaries(summaries: list[dict]) -> dict:
    """One summary of several, by `runs`; raises ValueError if a run is there twice. Reasons are counted among the commonest of each alone."""
    about = ("date", "commit", "command", "machine", "versions", "workers", "files", "seconds")
    runs = [run for s in summaries for run in s.get("runs", [{k: s[k] for k in about if k in s}])]
    if len({json.dumps(run, sort_keys=True) for run in runs}) < len(runs):
        raise ValueError("one of the runs is in the results already: its seeds would count twice")
    kinds: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter = collections.Counter()
    for s in summaries:
        for kind, counts in s["by_kind"].items():
            kinds[kind].update(counts)
        reasons.update(dict(s["commonest_reasons"]))
    latest = max(runs, key=lambda run: run["date"])
    return {
        **{k: latest[k] for k in ("date", "commit", "command", "machine", "versions") if k in latest},
        "files": sum(s["files"] for s in summaries),
        "bad": [r for s in summaries for r in s["bad"]],
        "by_kind": {k: dict(v) for k, v in sorted(kinds.items())},
        "different_reasons": max(s["different_reasons"] for s in summaries),
        "commonest_reasons": [list(r) for r in reasons.most_common(25)],
        "slowest": sorted((r for s in summaries for r in s["slowest"]), key=lambda r: -r["seconds"])[:3],
        "largest_growth_mib": max(s["largest_growth_mib"] for s in summaries),
        "seconds": sum(s["seconds"] for s in summaries),
        "runs": runs,
    }


def retry(path: Path) -> int:
    """Opens the bad files of earlier results again, one at a time; the new outcomes are stored under `again`."""
    summary = json.loads(path.read_text())
    for r in summary["bad"]:
        r["again"] = run(1, r["seed"], 1)[0]
        print(r)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if any(r["again"]["outcome"].startswith("BAD") for r in summary["bad"]) else 0


def earlier_outcomes(path: Path | None) -> dict[int, dict]:
    """Outcomes by seed in a file of an interrupted run; its last line may be cut off."""
    outcomes: dict[int, dict] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        try:
            outcome = json.loads(line)
        except ValueError:
            continue
        outcomes[outcome["seed"]] = outcome
    return outcomes


def run(
    files: int, seed: int, workers: int, resume: Path | None = None, *, start: Callable[[int], Pool] | None = None,
    keep: Callable[[int, Pool], None] | None = None, seconds: float | None = None,
) -> list[dict]:  # fmt: skip
    """The outcome of every seed from `seed` on; those in `resume` are taken from there, all others are appended to it.

    `early` starts a worker's pool by its number; `keep` is called with the seed and pool of a bad outcome before the worker gets another file.
    After `seconds` no further file is started.
    """
    known = earlier_outcomes(resume)
    results = [known[n] for n in range(seed, seed + files) if n in known]
    pools = [start(k) if start is not None else Pool() for k in range(workers)]
    waiting = (n for n in range(seed, seed + files) if n not in known)
    busy: dict[int, Pool] = {}
    log = open(resume, "a") if resume is not None else None
    if log is not None and known:
        log.write("\n")  # after a line that was cut off
    started = time.monotonic()

    def next_for(pool: Pool) -> None:
        busy.pop(pool.process.stdout.fileno(), None)
        n = next(waiting, None)
        if n is not None and (seconds is None or time.monotonic() - started < seconds):
            pool.give(n)
            busy[pool.process.stdout.fileno()] = pool

    for p in pools:
        next_for(p)
    while busy:
        ready, _, _ = select.select(list(busy), [], [], 1.0)
        for fd in list(busy):
            pool = busy[fd]
            found = pool.take() if fd in ready else pool.overdue()
            if found is not None:
                del busy[fd]
                results.append(found)
                if log is not None:
                    log.write(json.dumps(found) + "\n")
                    log.flush()
                if found["outcome"].startswith("BAD"):
                    print(found, flush=True)
                    if keep is not None:
                        keep(found["seed"], pool)
                next_for(pool)
                if len(results) % 5000 == 0:
                    print(f"{len(results)} of {files} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    for p in pools:
        p.process.stdin.close()
        p.process.wait()
    if log is not None:
        log.close()
    return results


def summarize(results: list[dict]) -> dict:
    """Counts by kind and outcome, the commonest reasons, the slowest, and everything bad."""
    kinds: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter = collections.Counter()
    for r in results:
        word = r["outcome"].split(":")[0].split(" ")[0]
        kinds[r["kind"]][word if word != "opened" else r["outcome"].split(":")[0]] += 1
        if word == "refused:" or word == "refused":
            reasons[re.sub(r"0x[0-9a-f]+|[0-9]+|'[^']*'|%\S+", "#", r["outcome"][9:])[:80]] += 1
    slow = sorted(results, key=lambda r: -r["seconds"])[:3]
    return {
        "files": len(results),
        "bad": [r for r in results if r["outcome"].startswith("BAD")],
        "by_kind": {k: dict(v) for k, v in sorted(kinds.items())},
        "different_reasons": len(reasons),
        "commonest_reasons": reasons.most_common(25),
        "slowest": slow,
        "largest_growth_mib": max((r["grown"] for r in results), default=0) / 2**20,
        "seconds": sum(r["seconds"] for r in results),
    }


if __name__ == "__main__":
    sys.exit(main())
