"""`whet exec`: build an engine from a model (or load one), run it, time it, summarize: trtexec's flags and wording."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from whet.cli import _exec_values as values
from whet.cli._exec_flags import FLAGS, help_text, parse
from whet.cli._summary import Log
from whet.errors import UnsupportedError, UsageError, WhetError
from whet.registry import nearest


class RawCommand(click.Command):
    """Takes its arguments as they are: trtexec's flags depend on their order (--profile=N), which click does not keep."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def get_short_help_str(self, limit: int = 45) -> str:
        return "Build, run and time an engine with trtexec's flags."


@dataclass
class Options:
    """The parsed command line: values by name, order kept for the shape flags."""

    pairs: list[tuple[str, str]]
    unavailable: list[str]

    def __contains__(self, name: str) -> bool:
        return any(n == name for n, _ in self.pairs)

    def get(self, name: str, default: str = "") -> str:
        return next((v for n, v in self.pairs if n == name), default)

    def number(self, name: str, default: float, kind=int, low: float | None = None):
        return values.number(self.get(name), name, kind, low) if name in self else default


@click.command(cls=RawCommand, add_help_option=False)
@click.pass_context
def command(ctx: click.Context) -> None:
    argv = list(ctx.args)
    if not argv or any(a in ("--help", "-h") for a in argv):
        click.echo(help_text())
        ctx.exit(0 if argv else 2)
    o = Options(*parse(argv))
    log = Log("verbose" in o)
    from whet import __version__

    line = "whet exec " + " ".join(argv)
    click.echo(f"&&&& RUNNING whet.exec [whet v{__version__}] # {line}")
    try:
        _run(o, log)
    except WhetError as e:
        log.error(f"{type(e).__name__}: {e}")
        click.echo(f"&&&& FAILED whet.exec [whet v{__version__}] # {line}")
        ctx.exit(2 if isinstance(e, UsageError) else 1)
    click.echo(f"&&&& PASSED whet.exec [whet v{__version__}] # {line}")


def _run(o: Options, log: Log) -> None:
    for name in o.unavailable:
        text = f"--{name} is known but not available: {FLAGS[name].missing}."
        if "strict" in o:
            raise UsageError(f"{text} (--strict refuses the build; leave the flag out)")
        log.warn(text + " It is ignored.")
    if "getPlanVersionOnly" in o:
        from whet.engine import engine_versions

        if "loadEngine" not in o:
            raise UsageError("--getPlanVersionOnly needs --loadEngine=FILE")
        log.info(f"Engine versions: {engine_versions(o.get('loadEngine'))}")
        return
    if ("onnx" in o) == ("loadEngine" in o):
        raise UsageError("give either --onnx=FILE to build an engine or --loadEngine=FILE to run one")
    _check_outputs(o)
    if "device" in o:
        from whet.backends.cuda import CudaBackend

        CudaBackend.default_device = o.number("device", 0, int, 0)
    _print_options(o, log)
    engine = _load(o, log) if "loadEngine" in o else _build(o, log)
    if "timeDeserialize" in o:
        return
    _print_layers(o, log, engine)
    if "skipInference" in o or "buildOnly" in o:
        return
    from whet.cli._infer import infer

    infer(o, log, engine)


def _check_outputs(o: Options) -> None:
    """Refuses files that cannot be written before any work is done for them."""
    for name in ("saveEngine", "saveLock", "exportTimes", "exportOutput", "exportProfile", "exportLayerInfo", "timingCacheFile"):
        if name in o:
            folder = Path(o.get(name)).resolve().parent
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                why = "there is no folder" if not folder.is_dir() else "it may not be written in"
                raise UsageError(f"--{name}={o.get(name)} cannot be written: {why} {folder}")


def _print_options(o: Options, log: Log) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in o.pairs:
        groups.setdefault(FLAGS[name].group.split(" (")[0], {})[name] = value or "Enabled"
    for title in ("Model", "Build", "Precision", "Sparsity", "System", "Inference", "Reporting"):
        log.section(f"{title} Options", groups.get(title, {}))
    from whet.backends import get_backend

    machine = get_backend(o.get("backend", "cpu")).describe()
    log.section("Device Information", {"Selected Device": machine.get("model", machine.get("name", "?")), **machine})


