"""Synthetic data of a search in the form of report.json: hostile names, a failed trial, one far below the others."""

from __future__ import annotations

from typing import Any

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'name'"


def _measured(ratio: float, value: float, drop: float) -> dict[str, Any]:
    return {
        "metric": {"value": value, "low": value - 1, "high": min(value + 1, 100.0), "samples": 300},
        "drop": {"value": drop, "low": drop - 1, "high": drop + 1},
        "latency": {"median_ms": 2 * ratio, "p99_ms": 3 * ratio, "mean_ms": 2.1 * ratio, "ratio": ratio, "runs": 100},
        "throughput": 500 / ratio,
        "memory_bytes": 5e6 * ratio,
        "engine_bytes": 2e6 * ratio,
        "energy": {"mj": None, "about": "not measurable: no meter"},
        "build_seconds": 3.0,
        "load": {"other_cpus": 0.4, "disturbed": ratio > 0.9, "tries": 1},
    }


def sample() -> dict[str, Any]:
    """The data of a page with three compared engines and five trials."""

    def row(name, kind, ratio, value, drop, met):
        checks = [{"text": f"latency {ratio:g}x (at most 0.5x)", "met": met, "value": ratio, "limit": 0.5}]
        return {**_measured(ratio, value, drop), "name": name, "kind": kind, "cost": ratio, "met": met, "checks": checks, "what": HOSTILE,
                "params": 615162, "flops": 240_800_000, "folder": "0001", "precision": {"f32": 12}}  # fmt: skip

    def trial(number, ratio, value, verdict, **more):
        made = {**_measured(ratio, value, 99.6 - value), "number": number, "what": f"int8, 48 inner -{number}0 %", "candidate": {},
                "state": "done", "same_as": None, "seconds": 12.3, "kept": False, "met": ratio <= 0.5, "front": False, "cost": ratio,
                "checks": [], "verdict": verdict}  # fmt: skip
        return made | more

    failed = {"number": 3, "what": "bf16", "candidate": {}, "state": "failed", "same_as": None, "seconds": None, "kept": False, "met": False,
              "front": False, "verdict": f"failed: {HOSTILE}"}  # fmt: skip
    return {
        "whet": "0", "date": "2026-01-01T00:00:00+00:00", "model": HOSTILE, "device": "a processor", "metric": "top-1 %", "higher_is_better": True,
        "met": True, "chosen": 2, "scored_on": "judge", "load": {"other_cpus": 0.1, "disturbed": False}, "cost_name": "time of the original's",
        "rows": [row("original, fp32", "original", 1.0, 99.6, 0.0, False), row("trial 0", "survivor", 0.45, 99.5, 0.1, True),
                 row("trial 1", "survivor", 0.3, 99.0, 0.6, True)],
        "trials": [trial(0, 0.45, 99.3, "survivor; meets the target, another was preferred", kept=True, front=True),
                   trial(1, 0.3, 98.9, "chosen", kept=True, front=True), trial(2, 0.2, 14.9, "rejected: drop 84.7 (at most 1)", front=True), failed,
                   trial(4, 0.3, 98.9, "the same engine as trial 1: not built again", same_as=1)],
        "limits": {"cost": 0.5, "metric": 98.6},
        "steps": [{"step": "original", "params": 615162, "flops": 240800000, "seconds": 0.0, "metric": {"value": 99.6}},
                  {"step": "channels pruned", "params": 200000, "flops": 80000000, "seconds": 0.2, "metric": {"value": 14.9}},
                  {"step": "engine (12 layers i8)", "params": 200000, "flops": 80000000, "seconds": 3.0, "metric": {"value": 99.0}, "ms": 0.6}],
        "layers": [{"name": HOSTILE, "before": "cpu/a", "before_ms": 0.4, "after": "cpu/b", "after_ms": 0.1},
                   {"name": "gone", "before": "cpu/a", "before_ms": 0.2, "after": "", "after_ms": None}],
        "left_out": [["2:4", HOSTILE], ["batch", "only 1: `space.batch: [1, 8]` searches over it"]],
        "warnings": [HOSTILE], "notes": [HOSTILE], "seconds": 100.0, "recipe": {},
        "recipe_text": f'{{"model": "{HOSTILE}"}}',
        "machine_text": "{}", "commands": ["whet exec --loadEngine=model.engine"],
    }  # fmt: skip
