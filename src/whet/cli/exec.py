"""`whet exec`: builds or loads an engine, times it and prints a summary, with trtexec's flags and log format."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import click

from whet.cli._console import print_json
from whet.cli._debug_tensors import check_debug_flags, mark_debug_tensors
from whet.cli._exec_checks import check_against, check_files, check_values, list_unused_values
from whet.cli._exec_config import Options, build_config, parse_threads
from whet.cli._exec_flags import FLAGS, format_help, parse
from whet.cli._exec_values import format_shape
from whet.cli._failures import describe_failure
from whet.cli._summary import Log
from whet.errors import UsageError, WhetError
from whet.files import replace_atomically

_BUILD_GROUPS = ("Build", "Precision", "Sparsity", "Timing cache")
_LOAD_FLAGS = ("skipInference", "buildOnly", "profilingVerbosity", "explicitBatch", "refit", "refitFromOnnx")
_SOURCES = ("onnx", "torch", "deploy", "loadEngine")


class RawCommand(click.Command):
    """Passes its arguments unparsed: trtexec's flags depend on their order (--profile=N), which click does not keep."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def get_help(self, ctx: click.Context) -> str:
        return format_help()


@click.command(cls=RawCommand, add_help_option=False, short_help="Build, run and time an engine with trtexec's flags.")
@click.pass_context
def command(ctx: click.Context) -> None:
    argv = list(ctx.args)
    if not argv or any(a in ("--help", "-h") for a in argv):
        click.echo(format_help())
        ctx.exit(0 if argv else 2)
    o = Options(*parse(argv))
    log = Log("verbose" in o, "json" in o, "quiet" in o)
    from whet import __version__

    line = "whet exec " + " ".join(argv)
    log.frame(f"&&&& RUNNING whet.exec [whet v{__version__}] # {line}")
    try:
        _run(o, log)
    except BrokenPipeError:
        raise
    except (WhetError, OSError, MemoryError) as e:
        text, code = describe_failure(e)
        log.error(text)
        log.echo(f"&&&& FAILED whet.exec [whet v{__version__}] # {line}")
        ctx.exit(code)
    if log.as_json:
        print_json(log.facts)
    log.frame(f"&&&& PASSED whet.exec [whet v{__version__}] # {line}")


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
        log.facts["versions"] = engine_versions(o.get("loadEngine"))
        log.requested(f"Engine versions: {log.facts['versions']}")
        return
    if sum(name in o for name in _SOURCES) != 1:
        uff = " UFF files cannot be read: give the TensorFlow model itself to --onnx." if "uff" in o.unavailable else ""
        builds = "--onnx=FILE, --torch=python:MODULE:FUNCTION or --deploy=FILE"
        raise UsageError(f"give one of {builds} to build an engine, or --loadEngine=FILE to run one.{uff}")
    if "refitFromOnnx" in o and "loadEngine" not in o:
        raise UsageError("--refitFromOnnx puts new weights into the engine of --loadEngine=FILE; to build from the model, give it to --onnx")
    if lost := [f"--{n}" for n in ("model", "output") if n in o and "deploy" not in o]:
        raise UsageError(f"{', '.join(lost)} belongs to a Caffe model: give --deploy=FILE, its prototxt")
    check_values(o)
    check_files(o)
    check_debug_flags(o)
    for text in list_unused_values(o):
        log.warn(text)
    if "device" in o:
        from whet.backends.cuda import CudaBackend

        CudaBackend.default_device = o.number("device")
    _print_options(o, log)
    engine = _load(o, log) if "loadEngine" in o else _build(o, log)
    if "timeDeserialize" in o:
        return
    engine = _refit(o, log, engine)
    plan = engine.plan
    log.facts |= {"engine": o.get("saveEngine") or o.get("loadEngine") or None, "backend": plan.backend, "layers": len(plan.network.layers)}
    _print_layers(o, log, engine)
    if "skipInference" in o or "buildOnly" in o:
        from whet.cli._exec_summary import print_engine_summary

        print_engine_summary(log, engine)
        return
    from whet.cli._infer import infer

    infer(o, log, engine)


