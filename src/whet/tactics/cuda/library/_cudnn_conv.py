"""Base of the cuDNN tactics: convolutions and transposed ones by an engine of the library, their epilogue in its graph or in a kernel of whet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.backends.cuda.cudnn import library
from whet.backends.cuda.cudnn.convolution import B, Convolution, Knobs, Plan, Proposal, W, X, Y, Z, get_graph, is_fusible, plan_of
from whet.backends.cuda.cudnn.launch import CudnnLaunch
from whet.errors import BackendError
from whet.network import Layer, Tensor, static_shape
from whet.network.types import DType
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic
from whet.tactics._fused import find_epilogue_steps, get_operand_indices, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    RTOL,
    TYPE,
    Epilogue,
    GpuKernel,
    all_static,
    count_blocks,
    launch,
    list_float_types,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv.conv import why_not_conv
from whet.tactics.cuda.elementwise.elementwise import WHOLE, ElementwiseArguments, find_spread, format_number, get_index_type, make_operands
from whet.tactics.cuda.library._library_gemm import TF32_RTOL

MOST_FUSED, MOST_APART, MOST_COMPILED = (
    16,
    8,
    1,
)  # engines to time: with the epilogue in the graph, with a separate one, compiled at run time
MOST_WORKSPACE = 512 << 20  # bytes; FFT engines need more than a gigabyte for filters with many channels
_COMPILED = "compiled at run time"  # these cost a build a second and more each
_NEVER = ("down-convert", "reduced-precision sums")  # operands or sums in fewer bits than the storage type: no bound of ours holds
_SPECIAL_FILTERS = ("int8x32 filters", "int8x32 bias")
#: transforms lose digits: bounds by the library's note, for operands in f32; 16-bit operands keep at most 2**3 of their roundings
_WINOGRAD = {"Winograd": 5e-5, "Winograd 4x4": 1e-4, "Winograd 6x6": 5e-4, "Winograd 13x13": 5e-3, "FFT": 5e-5}


class LibraryConvolution(Tactic):
    """Base of the tactics: `kinds` are the storage types, `math` the precision of f32 operands ("tf32" may round them).

    Selected by name only (`--tacticSources=+CUDNN`): listing, compiling and timing a library's engines takes build time, and a whet engine
    with these tactics needs the library at run time.
    """

    library = "cuDNN"
    ops: tuple[str, ...] = ("Conv", "ConvTranspose")
    kinds: tuple[DType, ...] = ()
    formats: tuple[str, ...] = ("nhwc",)
    math = "f32"
    opt_in = True

    def library_version(self) -> str:
        return library.get_version()

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        return why_not_conv(layer, head)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        steps = find_epilogue_steps(layer) or ()
        x = get_operand_indices(layer)[0]
        others = [p.other for p in steps if p.other is not None and not layer.needs(p.other).is_constant]
        if any(layer.needs(i).type.rank != 4 for i in others):
            return []
        types = list_float_types([get_root_layer(layer).inputs[0], layer.outputs[0]], self.kinds)
        return [make_stored_signature(layer, {i: Operand(f, t) for i in (*others, x)}, Operand(f, t)) for t in types for f in self.formats]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not backend.capabilities.executes:
            return "the library plans on the GPU that it runs on"
        if library.load_library() is None:
            return "libcudnn 9 with the cuBLASLt that it needs is not installed: pip install whet[cudnn]"
        epilogue = match_cudnn_epilogue(layer)
        return epilogue if isinstance(epilogue, str) else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        epilogue = match_cudnn_epilogue(layer)
        if isinstance(epilogue, str):
            return []
        configs: list[Config] = []
        out = signature.outputs[0]
        for form, most in (("fused", MOST_FUSED), ("apart", MOST_APART)):
            work = work_of(layer, out, epilogue, form)
            if work is None or (form == "apart" and not _has_epilogue(layer, epilogue)):
                continue
            try:
                proposals = get_graph(work).proposals()
            except BackendError:
                continue  # no graph of this form: the reason is the same for every engine
            configs += [self._config(form, p) for p in self.choose_proposals(proposals, most, work.last)]
        return configs

    def choose_proposals(self, proposals: Sequence[Proposal], most: int, last: bool = True) -> list[Proposal]:
        """At most `most` of the permitted ones: half from the heuristics' order, then each engine once, then the rest of that order.

        Engines that are compiled at run time only as a last resort: for graphs with steps that no precompiled engine has.
        """
        allowed = [p for p in proposals if self.why_not_allowed(p.notes, last) is None]
        ready = [p for p in allowed if _COMPILED not in p.notes]
        allowed = ready or allowed[:MOST_COMPILED]
        first = [p for p in allowed if p.source != "all"][: most // 2]
        seen, once = {p.engine for p in first}, []
        for p in allowed:
            if p.engine not in seen:
                seen.add(p.engine)
                once.append(p)
        return list(dict.fromkeys((*first, *once, *(p for p in allowed if p.source != "all"))))[:most]

    def why_not_allowed(self, notes: frozenset[str], last: bool = True) -> str | None:
        """Why an engine with these notes may not compute here (`last`: channels last), or None."""
        for note in (*_NEVER, *_SPECIAL_FILTERS):
            if note in notes:
                return f"its engine is marked '{note}'"
        if self.math == "f32" and "tensor core" in notes:
            return "tensor cores would round f32 operands to TF32"
        if self.math == "tf32" and "tensor core" not in notes:
            return "this engine computes in full f32: cudnn_f32 has it"
        if _COMPILED in notes and not last:
            return "channels first, an engine compiled at run time gave wrong results (cuDNN 9.19, engine 72)"
        return None

    def _config(self, form: str, p: Proposal) -> Config:
        return (("math", self.math), ("form", form), ("engine", p.engine), *((f"k{k}", v) for k, v in p.knobs))

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = match_cudnn_epilogue(layer)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        form, engine, knobs = self._read(config)
        out = signature.outputs[0]
        work = work_of(layer, out, epilogue, form)
        if work is None:
            raise PlanRefused("the library's graph has no such epilogue")
        plan = plan_of(work, engine, knobs)
        reason = self.why_not_allowed(plan.notes, work.last)
        if reason:
            raise PlanRefused(reason)
        if plan.workspace > MOST_WORKSPACE:
            raise PlanRefused(f"engine {engine} asks for {plan.workspace >> 20} MiB of workspace")
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        dtype, channels = out.dtype, work.y[1]
        bias_type = dtype.numpy if form == "fused" else np.dtype(np.float32)
        follows = form == "apart"

        def filters() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32)
            return (given.transpose(0, 2, 3, 1) if work.last else given).astype(dtype.numpy)

        packed = (
            make_packed_array(
                f"{weights.constant().digest}|cudnn {'krsc' if work.last else 'kcrs'} {dtype}", _count(work.w) * dtype.bits // 8, filters
            ),
            make_packed_array(
                f"bias {own.constant().digest if own is not None else ''} {epilogue.key} {channels} {bias_type}",
                channels * bias_type.itemsize,
                lambda: epilogue.bias(own, channels).astype(bias_type),
            ),
        )

        def make(args: Args) -> list:
            addresses = {X: args.inputs[x], W: args.packed[0], Y: args.outputs[0]}
            if work.residual and epilogue.residual is not None:
                addresses[Z] = args.inputs[epilogue.residual]
            if work.bias:
                addresses[B] = args.packed[1]
            launches: list[Any] = [CudnnLaunch(plan, addresses, -(-args.scratch // 256) * 256)]
            if follows:
                residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
                launches.append(_make_post_ops_launch(work, epilogue, args.outputs[0], args.packed[1], residual))
            return launches

        kernel = GpuKernel(
            layer,
            signature,
            make,
            implementation=f"cuDNN {self.math} engine {engine}{_describe_plan(plan)}{', epilogue apart' if follows else ''}",
            packed=packed,
            scratch=256 + plan.workspace,
            rtol=self.bound(plan.notes, dtype),
        )
        kernel.deterministic = "nondeterministic" not in plan.notes
        return kernel

    def bound(self, notes: frozenset[str], dtype: DType) -> float:
        """The error bound: of the type or TF32, wider if the engine transforms its operands."""
        base = TF32_RTOL if self.math == "tf32" else RTOL[dtype.name]
        wide = max((limit for note, limit in _WINOGRAD.items() if note in notes), default=0.0)
        return max(base, wide) if dtype.bits == 32 and self.math == "f32" else base * (4 if wide else 1)

    def _read(self, config: Config) -> tuple[str, int, Knobs]:
        """(form, engine, knobs) of a config. Raises PlanRefused for a config of another tactic."""
        fields = dict(config)
        math, form, engine = fields.pop("math", None), fields.pop("form", None), fields.pop("engine", None)
        knobs = [(int(k[1:]), v) for k, v in fields.items() if k[:1] == "k" and k[1:].isdigit() and isinstance(v, int)]
        if math != self.math or form not in ("fused", "apart") or not isinstance(engine, int) or engine < 0 or len(knobs) != len(fields):
            raise PlanRefused(f"this tactic computes in {self.math} by an engine of the library with its knobs, not {dict(config)}")
        return str(form), engine, tuple(sorted(knobs))


def work_of(layer: Layer, stored: Operand, epilogue: Epilogue, form: str) -> Convolution | None:
    """The layer as the library's graph: with its epilogue ("fused"; None if it has no such step) or without it ("apart")."""
    head = get_root_layer(layer)
    a, transposed = head.attrs, head.op == "ConvTranspose"
    x, w, y = (_get_image_sizes(t) for t in (head.needs(0), head.needs(1), layer.outputs[0]))
    stride, dilation = tuple(a.get("strides") or (1, 1)), tuple(a.get("dilations") or (1, 1))
    pad = tuple(a.get("pads") or (0, 0, 0, 0))
    kind, low, high = activation = epilogue.post_ops.activation
    nothing = (kind, low, high) == ("clip", -np.inf, np.inf)
    plain = Convolution(x, w, y, stride, pad, dilation, stored.dtype.name, stored.format == "nhwc", transposed)
    if form == "apart" or not _has_epilogue(layer, epilogue):
        return plain
    if not nothing and not is_fusible(activation):
        return None
    return replace(
        plain,
        bias=True,  # zeros for a convolution without a bias: the precompiled engines need one
        residual=epilogue.post_ops.residual,
        activation=None if nothing else activation,
    )