def _build(o: Options, log: Log):
    from whet.builder import save_lock
    from whet.cli._build_progress import BuildProgress
    from whet.cli._calibration import build_from
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx
    from whet.runtime import Runtime

    start = time.perf_counter()
    try:
        net = network_from_onnx(o.get("onnx"))
    except UnsupportedError:
        if "shapes" not in o:
            raise
        net = network_from_onnx(o.get("onnx"), shapes=values.shapes(o.get("shapes"), "shapes"))  # fixed shapes decide what symbols left open
        log.info("The model can be built for fixed shapes only: those of --shapes.")
    log.info(f"Read {o.get('onnx')}: {len(net.layers)} layers, {len(net.constants)} weights in {time.perf_counter() - start:.2f} s")
    net = _sparsity(o, log, net)
    config = build_config(o, log, net)
    with BuildProgress(enabled=sys.stderr.isatty()) as progress:
        plan = build_from(o, net, config, progress)
    for note in plan.report.get("notes", []):
        log.warn(note)
    for found in plan.report.get("info", []):
        log.info(found)
    _copies_to_host(log, plan)
    passes = plan.report.get("passes", {})
    fired: dict[str, int] = {}
    for name, *_ in passes.get("fired", []):
        fired[name] = fired.get(name, 0) + 1
    log.info("Passes that fired: " + (", ".join(f"{n} x{k}" for n, k in fired.items()) or "none"))
    for name, layer, reason in passes.get("skipped", []):
        log.detail(f"Pass {name} did not fire at {layer}: {reason}")
    for k, arena in enumerate(plan.arenas):
        log.info(f"Total Activation Memory: {arena.total} bytes (profile {k}, of them scratch {arena.scratch_bytes})")
    if "sparsity" in o and o.get("sparsity") != "disable":
        _sparse_lines(log, plan)
    seconds = time.perf_counter() - start
    if "saveEngine" in o:
        write_engine(plan, o.get("saveEngine"))
        log.info(f"Created engine with size: {os.path.getsize(o.get('saveEngine')) / 2**20:.4g} MiB")
    if "saveLock" in o:
        save_lock(plan, o.get("saveLock"))
        log.info(f"Lock written to {o.get('saveLock')}: --lock={o.get('saveLock')} builds this engine again")
    log.info(f"Engine built in {seconds:.4g} sec.")
    spent = {name: s for name, s in plan.report.get("phase_seconds", {}).items() if s >= 0.005}
    log.info("Seconds by phase: " + ", ".join(f"{name} {s:.2f}" for name, s in spent.items()))
    return Runtime(backend=config.backend, threads=max(config.threads, 0)).load(plan)


def _threads(o: Options) -> int:
    from whet.builder.config import AUTO_THREADS

    return AUTO_THREADS if o.get("numThreads") == "auto" else o.number("numThreads", 0, int, 0)


def _load(o: Options, log: Log):
    from whet.runtime import Runtime

    path = o.get("loadEngine")
    start = time.perf_counter()
    engine = Runtime(backend=o.get("backend") or None, threads=max(_threads(o), 0)).load(
        path, require_same_hardware="requireSameHardware" in o
    )
    log.info(f"Engine loaded in {time.perf_counter() - start:.4g} sec.")
    for text in engine.warnings:
        log.warn(text)
    return engine


