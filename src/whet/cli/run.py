"""`whet run`: compares the values of a model with another runtime's, value by value."""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import islice
from typing import Any

import click
import numpy as np

from whet.cli._other_tools import ComparesLikePolygraphy

#: Relative error up to which values match, by the smallest type that the engine may store.
_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "int8": 0.2}


@click.command(cls=ComparesLikePolygraphy)
@click.argument("model", type=click.Path())
@click.argument("other", required=False, type=click.Path(dir_okay=False))
@click.option("--against", type=click.Choice(["onnxruntime", "reference", "whet"]), help="Runtime of OTHER (default: onnxruntime; engines: whet).")
@click.option("--inputs", help="Samples: FILE.npz, FILE.npy, DIR or python:MODULE:FUNCTION (default: seeded normal values).")
@click.option("--preprocess", help="Preprocessing of images, as --calibPreprocess of whet exec.")
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, help="Number of samples to run.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random inputs, without --inputs.")
@click.option("--shapes", help="Shapes of dynamic inputs: x:1x3x224x224 (default: 1 for dynamic dimensions).")
@click.option("--tolerance", type=click.FloatRange(0), help="Largest max|a-b| / max|b| (default: 1e-4; FP16 1e-2, BF16 5e-2, integers 0.2).")
@click.option("--fused", is_flag=True, help="Run the engine as `whet exec` builds it, and compare the values that remain after fusion.")
@click.option("--fp16", is_flag=True, help="Permit FP16 (with --fused).")
@click.option("--bf16", is_flag=True, help="Permit BF16 (with --fused).")
@click.option("--level", type=click.IntRange(0, 5), default=1, show_default=True, help="builderOptimizationLevel of the engine.")
@click.option("--outputsOnly", "outputs_only", is_flag=True, help="Compare the model's outputs only.")
@click.option("--all", "show_all", is_flag=True, help="Print every value, not only differences and outputs.")
@click.option("--json", "as_json", is_flag=True, help="Full JSON output.")
@click.option("--saveValues", "save", type=click.Path(dir_okay=False), help="Write the first sample's values of both runs (.npz).")
def command(model: str, other: str | None, against: str | None, as_json: bool, save: str | None, **o: Any) -> None:
    """Run MODEL with whet and compare every value with another runtime; exit code 1 if an output differs.

    MODEL is an ONNX file or a saved engine; OTHER (default: MODEL) an ONNX file or an engine, run by --against.

    \b
      whet run a.onnx                              against ONNX Runtime, every value of the model
      whet run a.onnx --against reference          against the reference in float64
      whet run a.onnx b.onnx --against whet        two models, both by whet
      whet run r.engine a.onnx                     a saved engine against its model in ONNX Runtime
    """
    from whet.cli._runners import is_engine
    from whet.errors import UsageError

    theirs = other or model
    against = against or ("whet" if is_engine(theirs) else "onnxruntime")
    if against == "whet" and other is None:
        raise UsageError("--against whet compares two models or engines: name the other one too")
    if against != "whet" and is_engine(theirs):
        raise UsageError(f"{theirs} is an engine; --against {against} runs ONNX models: give the engine's model as the second argument")
    comparison, types, values = _compare(model, theirs, against, o)
    if save:
        save_compared_values(save, values)
    if as_json:
        click.echo(json.dumps({"model": model, "other": theirs, "against": against, **_convert_comparison_to_json(comparison)}, indent=1))
    else:
        _print(comparison, against, o["show_all"], types)
    sys.exit(0 if comparison.matches else 1)


def _compare(model: str, theirs: str, against: str, o: dict[str, Any]) -> tuple[Any, str, tuple[dict, dict]]:
    from whet.cli._model import read_network
    from whet.cli._runners import BuiltEngine, OnnxRuntime, Reference, SavedEngine, is_engine
    from whet.engine import read_engine
    from whet.precision.compare import compare

    if is_engine(model):
        ours: Any = SavedEngine(model)
        net, small = ours.plan.network, _find_smallest_type(ours.plan)
    else:
        net, _ = read_network(model, o["shapes"])
        ours = BuiltEngine(net, _make_config(o), o["fused"])
        small = next((p for p in ("bf16", "fp16") if o[p]), "fp32")
    samples = _make_samples(net, o)
    if against == "onnxruntime":
        them: Any = OnnxRuntime(theirs, o["outputs_only"])
    elif against == "reference":
        them = Reference(read_network(theirs, o["shapes"])[0])
    elif is_engine(theirs):
        them = SavedEngine(theirs)
        small = min(small, _find_smallest_type(read_engine(theirs)), key=lambda p: -_TOLERANCE[p])
    else:
        them = BuiltEngine(read_network(theirs, o["shapes"])[0], _make_config(o), o["fused"])
    tolerance = _TOLERANCE[small] if o["tolerance"] is None else o["tolerance"]
    a, b = [ours(f) for f in samples], [them(f) for f in samples]
    only = [t.name for t in net.outputs] if o["outputs_only"] else []
    return compare(net, a, b, tolerance, only), small, (a[0], b[0])


