"""Parts of verification, memory planning and timing keys on many random inputs: their results stay as recorded.

The other tests of this folder check a few cases by definition. After an intended change:
`WHET_UPDATE_GOLDEN=1 pytest tests/builder/test_recorded_values.py`, and review the diff.
"""

import sys
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))
from random_networks import random_network
from test_random_moves import Maker as Moves

from support.recorded import compare_with_record, rounded
from whet.builder import BuildConfig, build
from whet.builder.memory.planner import Block, Use, list_overlaps, plan_memory
from whet.builder.verify.differences import compare_output
from whet.builder.verify.input_kinds import KINDS, list_input_kinds, list_tests, make_values
from whet.builder.verify.rounding_ties import run_with_nudged_scales
from whet.builder.verify.segments import find_cuts, make_segments
from whet.builder.verify.shape_extents import list_other_shapes
from whet.errors import WhetError
from whet.measure.timing_key import format_layer_text
from whet.network import DTYPES
from whet.ops import OPS, sample_layer
from whet.passes import lower

GOLDEN = Path(__file__).parents[1] / "golden" / "builder_values"


def sums(a):
    """Two figures of an array: how many values are finite, and the sum of each value times its position."""
    flat = np.asarray(a).astype(np.float64).reshape(-1)
    fine = np.isfinite(flat)
    return f"{int(fine.sum())} of {flat.size} finite, {rounded(float(np.where(fine, flat, 0) @ np.arange(1, flat.size + 1)))}"