def build_config(o: Options, log: Log, net) -> Any:
    """The BuildConfig that the flags ask for. Raises UsageError."""
    from whet.builder.config import BuildConfig

    profiles, warnings = values.profiles(o.pairs)
    for w in warnings:
        log.warn(w)
    profiles = _default_profile(o, log, net, profiles)
    precisions = tuple(p for p in ("fp16", "bf16", "int8", "fp8", "best") if p in o)
    if "stronglyTyped" in o and precisions:
        raise UsageError(f"--stronglyTyped keeps the model's own types; it cannot stand beside --{precisions[0]}")
    constraints = values.one_of(o.get("precisionConstraints", "none"), "precisionConstraints", ("none", "prefer", "obey"))
    pools = {}
    for name, text in values.split_names(o.get("memPoolSize")) if "memPoolSize" in o else []:
        if name not in ("workspace", "arena"):
            log.warn(f"--memPoolSize: the pool '{name}' is none of this backend's (workspace, arena). It is ignored.")
        else:
            pools[name] = values.size(text, "memPoolSize")
    cache = "" if "noBuilderCache" in o else (o.get("timingCacheFile") or None)
    level = values.number(o.get("builderOptimizationLevel", "3"), "builderOptimizationLevel", int, 0)
    return BuildConfig(
        backend=values.one_of(o.get("backend", "cpu"), "backend", ("cpu", "cuda", "null")),
        threads=_threads(o),
        precisions=precisions,
        strict="strict" in o,
        precision_constraints=constraints,
        layer_precisions=_layer_types(o, log, net, "layerPrecisions"),
        layer_output_types=_layer_types(o, log, net, "layerOutputTypes"),
        sparsity=values.one_of(o.get("sparsity", "disable"), "sparsity", ("disable", "enable", "force")),
        profiles=tuple(profiles),
        optimization_level=min(level, 5),
        passes=tuple(p for p in o.get("passes").split(",") if p),
        no_fuse=tuple(p for p in o.get("noFuse").split(",") if p),
        avg_timing=o.number("avgTiming", 8, int, 1),
        max_tactics=o.number("maxTactics", -1, int, -1),
        timing_cache=cache,
        error_on_cache_miss="errorOnTimingCacheMiss" in o,
        memory_limit=pools,
        tactic_sources=_sources(o),
        verify="noVerify" not in o,
        deterministic="deterministic" in o,
        lock=o.get("lock") or None,
        profiling_verbosity=values.one_of(
            o.get("profilingVerbosity", "layer_names_only"), "profilingVerbosity", ("layer_names_only", "detailed", "none")
        ),
    )


def _copies_to_host(log: Log, plan) -> None:
    """What --allowFallback let run on the host, and what is copied for it."""
    from math import prod

    from whet.network import DTYPES, static_shape

    for layer in plan.network.layers:
        choice = plan.choices[layer.name]
        if choice.tactic != "cuda/host_reference":
            continue
        pairs = (*zip(layer.inputs, choice.inputs, strict=True), *zip(layer.outputs, choice.outputs, strict=True))
        moved = sum(prod(static_shape(t.shape)) * DTYPES[s[1]].bits / 8 for t, s in pairs if t is not None and s is not None and t.type.static)
        log.warn(f"{layer.op} '{layer.name}' runs on the host, no kernel here computes it: {moved / 2**20:.3f} MiB are copied there and back.")


def _sources(o: Options) -> tuple[str, ...]:
    """--tacticSources, and what --pure and --noTF32 switch off on a GPU."""
    given = tuple(p for p in o.get("tacticSources").split(",") if p)
    if o.get("backend", "cpu") != "cuda":
        return given
    means = {"pure": ("-CUBLASLT", "-CUDNN"), "noTF32": ("-cublaslt_tf32", "-cudnn_tf32", "-own_tf32"), "allowFallback": ("+host_reference",)}
    return (*given, *(switch for flag, switches in means.items() if flag in o for switch in switches))


def _layer_types(o: Options, log: Log, net, flag: str) -> tuple[tuple[str, str], ...]:
    """(name, precision) pairs of a flag; a name that matches no layer is an error under obey, else a warning."""
    from fnmatch import fnmatchcase

    pairs = values.split_names(o.get(flag)) if flag in o else []
    known = {n for layer in net.layers for n in (layer.name, *layer.sources)}
    for name, _ in pairs:
        if not any(fnmatchcase(k, name) for k in known):
            text = f"--{flag}: no layer or node of the model is called {name!r}.{nearest(name, known)} `*` stands for anything."
            if o.get("precisionConstraints") == "obey":
                raise UsageError(text)
            log.warn(text)
    return tuple(pairs)