def _find_smallest_type(plan: Any) -> str:
    """The smallest type that the engine stores values in, as a flag's name."""
    stored = {d for c in plan.choices.values() for _, d in c.outputs}
    return next((p for p, names in (("int8", ("i8", "u8")), ("bf16", ("bf16",)), ("fp16", ("f16",))) if stored & set(names)), "fp32")


def _make_config(o: dict[str, Any]) -> Any:
    from whet.builder.config import BuildConfig
    from whet.errors import UsageError

    precisions = tuple(p for p in ("fp16", "bf16") if o[p])
    if precisions and not o["fused"]:
        raise UsageError(f"--{precisions[0]} is for --fused: without it the model runs unfused in its own types")
    return BuildConfig(optimization_level=o["level"], precisions=precisions)


def _make_samples(net: Any, o: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    from whet.cli import _exec_values as values
    from whet.errors import UsageError
    from whet.precision import Preprocessing, calibration_data

    if o["inputs"]:
        preprocessing = Preprocessing.parse(o["preprocess"]) if o["preprocess"] else None
        samples = list(islice(calibration_data(o["inputs"], net, preprocessing), o["samples"]))
        if not samples:
            raise UsageError(f"--inputs={o['inputs']} holds no samples")
        return samples
    shapes = values.parse_model_shapes(o["shapes"], "shapes", {t.name: t.shape for t in net.inputs}) if o["shapes"] else {}
    rng = np.random.default_rng(o["seed"])
    return [{t.name: _make_random(t, shapes, rng) for t in net.inputs} for _ in range(o["samples"])]


def _make_random(t: Any, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> np.ndarray:
    shape = shapes.get(t.name) or tuple(d if isinstance(d, int) else 1 for d in t.shape)
    drawn = rng.standard_normal(shape) if t.dtype.is_float else rng.integers(0, 2, shape)
    return np.asarray(drawn).astype(t.dtype.numpy)


def save_compared_values(path: str, values: tuple[dict, dict]) -> None:
    """Writes the compared values of both sides as .npz. UsageError if that fails."""
    from whet.errors import UsageError
    from whet.files import replace_atomically

    try:
        sides = zip(("ours", "theirs"), values, strict=True)
        target = path if path.endswith(".npz") else f"{path}.npz"  # as NumPy names it
        with replace_atomically(target) as part, part.open("wb") as file:
            np.savez(file, **{f"{side}/{n}": a for side, v in sides for n, a in v.items() if a.dtype.kind != "V"})
    except OSError as e:
        raise UsageError(f"--saveValues={path}: {e.strerror}; choose another path") from e


def _convert_comparison_to_json(comparison: Any) -> dict[str, Any]:
    """A comparison as JSON values; infinities become strings."""
    rows = [{k: str(v) if isinstance(v, float) and not np.isfinite(v) else v for k, v in dataclasses.asdict(r).items()} for r in comparison.rows]
    first = comparison.first
    return {
        "matches": comparison.matches, "tolerance": comparison.tolerance, "first_difference": None if first is None else first.tensor,
        "first_layer": None if first is None else first.layer, "values": rows, "not_compared": comparison.missing,
    }  # fmt: skip


def _print(comparison: Any, against: str, show_all: bool, small: str) -> None:
    from whet.cli._console import make_console as make_console
    from whet.cli._console import print_table, style_text

    console = make_console()
    rows = []
    for r in (r for r in comparison.rows if show_all or r.differs or r.output):
        mark = "differs, its inputs do not" if r.enters else "differs" if r.differs else "output" if r.output else ""
        text = style_text((mark, "red" if r.enters or r.differs else ""), f" {r.note}" if r.note else "")
        rows.append([r.tensor, r.op, r.type, f"{r.max_error:.2e}", f"{r.mean_error:.2e}", f"{r.snr_db:.1f}", text])
    columns = ["value", "op", "type", ">max rel", ">mean rel", ">SNR dB", ""]
    print_table(console, columns, rows, f"whet ({small}) against {against}", below=("value",))
    differing = sum(r.differs for r in comparison.rows)
    console.print(
        f"{len(comparison.rows)} values compared, {differing} of them beyond {comparison.tolerance:g}; {len(comparison.missing)} are not in both runs"
    )
    first = comparison.first
    if first is not None:
        console.print(style_text((f"The first difference: %{first.tensor}, computed by {first.op} '{first.layer}'", "red")))
    console.print(style_text(("MATCH", "green")) if comparison.matches else style_text(("MISMATCH", "red"), ": an output differs"))