def random_program(seed):
    """Layers with one or two inputs from the last few values, scratch, and in-place pairs of equal sizes."""
    rng = np.random.RandomState(seed)
    known, uses = [("in", int(rng.randint(1, 400)))], []
    inputs = dict(known)
    for k in range(rng.randint(3, 14)):
        some = [known[-1 - int(rng.randint(min(4, len(known))))] for _ in range(rng.randint(1, 3))]
        reads = dict(some)
        out = (f"t{k}", int(rng.choice([0, 1, 64, 65, 200, 1000]))) if rng.rand() < 0.8 else (f"t{k}", some[0][1])
        last = all(u.inputs[j][0] != some[0][0] for u in uses for j in range(len(u.inputs)))
        inplace = ((0, 0),) if out[1] == some[0][1] and last and some[0][0] != "in" and len(reads) == len(some) else ()
        uses.append(Use(f"l{k}", tuple(some), (out,), inplace, scratch=int(rng.choice([0, 0, 100, 3000]))))
        known.append(out)
    return uses, inputs, [known[-1][0], known[len(known) // 2][0]]


def test_memory_plans():
    lines = []
    for seed in range(80):
        uses, inputs, outputs = random_program(seed)
        plan = plan_memory(uses, inputs, outputs)
        at = ", ".join(f"{n} {o}" for n, o in plan.offsets.items())
        lines.append(f"{seed}: {plan.total} bytes, scratch {plan.scratch_bytes} at {plan.scratch_offset}; {at}")
    rng = np.random.RandomState(0)
    for n in (1, 5, 12):
        firsts = rng.randint(0, 9, n)
        blocks = [Block(f"b{k}", int(rng.choice([0, 8, 64])), int(f), int(f + rng.randint(0, 5))) for k, f in enumerate(firsts)]
        pairs = next(k for k in range(100) if list_overlaps(blocks, k) is not None)
        lines.append(f"{n} blocks, {pairs} pairs: " + "; ".join(f"{k} {[b.name for b in v]}" for k, v in list_overlaps(blocks, pairs).items()))
    compare_with_record(GOLDEN / "memory.txt", lines)


def test_values_of_each_kind():
    lines = []
    shapes = [(5,), (3, 4), (2, 9, 5), (1, 40), (16, 3)]
    for kind, shape, dtype, most in product(KINDS, shapes, ("float32", "float16", "int8", "uint8"), (0.0, 2.5, 300.0)):
        if (np.dtype(dtype).kind in "iu" and kind in ("large", "denormal", "not finite")) or (dtype, kind) == ("float16", "large"):
            continue
        a = make_values(kind, shape, np.dtype(dtype), most, np.random.RandomState(7))
        assert a.dtype == dtype
        lines.append(f"{kind} {shape} {dtype} {most}: {sums(a)}, least {rounded(np.nanmin(a))}, zeros {int((a == 0).sum())}")
    compare_with_record(GOLDEN / "values.txt", lines)


def outputs(name, rng):
    """Pairs of a result and the reference, for one type of values."""
    dtype = DTYPES[name]
    whole = not dtype.is_float
    low, high = (0 if name.startswith("u") else -128, 256 if name.startswith("u") else 128) if whole else (0, 0)
    for n, scale, share, off in product((1, 12, 400), (1.0, 1e-3), (0.0, 0.02, 0.3, 1.0), (1, 2)):
        ref = rng.randint(low, high, n) if whole else scale * rng.standard_normal(n)
        ref = np.clip(ref, -100 * scale, 400 * scale) if not whole else ref
        changed = rng.rand(n) < share
        got = ref + changed * (off if whole else 1e-3 * off * scale * rng.standard_normal(n))
        yield f"{n} {scale:g} {share:g} {off}", got.astype(dtype.numpy), ref.astype(dtype.numpy)
    if not whole:
        ref = rng.standard_normal(20)
        for title, change in (("nan", np.nan), ("inf", np.inf), ("-inf", -np.inf), ("large", 1e30), ("zero", 0.0)):
            for both in (False, True):
                a, b = ref.copy(), ref.copy()
                a[3], b[3] = change, change if both else ref[3]
                with np.errstate(over="ignore"):
                    yield f"{title} {both}", a.astype(dtype.numpy), b.astype(dtype.numpy) if both or title != "large" else b.astype(np.float64)
        yield "all zero", ref.astype(dtype.numpy), np.zeros(20, dtype.numpy)
        yield "none", ref[:0].astype(dtype.numpy), ref[:0].astype(dtype.numpy)
    yield "shape", np.zeros(3, dtype.numpy), np.zeros((3, 1), dtype.numpy)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_errors_of_outputs():
    lines = []
    for name in ("f32", "f16", "bf16", "f8e4m3", "i8", "u8", "i32", "bool"):
        for title, got, ref in outputs(name, np.random.RandomState(3)) if name != "bool" else [
            ("one of four", np.array([True, False, True, True]), np.array([True, True, True, True])),
        ]:  # fmt: skip
            for rtol, largest in ((0.0, 0.0), (0.002, 10.0)):
                error, why = compare_output(got, ref, DTYPES[name], rtol, largest)
                lines.append(f"{name} {title} {rtol:g} {largest:g}: {rounded(error) if np.isfinite(error) else error} {why}")
    compare_with_record(GOLDEN / "errors.txt", lines)


def test_cuts_of_random_networks():
    lines = []
    for title, net in [*((f"mixed {s}", random_network(s, 30)) for s in range(25)), *((f"moves {s}", Moves(s).make(14)) for s in range(25))]:
        cuts = find_cuts(net)
        parts = make_segments(net, cuts, [t.name for t in net.outputs])
        sizes = None if parts is None else [len(p.key) for p in parts]
        lines.append(f"{title}: {len(net.layers)} layers, {'; '.join(', '.join(c) for c in cuts)}: {sizes}")
    compare_with_record(GOLDEN / "cuts.txt", lines)


def test_texts_of_layers():
    """The text of a layer in timing keys: other texts would forget all measured times, equal texts of different layers mix them up."""
    lines = []
    for name, o in sorted(OPS.items()):
        texts = []
        for sample in o.samples:
            try:
                texts.append(format_layer_text(sample_layer(name, sample)[1]))
            except WhetError:
                continue
        if texts:  # plugins of other tests have no samples
            lines.append(f"{name}: {len(texts)} texts, {len(set(texts))} different, {zlib.crc32(chr(10).join(texts).encode()):08x}")
    for seed in range(30):
        low, _ = lower(random_network(seed, 20), switches=["all"])
        texts = [format_layer_text(x) for x in low.layers]
        lines.append(f"{seed}: {len(texts)} texts, {len(set(texts))} different, {zlib.crc32(chr(10).join(texts).encode()):08x}")
    compare_with_record(GOLDEN / "layer_texts.txt", lines)


def test_tests_of_built_networks():
    """The kinds of inputs and the shapes that verification tries, for engines of the null machine."""
    lines = []
    for seed in range(25):
        net = random_network(seed, 12)
        names = [t.name for t in net.inputs]
        shapes = [{t.name: tuple(d if isinstance(d, int) else n for d in t.shape) for t in net.inputs} for n in (1, 2, 5)]
        try:
            plan = build(net, BuildConfig(backend="null", timing_cache="", profiles=(tuple(shapes),)))
        except WhetError as e:
            lines.append(f"{seed}: {type(e).__name__}")
            continue
        layers, choices = plan.network.layers, plan.choices
        lines.append(f"{seed}: {len(layers)} layers of {len(names)} inputs, arenas {[a.total for a in plan.arenas]}")
        lines.append(f"  other shapes {list_other_shapes(plan, shapes[1])}")
        lines += [f"  {x.op}: {', '.join(list_input_kinds(x, choices[x.name]))}" for x in layers]
        static = [x for x in layers if all(t is None or t.type.static for t in (*x.inputs, *x.outputs))]
        lines.append(f"  tests {list_tests(static, choices)}, of a tenth {list_tests(static, choices, 0.1)}")
    compare_with_record(GOLDEN / "tests.txt", lines)


def test_nudged_networks():
    from whet.network import parse_network

    lines = []
    text = """network n source
in %x: f32[4,6]
const %s: f32[] = [0.05]
const %z: i8[] = [3]
const %t: f32[6] = [0.1,0.2,0.05,0.3,0.01,0.07]
const %u: i8[6] = [0,0,0,0,0,0]
%q = QuantizeLinear(%x, %s, %z)
%d = DequantizeLinear(%q, %s, %z)
%r = Relu(%d)
%p = QuantizeLinear(%r, %t, %u, axis=1)
%y = DequantizeLinear(%p, %t, %u, axis=1)
out %y
"""
    x = {"x": np.random.RandomState(1).standard_normal((4, 6)).astype(np.float32)}
    for values in run_with_nudged_scales(parse_network(text), x, run=lambda net: {"y": np.concatenate([
        np.atleast_1d(np.asarray(t.weight.array, np.float64)).reshape(-1) for layer in net.layers for t in layer.inputs
        if t is not None and t.weight is not None])}):  # fmt: skip
        lines.append(", ".join(f"{v:.8g}" for v in values[0]))
    compare_with_record(GOLDEN / "nudges.txt", lines)