def _print_options(o: Options, log: Log) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in o.pairs:
        groups.setdefault(FLAGS[name].group.split(" (")[0], {})[name] = value or "Enabled"
    for title in ("Model", "Build", "Precision", "Sparsity", "System", "Inference", "Reporting"):
        log.section(f"{title} Options", groups.get(title, {}))
    from whet.backends import get_backend

    machine = get_backend(o.get("backend", "cpu")).describe()
    shown = {k: _format_plain(v) for k, v in machine.items()}
    log.section("Device Information", {"Selected Device": machine.get("model", machine.get("name", "?")), **shown})


def _format_plain(value: Any) -> Any:
    """Formats a dict or a list without brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _build(o: Options, log: Log):
    from whet.builder import save_lock
    from whet.cli._build_progress import BuildProgress
    from whet.cli._calibration import build_from
    from whet.cli._model import read_network
    from whet.engine import write_engine
    from whet.runtime import Runtime, count_arena_bytes

    start = time.perf_counter()
    source = o.get("deploy") or o.get("torch") or o.get("onnx")
    if "deploy" in o or "torch" in o:
        net, fixed = _read_caffe(o, log) if "deploy" in o else _read_torch(o), False
    else:
        net, fixed = read_network(source, o.get("shapes"))
    if fixed:
        log.info("The model can be built for fixed shapes only: those of --shapes.")
    log.info(f"Read {source}: {len(net.layers)} layers, {len(net.constants)} weights in {time.perf_counter() - start:.2f} s")
    check_against(o, {t.name: t.shape for t in net.inputs})
    if "markDebug" in o:
        marked = mark_debug_tensors(net, o.get("markDebug"))
        log.facts["debug_tensors"] = marked
        log.result(f"Debug tensors are outputs of the engine, and layers are not fused across them: {', '.join(marked)}")
    config = build_config(o, log, net)
    net = _apply_sparsity(log, net, config)
    with BuildProgress(enabled=sys.stderr.isatty()) as progress:
        plan = build_from(o, net, config, progress)
    for note in plan.report.notes:
        log.warn(note)
    for text in plan.report.info:
        log.result(text)
    _warn_about_host_copies(log, plan)
    passes = plan.report.passes
    fired: dict[str, int] = {}
    for name, *_ in passes.fired:
        fired[name] = fired.get(name, 0) + 1
    log.info("Passes that fired: " + (", ".join(f"{n} x{k}" for n, k in fired.items()) or "none"))
    for name, layer, reason in passes.skipped:
        log.detail(f"Pass {name} did not fire at {layer}: {reason}")
    for k, arena in enumerate(plan.arenas):
        scratch = arena.scratch_bytes * max(arena.concurrent_samples, 1)
        each = f"; {arena.concurrent_samples} concurrent sample(s), each in {arena.total}" if arena.concurrent_samples else ""
        log.info(f"Total Activation Memory: {count_arena_bytes(plan, k)} bytes (profile {k}, including scratch {scratch}{each})")
    if "sparsity" in o and o.get("sparsity") != "disable":
        log_sparse_layers(log, plan)
    seconds = time.perf_counter() - start
    if "saveEngine" in o:
        write_engine(plan, o.get("saveEngine"))
        log.info(f"Created engine with size: {os.path.getsize(o.get('saveEngine')) / 2**20:.4g} MiB")
    if "saveLock" in o:
        save_lock(plan, o.get("saveLock"))
        log.result(f"Lock written to {o.get('saveLock')}: --lock={o.get('saveLock')} builds this engine again")
    log.facts |= {"build_seconds": seconds, "passes_fired": fired, "notes": list(plan.report.notes), "found": list(plan.report.info)}
    log.info(f"Engine built in {seconds:.4g} sec.")
    spent = {name: s for name, s in plan.report.phase_seconds.items() if s >= 0.005}
    log.info("Seconds by phase: " + ", ".join(f"{name} {s:.2f}" for name, s in spent.items()))
    return Runtime(backend=config.backend, threads=max(config.threads, 0)).load(plan)


def _read_caffe(o: Options, log: Log):
    """The network of --deploy and --model. Dimensions that differ among the shape flags are dynamic, the others fixed."""
    from whet.cli import _exec_values as values
    from whet.frontends import network_from_caffe

    given: dict[str, list[tuple[int, ...]]] = {}
    for name, value in o.pairs:
        if name in ("shapes", "minShapes", "optShapes", "maxShapes"):
            for blob, shape in values.parse_shapes(value, name).items():
                given.setdefault(blob, []).append(tuple(shape))
    shapes: dict[str, list[int | str | None]] = {}
    for k, (blob, known) in enumerate(given.items()):
        sizes = zip(*known, strict=True) if len({len(s) for s in known}) == 1 else ((d,) for d in known[0])
        names = [("N", "C", "H", "W")[i] if k == 0 and i < 4 else f"d{k}_{i}" for i in range(len(known[0]))]
        shapes[blob] = [s[0] if len(set(s)) == 1 else name for s, name in zip(sizes, names, strict=True)]
    if "model" not in o:
        log.warn("--model is not given: the weights are random, so only times are meaningful.")
    outputs = tuple(n for n in o.get("output").split(",") if n) if "output" in o else ()
    return network_from_caffe(o.get("deploy"), o.get("model") or None, shapes=shapes, outputs=outputs, random_weights="model" not in o)


def _read_torch(o: Options):
    """The network of the module that --torch's function returns, alone or with its example inputs."""
    from whet.cli import _exec_values as values
    from whet.frontends.torch import from_torch, make_example
    from whet.registry import import_user_function

    made = import_user_function(o.get("torch"), "--torch")()
    if isinstance(made, tuple):
        module, example = made
        return from_torch(module, example)
    shapes = o.get("shapes") or o.get("optShapes")
    if not shapes:
        raise UsageError("--torch: the function returns a module without example inputs; give --shapes=NAME:1x3x224x224, or return (module, example)")
    names, tensors = make_example(made, {n: tuple(s) for n, s in values.parse_shapes(shapes, "shapes").items()})
    return from_torch(made, tensors, input_names=names)


