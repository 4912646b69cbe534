"""Inference in `whet exec`: inputs, timed runs, summary, profile, exports."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from whet.array_files import read_arrays
from whet.cli import _exec_values as values
from whet.cli._debug_tensors import save_debug_tensors
from whet.cli._exec_summary import print_engine_summary
from whet.cli._summary import Log, print_summary
from whet.engine.time_check import find_contradiction
from whet.errors import ShapeError, UsageError
from whet.files import replace_atomically
from whet.measure.benchmark import draw_inputs
from whet.measure.queries import measure


def infer(o: Any, log: Log, engine: Any) -> None:
    """Runs a loaded engine with the options `o`, prints trtexec's report and writes the requested files."""
    profile = o.number("useProfile") if "useProfile" in o else None
    if profile is not None and profile >= max(len(engine.plan.profiles), 1):
        raise UsageError(f"--useProfile={profile}: the engine has {max(len(engine.plan.profiles), 1)} profile(s), numbered from 0")
    streams = o.number("infStreams" if "infStreams" in o else "streams")
    shapes = values.parse_shapes(o.get("shapes"), "shapes") if "shapes" in o else {}
    context = engine.create_context(profile)
    input_shapes = context.input_shapes(shapes)
    if len(engine.plan.profiles) > 1:
        log.result(f"Optimization profile {context.profile_index}{'' if profile is not None else ', by the shapes'}.")
    for name, shape in input_shapes.items():
        log.info(f"Input binding for {name} with dimensions {'x'.join(map(str, shape)) or 'scalar'} is created.")
    feed = make_inputs(engine, input_shapes, o.get("loadInputs"))
    limits = {
        "warmup_ms": o.number("warmUp"),
        "duration_s": o.number("duration"),
        "iterations": o.number("iterations"),
        "transfers": "noDataTransfers" not in o,
        "idle_ms": o.number("idleTime"),
    }
    if "coldL2" in o and not engine.backend.capabilities.cold_cache_clock:
        raise UsageError(f"--coldL2 flushes a GPU's cache; this engine is for the backend '{engine.plan.backend}'. Leave the flag out.")
    if engine.backend.capabilities.user_streams:
        result = _time_on_gpu(o, log, engine, profile, feed, streams, limits)
    else:
        others = [engine.create_context(profile) for _ in range(streams - 1)]
        result = measure([context, *others], [feed] * streams, sleep_ms=o.number("sleepTime"), **limits)
    batch = next((s[0] for s in input_shapes.values() if s), 1)
    print_engine_summary(log, engine, result, input_shapes, context)
    print_summary(
        log,
        result,
        batch=batch,
        percentiles=values.parse_percentiles(o.get("percentile", "90,95,99")),
        avg_runs=o.number("avgRuns"),
        device="GPU" if engine.backend.capabilities.user_streams else "",
    )
    log.facts["peak_memory"] = str(engine.memory(context))
    log.info(f"Peak memory: {log.facts['peak_memory']}")
    _profile(o, log, context, feed, median(t.compute for t in result.traces))
    _report_outputs(o, log, context, feed)
    save_debug_tensors(o, log, context, feed, log.facts.get("debug_tensors", []))
    if "exportTimes" in o:
        _write(Path(o.get("exportTimes")), [t.to_json() for t in result.traces], log)


def _time_on_gpu(o: Any, log: Log, engine: Any, profile: int | None, feed: dict[str, np.ndarray], streams: int, limits: dict[str, Any]) -> Any:
    """Times with GPU events; copies overlap with compute unless --exposeDMA is given."""
    from whet.measure.queries_gpu import measure_gpu

    if "sleepTime" in o:
        log.warn("--sleepTime delays the host between copies and compute, which are enqueued together on a GPU. It is ignored.")
    return measure_gpu(
        engine,
        profile,
        feed,
        streams=streams,
        overlap="exposeDMA" not in o,
        spin="useSpinWait" in o,
        graph="noCudaGraph" not in o,
        cold="coldL2" in o,
        **limits,
    )


def make_inputs(engine: Any, shapes: dict[str, tuple[int, ...]], spec: str) -> dict[str, np.ndarray]:
    """Input arrays of `shapes` in the tensors' types: from the files of --loadInputs, else seeded random values."""
    files = {}
    for name, path in values.split_names(spec) if spec else []:
        if name not in shapes:
            raise UsageError(f"--loadInputs: the engine has no input {name!r}; its inputs: {', '.join(shapes)}")
        files[name] = path
    arrays = draw_inputs(engine, shapes)
    return {n: read_input_file(Path(files[n]), n, shape, engine.dtype(n).numpy) if n in files else arrays[n] for n, shape in shapes.items()}


