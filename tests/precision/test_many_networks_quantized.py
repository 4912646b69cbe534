"""Quantization of networks with convolutions and products, and of networks that differ from them in one place.

Records: quantized layers with their readers and shared ranges, tensors through which scale can be moved (or the reason against it), layers that FP8
leaves out, and the quantized network. Moving scale preserves values. After an intended change:
`WHET_UPDATE_GOLDEN=1 pytest tests/precision/test_many_networks_quantized.py`, and review the diff.
"""

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))
from near_misses import list_edits
from pass_golden import FOLDER
from random_networks import feeds, same

from support.recorded import compare_with_record, rounded
from whet.errors import NetworkError, WhetError
from whet.network import parse_network
from whet.ops import run_network
from whet.precision import find_quantization_sites, quantize
from whet.precision.float8 import list_excluded_layers, skip_sums
from whet.precision.ranges import Range, Ranges
from whet.precision.scaling import apply_scalings, find_sites, propose_scales
from whet.precision.tables import insert_tables

GOLDEN = FOLDER.parent / "quantized"
HEAD = "network case source\n"
NETWORKS = {
    "residual": """in %x: f32[N,3,8,8]
const %w1: f32[8,3,3,3] = seed(1)
const %b1: f32[8] = seed(2)
const %w2: f32[8,8,1,1] = seed(3)
const %w3: f32[16,8,1,1] = seed(4)
%a = Conv(%x, %w1, %b1, pads=(1,1,1,1))
%r = Relu(%a)
%m = MaxPool(%r, kernel_shape=(2,2), strides=(2,2))
%c = Conv(%m, %w2)
%s = Add(%c, %m)
%t = Relu(%s)
%d = Conv(%t, %w3)
%g = GlobalAveragePool(%d)
out %g
""",
    "branches": """in %x: f32[N,8,6,6]
const %w1: f32[8,8,1,1] = seed(1)
const %w2: f32[4,8,3,3] = seed(2)
const %w3: f32[8,12,1,1] = seed(3)
const %zero: f32[] = [0.0]
const %six: f32[] = [6.0]
%a = Conv(%x, %w1)
%e = Clip(%a, %zero, %six)
%b = Conv(%e, %w2, pads=(1,1,1,1))
%l = LeakyRelu(%b, alpha=0.1)
%k = Concat(%e, %l, axis=1)
%c = Conv(%k, %w3)
%s = Sigmoid(%c)
%y = Mul(%c, %s)
out %y
""",
    "depthwise": """in %x: f32[N,4,6,6]
const %w1: f32[8,4,1,1] = seed(1)
const %w2: f32[8,1,3,3] = seed(2)
const %b2: f32[8] = seed(3)
const %w3: f32[4,8,1,1] = seed(4)
const %w4: f32[4,2,1,1] = seed(5)
%p = Conv(%x, %w1)
%a = Relu(%p)
%d = Conv(%a, %w2, %b2, group=8, pads=(1,1,1,1))
%e = Relu(%d)
%q = Conv(%e, %w3)
%s = Add(%q, %x)
%g = Conv(%s, %w4, group=2)
%v = AveragePool(%g, kernel_shape=(2,2), strides=(2,2))
%z = Conv(%v, %w4, group=2)
out %z
""",
    "products": """in %x: f32[N,4,16]
const %w1: f32[16,32] = seed(1)
const %b1: f32[32] = seed(2)
const %w2: f32[32,16] = seed(3)
const %w3: f32[8,64] = seed(4)
const %b3: f32[8] = seed(5)
%h = MatMul(%x, %w1)
%i = Add(%h, %b1)
%j = Gelu(%i)
%k = MatMul(%j, %w2)
%s = Add(%x, %k)
%f = Flatten(%s)
%y = Gemm(%f, %w3, %b3, transB=1)
out %y
""",
    "wide": """in %x: f32[N,16,4,4]
const %w1: f32[16,16,3,3] = seed(1)
const %w2: f32[16,16,1,1] = seed(2)
const %w3: f32[32,16,1,1] = seed(3)
const %w4: f32[8,32] = seed(4)
%a = Conv(%x, %w1, pads=(1,1,1,1))
%b = Relu(%a)
%c = Conv(%b, %w2)
%d = Relu(%c)
%s = Add(%d, %b)
%e = Conv(%s, %w3)
%g = GlobalAveragePool(%e)
%f = Flatten(%g)
%y = Gemm(%f, %w4, transB=1)
out %y
""",
}  # fmt: skip


def networks(name):
    texts = [("as it is", NETWORKS[name]), *list_edits(NETWORKS[name])]
    for what, text in texts:
        if what == "as it is" or zlib.crc32(f"{name} {what}".encode()) % 2 == 0:
            try:
                yield what, parse_network(HEAD + text)
            except WhetError:  # the edit gives no network
                continue


def describe(net):
    """Lines about the quantization of a network."""
    sites = find_quantization_sites(net)
    yield f"  quantized: {', '.join(x.name for x in sites.layers)}"
    for t, readers in sites.roots.items():
        yield f"  %{t.name}: read by {'all' if readers is None else ', '.join(sorted(r.name for r in readers))}, as {sites.shared[t]}"
    found, refused = find_sites(net)
    for name, s in found.items():
        yield f"  scale of %{name}: out of {', '.join(f'{x.name}[{i}]' for x, i, _ in s.divided)}, into {', '.join(r.name for r in s.readers)}"
    yield from (f"  no scale of %{name}: {why}" for name, why in refused.items())
    yield from (f"  not in FP8, {name}: {why}" for name, why in list_excluded_layers(net).items())
    yield f"  sums of FP8: {', '.join(sorted(skip_sums(net)))}"
    yield from _describe_scales(net, found)
    ranges = Ranges({t.name: Range(0.0 if k % 3 == 0 else -0.5 - k % 2, 1.5 + 0.25 * k) for k, t in enumerate(sites.roots)})
    for kind in ("int8", "fp8"):
        made = quantize(net, ranges, kind=kind)
        steps = [f"{x.op}({', '.join('%' + t.name for t in x.inputs if t is not None)})" for x in made.layers]
        yield f"  {kind}: {'; '.join(steps)}"
        new = [t for n, t in made.constants.items() if n not in net.constants]
        yield f"  constants: {', '.join(f'{t.name} {rounded(t.array().astype(np.float64).sum())}' for t in new)}"
        if kind == "int8":
            yield f"  tables: {insert_tables(made, ranges)}"


def _describe_scales(net, sites):
    """The proposed factors; with them the network computes the same."""
    arrays = feeds(net)
    try:
        want = run_network(net, arrays, widen=True)
    except (NetworkError, TypeError):  # sizes that do not fit
        return
    for name, site in sites.items():
        channels = site.tensor.shape[-1 if site.readers[0].op != "Conv" else 1]
        largest = 0.5 + np.arange(channels) % 5
        for step, s in propose_scales(site, largest, ("equalize", "smooth")).items():
            yield f"  {step} %{name}: {rounded(s.astype(np.float64) @ np.arange(1, s.size + 1))}"
            factors = np.where(largest >= site.limit, 1, np.maximum(s, 1)).astype(np.float32) if site.limit is not None else s
            got = run_network(apply_scalings(net, {name: factors}), arrays, widen=True)
            for key, a in want.items():
                if site.limit is None:  # a Clip is the same only within the range of the samples
                    same(a, got[key], 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an edit may divide by zero
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_quantized(name):
    lines = [line for title, net in networks(name) for line in (title, *describe(net))]
    compare_with_record(GOLDEN / f"{name}.txt", lines)