def _refit(o: Options, log: Log, engine):
    """The engine with the weights of --refitFromOnnx; --timeRefit and --dumpRefit."""
    weights = engine.refittable_weights() if "dumpRefit" in o or "timeRefit" in o else {}
    if "dumpRefit" in o:
        for name, type_ in sorted(weights.items()):
            log.requested(f"Refittable weight {name}: {type_ or 'its values are not in the engine file'}")
    if "refitFromOnnx" in o:
        from whet.frontends import network_from_file

        start = time.perf_counter()
        engine = engine.refit(network_from_file(o.get("refitFromOnnx")))
        log.result(f"Engine refitted with {o.get('refitFromOnnx')} in {time.perf_counter() - start:.4g} sec; its outputs are the model's.")
        if "saveEngine" in o:
            from whet.engine import write_engine

            write_engine(engine.plan, o.get("saveEngine"))
    if "timeRefit" in o:
        own = {name: a for name, a in engine.plan.source_weights.items() if name in weights}
        start = time.perf_counter()
        engine.refit(own)
        log.facts["refit_seconds"] = time.perf_counter() - start
        log.requested(f"Engine refitted in {log.facts['refit_seconds']:.4g} sec.")
    return engine


def _load(o: Options, log: Log):
    from whet.runtime import EngineWarning, Runtime

    path = o.get("loadEngine")
    if built := [f"--{n}" for n, _ in o.pairs if FLAGS[n].group.split(" (")[0] in _BUILD_GROUPS and n not in _LOAD_FLAGS]:
        log.warn(f"{', '.join(built)}: build options, without effect on a loaded engine. Ignored.")
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)  # they are logged below
        runtime = Runtime(backend=o.get("backend") or None, threads=max(parse_threads(o), 0))
        engine = runtime.load(path, require_same_hardware="requireSameHardware" in o)
    log.info(f"Engine loaded in {time.perf_counter() - start:.4g} sec.")
    for text in engine.warnings:
        log.warn(text)
    return engine


