"""Fused layers part by part, for GPUs without a kernel for the whole layer, such as another GPU than the engine's.

For coverage: engines with fused layers run there. No engine selects it on the GPU that it was tuned for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.backends import Backend
from whet.backends.cuda.launch import GpuWork
from whet.errors import BackendError, NetworkError
from whet.network import Layer, Tensor, Weight, static_shape
from whet.network.types import F32, I8, U8, DType
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, count_operand_bytes, tactic
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import FLOAT16_TYPES, RTOL, GpuKernel, all_static, launch, list_float_types, make_stored_signature
from whet.tactics.cuda.move.reformat import ReformatArguments, reformat_launch

_COMPOSITES = ("ConvPool", "ConvThenPointwise", "ConvSum", "DepthwiseThenPointwise", "PoolGemm", "PointwiseThenConv", "QuantizedSum", "SqueezeExcite")
_INTEGERS = (I8, U8)
_ALIGNMENT = 256
_LIBRARIES = "whet.tactics.cuda.library."
_Place = tuple[str, int]  # "input", "output" or "scratch", and the index or offset


@dataclass(frozen=True)
class _Step:
    """A part's kernel, or a conversion between formats (`shape`), and the locations of its operands and results."""

    kernel: GpuKernel | None
    reads: tuple[_Place | None, ...]
    writes: _Place
    packed: int = 0  # offset of its packed weights among all
    shape: tuple[int, ...] = ()
    forms: tuple[Operand, ...] = ()


@tactic
class Decomposed(Tactic):
    """Each part by the first tactic that takes it in the formats between the parts; slow, always available."""

    ops = ("*",)
    fallback = True

    def why_not(self, layer: Layer) -> str | None:
        return None if layer.composite in _COMPOSITES else f"decomposes {', '.join(_COMPOSITES)}, not {layer.composite or layer.op}"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or len(layer.outputs) != 1:
            return []
        places = [i for i, t in enumerate(layer.inputs) if t is not None and not t.is_constant]
        out, signatures = layer.outputs[0], []
        if out.dtype in _INTEGERS and all(layer.needs(i).dtype in _INTEGERS for i in places):
            return [make_stored_signature(layer, {i: Operand("nhwc", layer.needs(i).dtype) for i in places}, Operand("nhwc", out.dtype))]
        for dtype in list_float_types([layer.inputs[places[0]], out], (*FLOAT16_TYPES, F32)):
            images = [Operand("nhwc", dtype)]
            if layer.composite == "ConvPool":  # the image in its own format
                images = [Operand(f, t) for t in dict.fromkeys((F32, dtype)) for f in ("linear", "nhwc")]
            results = [Operand("nhwc", dtype)] if out.type.rank == 4 else [Operand("linear", t) for t in dict.fromkeys((F32, dtype))]
            signatures += [make_stored_signature(layer, dict.fromkeys(places, image), result) for image in images for result in results]
        return list(dict.fromkeys(signatures))

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        steps, scratch = _list_steps(layer, signature, backend)
        kernels = [s.kernel for s in steps if s.kernel is not None]
        own = max((k.scratch for k in kernels), default=0)

        def make(args: Args) -> list:
            def find_address(place: _Place | None) -> int:
                if place is None:
                    return 0
                kind, which = place
                return args.scratch + which if kind == "scratch" else args.inputs[which] if kind == "input" else args.outputs[which]

            launches: list[GpuWork] = []
            for s in steps:
                if s.kernel is None:
                    launches.append(_move(s, find_address(s.reads[0]), find_address(s.writes)))
                    continue
                mine = args.packed[s.packed : s.packed + len(s.kernel.packed)]
                launches += s.kernel.launches(Args(tuple(find_address(r) for r in s.reads), (find_address(s.writes),), mine, args.scratch + scratch))
            return launches

        name = "parts: " + " + ".join(k.implementation for k in kernels)
        ends = [RTOL.get(o.dtype.name, 0.0) for o in (*signature.inputs, *signature.outputs) if o is not None]
        rtol = 1.5 * max(*ends, *(k.rtol for k in kernels))  # intermediate values are rounded as well
        return GpuKernel(layer, signature, make, implementation=name, packed=[p for k in kernels for p in k.packed], scratch=scratch + own, rtol=rtol)


def _move(step: _Step, source: int, target: int) -> GpuWork:
    entry, constants, grid, rows, columns = reformat_launch(step.shape, *step.forms)
    count = 1
    for d in step.shape:
        count *= d
    return launch(entry, ReformatArguments(source, target, count, rows, columns), constants, grid, 256)