def _default_profile(o: Options, log: Log, net, profiles):
    """Profiles, made up when the model is dynamic and none was given: --shapes, or every symbol 1, as trtexec does."""
    dynamic = [t for t in net.inputs if not t.type.static]
    if not dynamic:
        if profiles:
            given = {t.name: tuple(t.shape) for t in net.inputs}
            if any(s != given.get(n, s) for p in profiles for shapes in p for n, s in shapes.items()):
                raise UsageError("the model has static shapes; --minShapes, --optShapes and --maxShapes cannot change them")
        return []
    unknown = {n for p in profiles for n in p[1]} - {t.name for t in net.inputs}
    if unknown:
        inputs = ", ".join(f"{t.name} {t.type}" for t in net.inputs)
        raise UsageError(f"the model has no input {sorted(unknown)[0]!r}; its inputs: {inputs}")
    if profiles:
        fill = {t.name: tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
        return [tuple({n: s.get(n, fill[n]) for n in fill} for s in p) for p in profiles]
    if "shapes" in o:
        got = values.shapes(o.get("shapes"), "shapes")
        made = {t.name: got.get(t.name, tuple(d if isinstance(d, int) else 1 for d in t.shape)) for t in net.inputs}
    else:
        made = {t.name: tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
        for t in dynamic:
            text = "x".join(map(str, made[t.name]))
            log.warn(f"Dynamic dimensions required for input: {t.name}, but no shapes were provided.")
            log.warn(f"Automatically overriding shape to: {text}")
    return [(made, made, made)]


def _sparsity(o: Options, log: Log, net):
    from whet.sparsity.report import said_of_zeros

    mode = o.get("sparsity", "disable")
    if mode != "force":
        if (said := said_of_zeros(net)) is not None:
            log.warn(said)
        return net
    from whet.sparsity import force_two_four

    net, done, left = force_two_four(net)
    log.warn(
        f"--sparsity=force wrote 2:4 weights into {len(done)} layers (the two largest of every four along the reduction axis stay); "
        "the accuracy is not to be trusted before fine-tuning."
    )
    if left:
        log.info(f"(Sparsity) {len(left)} weighted layers cannot be 2:4: " + "; ".join(f"{n}: {why}" for n, why in list(left.items())[:4]))
    return net


def _sparse_lines(log: Log, plan) -> None:
    from whet.sparsity import eligible_layers
    from whet.sparsity.report import picked_layers, why_dense

    eligible, _ = eligible_layers(plan.network)
    picked = picked_layers(plan)
    log.info(f"(Sparsity) Layers eligible for sparse math: {', '.join(eligible)}")
    log.info(f"(Sparsity) TRT inference plan picked sparse implementation for layers: {', '.join(picked)}")
    if len(picked) < len(eligible):
        log.info(f"(Sparsity) {len(eligible) - len(picked)} of {len(eligible)} eligible layers run dense: {why_dense(plan)}")


def _print_layers(o: Options, log: Log, engine) -> None:
    from whet.inspector import engine_information, layer_lines

    verbosity = engine.plan.options.get("profiling_verbosity", "layer_names_only")
    if "dumpLayerInfo" in o:
        log.info("Layer Information:")
        for text in layer_lines(engine.plan, verbosity):
            log.info(text)
    if "exportLayerInfo" in o:
        import json

        path = Path(o.get("exportLayerInfo"))
        _write(path, json.dumps(engine_information(engine.plan, verbosity), indent=1), log)
        if verbosity != "detailed":
            log.warn(
                f"{path} holds layer names only, as the engine was built; build with --profilingVerbosity=detailed for formats, tactics, "
                "times, bytes, FLOPs and runners-up."
            )
    if "dumpOptimizationProfile" in o:
        for k, p in enumerate(engine.plan.profiles):
            for name, (lo, opt, hi) in p.shapes.items():
                log.info(f"Profile {k}: {name} min {_x(lo)} opt {_x(opt)} max {_x(hi)}")


def _write(path: Path, text: str, log: Log) -> None:
    try:
        path.write_text(text)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e
    log.info(f"Wrote {path}")


def _x(shape) -> str:
    return "x".join(map(str, shape))