def _warn_about_host_copies(log: Log, plan) -> None:
    """Warns about layers that --allowFallback runs on the host, with the bytes copied for them."""
    from math import prod

    from whet.network import DTYPES, static_shape

    for layer in plan.network.layers:
        choice = plan.choices[layer.name]
        if choice.tactic != "cuda/host_reference":
            continue
        pairs = (*zip(layer.inputs, choice.inputs, strict=True), *zip(layer.outputs, choice.outputs, strict=True))
        moved = sum(prod(static_shape(t.shape)) * DTYPES[s[1]].bits / 8 for t, s in pairs if t is not None and s is not None and t.type.static)
        log.warn(f"{layer.op} '{layer.name}' runs on the host, as no kernel computes it: {moved / 2**20:.3f} MiB are copied there and back.")


def _apply_sparsity(log: Log, net, config):
    """Applies --sparsity to the weights (before calibration); warns about zeros that no kernel skips, and about 2:4 weights without their kernels."""
    from whet.builder.candidates.sparse_weights import apply_sparsity
    from whet.sparsity.report import describe_two_four, describe_zeros

    net, notes = apply_sparsity(net, config)
    if not config.sparsity.startswith("force") and (text := describe_zeros(net)) is not None:
        notes.append(text)
    if config.sparsity == "disable" and (text := describe_two_four(net)) is not None:
        notes.append(text)
    for note in notes:
        log.warn(note)
    return net


def log_sparse_layers(log: Log, plan) -> None:
    """Logs the layers that could be sparse, those that are, and why the rest are dense."""
    from whet.inspector import sparsity_lines, sparsity_rows
    from whet.sparsity import list_eligible_layers
    from whet.sparsity.report import explain_dense_layers, list_sparse_layers

    eligible, _ = list_eligible_layers(plan.network)
    picked = list_sparse_layers(plan)
    log.result(f"(Sparsity) Layers eligible for sparse math: {', '.join(eligible)}")
    log.result(f"(Sparsity) TRT inference plan picked sparse implementation for layers: {', '.join(picked)}")
    if len(picked) < len(eligible):
        log.result(f"(Sparsity) {len(eligible) - len(picked)} of {len(eligible)} eligible layers run dense: {explain_dense_layers(plan)}")
    for line in sparsity_lines(sparsity_rows(plan)):
        log.result(line)


def _print_layers(o: Options, log: Log, engine) -> None:
    from whet.inspector import engine_information, layer_lines

    verbosity = engine.plan.options.get("profiling_verbosity", "layer_names_only")
    if "dumpLayerInfo" in o:
        log.requested("Layer Information:")
        for k, part in enumerate(engine.plan.by_profile()):
            if k:
                log.requested(f"Layers of profile {k}:")
            for text in layer_lines(part, verbosity):
                log.requested(text)
    if "exportLayerInfo" in o:
        import json

        path = Path(o.get("exportLayerInfo"))
        write_text_file(path, json.dumps(engine_information(engine.plan, verbosity), indent=1), log)
        if verbosity != "detailed":
            log.warn(
                f"{path} holds layer names only, as the engine was built; build with --profilingVerbosity=detailed for formats, tactics, "
                "times, bytes, FLOPs and runners-up."
            )
    if "dumpOptimizationProfile" in o:
        for k, p in enumerate(engine.plan.profiles):
            for name, (lo, opt, hi) in p.shapes.items():
                log.requested(f"Profile {k}: {name} min {format_shape(lo)} opt {format_shape(opt)} max {format_shape(hi)}")


def write_text_file(path: Path, text: str, log: Log) -> None:
    """Writes a file that a flag asked for. UsageError if it cannot be written."""
    try:
        with replace_atomically(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e
    log.result(f"Wrote {path}")