def _list_steps(layer: Layer, signature: Signature, backend: Backend) -> tuple[list[_Step], int]:
    """The parts in order with the conversions of their operands, and bytes of scratch. Raises PlanRefused."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    stored = [o for o in (*signature.inputs, *signature.outputs) if o is not None]
    dtype = next((o.dtype for o in stored if o.dtype in FLOAT16_TYPES), F32)
    if layer.composite == "SqueezeExcite" and dtype in FLOAT16_TYPES:
        # the exponential of a gate amplifies a hidden value's rounding without bound, so gates are computed in f32 in every engine;
        # their weights are those of the kernel that does the whole
        outer = {inner: _round_matrix(t, dtype) for inner, t in outer.items()}
        dtype = F32
    stored_at: dict[Tensor, tuple[_Place, Operand]] = {}
    for i, (t, o) in enumerate(zip(layer.inputs, signature.inputs, strict=True)):
        if t is not None and o is not None:
            stored_at[t] = ("input", i), o
    steps: list[_Step] = []
    used = packed = 0

    def reserve_scratch(t: Tensor, o: Operand) -> _Place:
        nonlocal used
        place = ("scratch", used)
        used += -(-count_operand_bytes(t, o) // _ALIGNMENT) * _ALIGNMENT
        return place

    def convert_operand(t: Tensor, wanted: Operand) -> _Place:
        """The location of a value in a format; converts the value if it has another format."""
        place, has = stored_at[t]
        if has == wanted:
            return place
        to = reserve_scratch(t, wanted)
        steps.append(_Step(None, (place,), to, shape=static_shape(t.shape), forms=(has, wanted)))
        return to

    for part in body.layers:
        view = with_outer_inputs(part, outer)
        kernel, own = _select_kernel(view, dtype, backend)
        reads = tuple(None if t is None or o is None else convert_operand(t, o) for t, o in zip(view.inputs, own.inputs, strict=True))
        made, last = view.outputs[0], part is body.layers[-1]
        direct = last and own.outputs[0] == signature.outputs[0]
        place: _Place = ("output", 0) if direct else reserve_scratch(made, own.outputs[0])
        steps.append(_Step(kernel, reads, place, packed))
        packed += len(kernel.packed)
        stored_at[made] = place, own.outputs[0]
        if last and not direct:
            forms = (own.outputs[0], signature.outputs[0])
            steps.append(_Step(None, (place,), ("output", 0), shape=static_shape(made.shape), forms=forms))
    return steps, used


def _round_matrix(t: Tensor | None, dtype: DType) -> Tensor | None:
    """A weight matrix rounded to a smaller type, in its original type; other tensors unchanged."""
    if t is None or not t.is_constant or not t.dtype.is_float or t.type.rank < 2:
        return t
    weight = t.constant()
    return Tensor(f"{t.name} in {dtype}", t.type, weight=Weight(weight.array.astype(dtype.numpy).astype(weight.array.dtype), weight.origin))


def _select_kernel(part: Layer, dtype: DType, backend: Backend) -> tuple[GpuKernel, Signature]:
    """The first kernel for a part, with 4-D tensors channels last and others row-major. Raises PlanRefused."""
    from whet.tactics import list_tactics  # it loads the backend's tactics; an engine loads only those that it names

    def list_operands(t: Tensor) -> Sequence[Operand]:
        return [Operand(f, t.dtype if t.dtype in _INTEGERS else dtype) for f in (("nhwc", "linear") if t.type.rank == 4 else ("linear",))]

    for t in sorted((t for t in list_tactics(backend.name) if not isinstance(t, Decomposed)), key=lambda t: (t.fallback, t.name)):
        # Library tactics are excluded, so that the layer runs without libraries, and with --pure.
        if type(t).__module__.startswith(_LIBRARIES) or t.why_not(part) is not None:
            continue
        for s in t.signatures(part, backend):
            fed = zip(part.inputs, s.inputs, strict=True)
            if (
                s.inplace
                or s.outputs[0] not in list_operands(part.outputs[0])
                or any(o is not None and (x is None or o not in list_operands(x)) for x, o in fed)
            ):
                continue
            if t.refuses(part, s, backend) is not None:
                continue
            for config in t.configs(part, s, backend):
                try:
                    kernel = t.plan(part, s, config, backend)
                except (PlanRefused, BackendError, NetworkError):
                    continue
                if isinstance(kernel, GpuKernel):
                    return kernel, s
    raise PlanRefused(f"its part {part.op} '{part.name}' has no kernel in {dtype}")
