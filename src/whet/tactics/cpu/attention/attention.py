"""Attention in f32: oneDNN's products and a compiled softmax between them, for as many heads at a time as keep their scores in the cache.

Transposes around it become strides of the products; scale and mask are part of the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.backends import Backend
from whet.backends.cpu import threads
from whet.network import F32, Layer
from whet.ops._strided import View
from whet.tactics._attention import Heads, match_attention, why_not_aligned
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, count_stored_bytes, tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu.attention._softmax_ir import emit_softmax_ir
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import RTOL, OneDnnCall, is_static

_SCORES = 1 << 20  # bytes of scores that stay in the second-level caches


class _Product:
    """One of the two products for some heads, with the interface of a kernel for OneDnnCall."""

    def __init__(self, descriptor: dnn.Descriptor, places: dict[str, tuple[str, int]]) -> None:
        self.descriptor, self.places, self.scratch = descriptor, places, descriptor.scratch_bytes
        self.offsets: dict[str, int] = {}

    def call(self, args: Args, offsets: dict[str, int]) -> OneDnnCall:
        self.offsets = offsets
        return OneDnnCall(self, args)


class AttentionKernel:
    """Planned launches: for each image and each group of heads a product, the softmax, a product."""

    serial_work = 1 << 12  # scores

    deterministic = True

    def __init__(self, layer: Layer, signature: Signature, heads: Heads, products: tuple[dnn.Descriptor, dnn.Descriptor], group: int, count: int):
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        self.found, self.group, self.rtol = heads, group, RTOL["f32"]
        self.first = _Product(products[0], {"src": ("input", heads.q.place), "weights": ("input", heads.k.place), "dst": ("output", 1)})
        self.last = _Product(products[1], {"src": ("output", 1), "weights": ("input", heads.v.place), "dst": ("output", 0)})
        self.scores = -(-group * heads.rows * heads.keys * 4 // 64) * 64
        self.scratch = self.scores + max(self.first.scratch, self.last.scratch)
        self.threads = count if group * heads.rows * heads.keys > self.serial_work else 1
        self.implementation = f"softmax of {group} heads between {products[0].name} and {products[1].name}"
        scales = np.array([heads.scale, heads.cap][: 2 if heads.cap else 1], np.float32)
        packed = [Packed(f"scale|{scales.tobytes().hex()}", scales.nbytes, lambda: scales.view(np.uint8))]
        mask = None if heads.mask is None else layer.inputs[heads.mask.place]
        if mask is not None and mask.is_constant:
            array = np.ascontiguousarray(mask.array(), np.float32)
            packed.append(Packed(f"{mask.constant().digest}|f32", array.nbytes, lambda: array.reshape(-1).view(np.uint8)))
        self.packed = tuple(packed)

    def enqueue(self, args: Args, stream: Stream) -> None:
        found, group = self.found, self.group
        inner = Args(args.inputs, (args.outputs[0], args.scratch), (), args.scratch + self.scores)
        ir = emit_softmax_ir(found.mask is not None, found.keys % LANES, found.guard, bool(found.cap))
        run = jit.load_function(ir, "softmax")
        rows = group * found.rows
        for image in range(found.batch):
            for head in range(0, found.heads, group):
                at = {n: 4 * _start(v, image, head) for n, v in (("q", found.q), ("k", found.k), ("v", found.v), ("out", found.out))}
                stream.record(self.first.call(inner, {"src": at["q"], "weights": at["k"]}))
                context = [args.scratch, 0, rows, found.keys, found.rows, 0, 0, -(-rows // self.threads), args.packed[0]]
                operands: dict[int, tuple[str, int]] = {}
                shift = 0
                if found.mask is not None:
                    item = image % (found.mask.period or found.batch)
                    shift = 4 * (found.mask.offset + item * found.mask.strides[0] + head * found.mask.strides[1])
                    if len(args.packed) == 1:
                        operands[1] = ("input", found.mask.place)
                    base = args.packed[1] if len(args.packed) > 1 else args.inputs[found.mask.place]
                    context[1], context[5], context[6] = base + shift, found.mask.strides[1], found.mask.strides[2]
                stream.record(jit.ParallelCall(run, context, operands, self.threads, self.implementation, {1: shift}))
                stream.record(self.last.call(inner, {"weights": at["v"], "dst": at["out"]}))


@tactic
class Attention(CompiledTactic):
    composites = ("Attention",)
    what = "attention"

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if not is_static(layer):
            return None
        heads = match_attention(layer)
        return heads if isinstance(heads, str) else _why_not(layer, heads)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        heads = match_attention(layer)
        assert isinstance(heads, Heads)
        read = {v.place for v in (heads.q, heads.k, heads.v, heads.mask) if v is not None}
        inputs = tuple(Operand("linear", F32) if i in read and t is not None and not t.is_constant else None for i, t in enumerate(layer.inputs))
        return [Signature(inputs, (Operand("linear", F32),))]

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        heads = match_attention(layer)
        assert isinstance(heads, Heads)
        threads.set_threads(backend.threads)
        names = [[d.name for d in p.implementations() if not d.name.startswith("ref")][:2] for p in _make_products(heads, _group(heads))]
        return [(("scores", a), ("values", b)) for a in names[0] for b in names[1]]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> AttentionKernel:
        heads = match_attention(layer)
        if isinstance(heads, str) or (reason := self.why_not(layer)):
            raise PlanRefused(heads if isinstance(heads, str) else reason or "")
        threads.set_threads(backend.threads)
        wanted = dict(config)
        try:
            first, last = _make_products(heads, _group(heads))
            chosen = first.select(str(wanted["scores"])), last.select(str(wanted["values"]))
        except dnn.Unimplemented as error:
            raise PlanRefused(str(error)) from None
        return AttentionKernel(layer, signature, heads, chosen, _group(heads), backend.threads)

    def missing_library(self) -> str | None:
        return dnn.load_error()

    def library_version(self) -> str:
        return f"{dnn.get_library_version()} {jit.get_version()}"


def _why_not(layer: Layer, heads: Heads) -> str | None:
    if any(layer.needs(v.place).dtype != F32 for v in (heads.q, heads.k, heads.v)) or layer.outputs[0].dtype != F32:
        return "computes in f32"
    if heads.size % 16 or not 16 <= heads.size <= 128 or heads.value_size != heads.size:
        return f"heads of {heads.size} and {heads.value_size} elements: it takes equal ones, 16 to 128 in steps of 16"
    if reason := why_not_aligned(heads):
        return reason
    if any(layer.needs(v.place).is_constant for v in (heads.q, heads.k, heads.v)):
        return "an operand of its products is constant"
    mask = heads.mask
    if mask is not None and (layer.needs(mask.place).dtype != F32 or mask.strides[-1] != 1):
        return "takes f32 masks with one value for each key"
    return None


def _group(heads: Heads) -> int:
    """Heads of a launch: all, or as many as keep their scores in the cache. Where heads share a head of k and v, those of one of them."""
    most = max(1, _SCORES // (heads.rows * heads.keys * 4))
    sharing = [v.group for v in (heads.k, heads.v) if v.group > 1]
    return next(g for g in range(min(heads.heads, most), 0, -1) if heads.heads % g == 0 and all(n % g == 0 for n in sharing))


def _make_products(heads: Heads, group: int) -> tuple[dnn.Descriptor, dnn.Descriptor]:
    """q . k and scores . v for so many heads of one sample."""
    rows, keys, size = heads.rows, heads.keys, heads.size
    scores = dnn.describe((group, rows, keys), "f32")
    first = dnn.matmul(_describe_view(heads.q, heads, group, rows, size), _describe_view(heads.k, heads, group, size, keys), None, scores)
    last = dnn.matmul(scores, _describe_view(heads.v, heads, group, keys, size), None, _describe_view(heads.out, heads, group, rows, size))
    return first, last


def _describe_view(view: View, heads: Heads, group: int, rows: int, columns: int) -> dnn.MemoryDesc:
    head = view.steps()[1]
    if head == 0 or view.group > 1:  # the same for all heads of the launch
        return dnn.describe((1, rows, columns), "f32", strides=(rows * columns, *view.strides[-2:]))
    return dnn.describe((group, rows, columns), "f32", strides=(head, *view.strides[-2:]))


def _start(view: View, image: int, head: int) -> int:
    """Offset in elements of a head of a sample."""
    batch_step, head_step = view.steps()
    return view.offset + image * batch_step + head // view.group * head_step