def _get_image_sizes(t: Tensor) -> tuple[int, int, int, int]:
    n, c, h, w = static_shape(t.shape)
    return n, c, h, w


def match_cudnn_epilogue(layer: Layer) -> Epilogue | str:
    """The epilogue as cuDNN computes it, or why it cannot."""
    return match_epilogue(layer, find_epilogue_steps(layer))


def _has_epilogue(layer: Layer, epilogue: Epilogue) -> bool:
    """True if a bias, a residual or an activation follows the convolution."""
    own = (*get_root_layer(layer).inputs, None)[:3][2]
    return own is not None or bool(epilogue.biases) or epilogue.residual is not None or epilogue.post_ops.activation != ("clip", -np.inf, np.inf)


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape))


def _describe_plan(plan: Plan) -> str:
    """The engine's notable properties."""
    told = sorted(n for n in plan.notes if n.startswith(("Winograd", "FFT", "compiled", "nondet")))
    return f" ({', '.join(told)})" if told else ""


def _make_post_ops_launch(work: Convolution, epilogue: Epilogue, address: int, bias: int, residual: int) -> Any:
    """Bias, residual and activation over a stored result, in place; `address`, `bias` and `residual` (0: none) are device addresses."""
    kind, low, high = epilogue.post_ops.activation
    add = "{{ const Vec8 y = operand(p, {}, at, length); for (int e = 0; e < 8; ++e) x.v[e] += y.v[e]; }} "
    act = f"for (int e = 0; e < 8; ++e) x.v[e] = activate<{ACTIVATIONS[kind]}>(x.v[e], Act{{{format_number(low)}, {format_number(high)}}}); "
    position = epilogue.post_ops.residual
    steps = [add.format(1), *([add.format(2)] if position == 1 else []), act, *([add.format(2)] if position == 2 else [])]
    kind_of = TYPE[work.dtype]
    channels = find_spread((1, work.y[1], 1, 1), work.y, "nhwc" if work.last else "linear")
    assert channels is not None
    rows = make_operands((address, kind_of, WHOLE), (bias, 0, channels), *([(residual, kind_of, WHOLE)] if residual else []))
    count = _count(work.y)
    constants = {"TYPE": kind_of, "INDEX": get_index_type(count), "STEPS": "".join(steps)}
    arguments = ElementwiseArguments(out=address, input=rows, count=count)
    return launch("pointwise", arguments, constants, (count_blocks(count, 2048), 1, 1), 256)