def read_input_file(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An input's array from an .npy, .npz or raw file. UsageError for a file of another size or shape."""
    if path.suffix in (".npz", ".npy"):
        found = read_arrays(path, UsageError, "--loadInputs: ")
        if isinstance(found, dict) and not found:
            raise UsageError(f"--loadInputs: {path} has no array for '{name}'. Give a file of np.savez with one of that name.")
        a = found if isinstance(found, np.ndarray) else found.get(name, next(iter(found.values())))
    else:
        wanted = int(np.prod(shape)) * dtype.itemsize
        try:
            with path.open("rb") as f:
                a = np.frombuffer(f.read(wanted + dtype.itemsize), dtype)  # one element more than wanted is refused below
        except (OSError, ValueError) as e:
            raise UsageError(f"--loadInputs: cannot read {path} for '{name}': {e}. It takes {wanted} bytes of {dtype} values.") from e
    if a.size != int(np.prod(shape)):
        want = f"input '{name}' of shape {'x'.join(map(str, shape))} takes {int(np.prod(shape))}"
        raise ShapeError(f"--loadInputs: {path} holds {a.size} elements, {want}")
    return a.reshape(shape).astype(dtype, copy=False)


def _profile(o: Any, log: Log, context: Any, feed: dict[str, np.ndarray], engine_ms: float) -> None:
    """Prints and exports the layers' times; `engine_ms` is the median of the whole engine."""
    if not any(f in o for f in ("dumpProfile", "exportProfile", "splitFusions")):
        return
    from whet.inspector import profile_records

    rows = context.profile(feed, iterations=max(o.number("iterations"), 10))
    records = profile_records(rows)
    log.facts["profile"] = records[1:]
    if "exportProfile" in o:
        _write(Path(o.get("exportProfile")), records, log)
    if "dumpProfile" in o:
        log.requested("")
        log.requested(f"=== Profile ({records[0]['count']} iterations ) ===")
        if context.engine.plan.arenas[context.profile_index].concurrent_samples:
            log.requested("Samples run separately: times are those of one sample.")
        print_profile_table(log, context, records[1:], {k: v.shape for k, v in feed.items()})
        if disturbed := find_contradiction({f"{i}: {r['name']}": r["medianMs"] for i, r in enumerate(records[1:])}, engine_ms):
            log.requested(disturbed)
    if "splitFusions" in o:
        from whet.cli._split_fusions import print_parts

        cache = "" if "noBuilderCache" in o else (o.get("timingCacheFile") or None)
        print_parts(log, context, records[1:], {k: v.shape for k, v in feed.items()}, cache)


def print_profile_table(log: Log, context: Any, records: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Prints the time per layer; if the device's peak rates are known, also bytes, FLOPs, the bound and the share of peak (roofline)."""
    from whet.inspector.facts import layer_facts

    engine = context.engine
    peaks = engine.backend.peaks()
    facts = layer_facts(engine.plan.part(context.profile_index)[0], shapes) if peaks else []
    log.requested("   Time(ms)     Avg.(ms)   Median(ms)   Time(%)   " + ("      MB    GFLOP   Bound    Peak(%)   " if peaks else "") + "Layer")
    for i, r in enumerate(records):
        roofline = ""
        if peaks:
            f = facts[i]
            moved, computed = f.bytes / peaks["bytes"], f.flops / (peaks[get_compute_type(f)] or float("inf"))
            share = 100 * 1e3 * max(moved, computed) / r["medianMs"] if r["medianMs"] > 0 else 0.0
            bound = "memory" if moved >= computed else "compute"
            roofline = f"{f.bytes / 1e6:8.2f} {f.flops / 1e9:8.3f}   {bound:<7}  {share:7.1f}   "
        log.requested(f"{r['timeMs']:11.2f}  {r['averageMs']:11.4f}  {r['medianMs']:11.4f}  {r['percentage']:8.1f}   {roofline}{r['name']}")
    total, average, middle = (sum(r[k] for r in records) for k in ("timeMs", "averageMs", "medianMs"))
    log.requested(f"{total:11.2f}  {average:11.4f}  {middle:11.4f}     100.0   Total")


def get_compute_type(f: Any) -> str:
    """The key of the device's peak rates for a layer: its input type, or its output type if it reads f32 and writes a smaller type.

    A layer with only f32 operands counts as FP32, unless its kernel computes in TF32.
    """
    kinds = {o[1] for o in f.choice.inputs if o is not None}
    if kinds == {"f32"}:
        kinds = {"tf32"} if ("math", "tf32") in f.choice.config else {o[1] for o in f.choice.outputs}
    for row, types in (("i8", {"i8", "u8"}), ("f8", {"f8e4m3"}), ("f16", {"f16", "bf16"}), ("tf32", {"tf32"})):
        if kinds & types:
            return row
    return "f32"


def _report_outputs(o: Any, log: Log, context: Any, feed: dict[str, np.ndarray]) -> None:
    if not any(f in o for f in ("dumpOutput", "exportOutput", "dumpRawBindingsToFile")):
        return
    from whet.inspector import output_records

    outputs = context.run(feed)
    if "exportOutput" in o:
        _write(Path(o.get("exportOutput")), output_records(outputs), log)
    for name, a in outputs.items():
        if "dumpOutput" in o:
            log.requested(f"{name}: ({'x'.join(map(str, a.shape))})")
            log.requested(" ".join(f"{v:g}" for v in a.reshape(-1)[:1000].astype(np.float64)) + (" ..." if a.size > 1000 else ""))
        if "dumpRawBindingsToFile" in o:
            safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
            path = Path(f"{safe}.output.{'x'.join(map(str, a.shape))}.{a.dtype}.raw")
            a.tofile(path)
            log.result(f"Wrote {path}")


def _write(path: Path, data: Any, log: Log) -> None:
    try:
        with replace_atomically(path) as part:
            part.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e
    log.result(f"Wrote {path}")
