"""Quantized convolutions and products that no other kernel takes (groups, odd channel counts): one thread a value.

For coverage: quantized layers keep their meaning on every GPU and for every shape.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.kernel import ACTIVATIONS, RTOL, GpuKernel, count_blocks, launch, machine_has, make_packed_array
from whet.tactics.cuda.conv._conv import TYPES, ConvShape, count_bias_floats
from whet.tactics.cuda.conv._conv import refuses as no_tensor_cores
from whet.tactics.cuda.conv.conv_generic import ConvGenericArguments
from whet.tactics.cuda.quantized._quantized import (
    INT8_TYPES,
    Factors,
    Output,
    get_quantized_conv_shape,
    list_signatures,
    make_key,
    match_parts,
    match_quantized_epilogue,
    pack_factors,
    why_not_weighted,
)
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic
from whet.tactics.cuda.quantized.qconv import merge_pixel_pairs
from whet.tactics.cuda.quantized.qgemm import filter_matrix, get_row_shape, why_not_rows


@tactic
class QConvGeneric(QuantizedTactic):
    """Conv of two spatial axes with any groups; Gemm and MatMul with a constant matrix."""

    ops = ("Conv", "Gemm", "MatMul")
    fallback = True

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        if parts.head.op == "Conv" and parts.head.needs(0).type.rank != 4:
            return "takes convolutions of two spatial axes"
        return why_not_weighted(parts) or (None if parts.head.op == "Conv" else why_not_rows(parts))

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        return list_signatures(parts, "nhwc" if parts.head.op == "Conv" else "linear")

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        parts = match_parts(layer)
        if isinstance(parts, str):
            return parts
        conv = parts.head.op == "Conv"
        epilogue = match_quantized_epilogue(parts, 1 if conv else layer.outputs[0].type.rank - 1)
        if isinstance(epilogue, str):
            return epilogue
        group = int(parts.head.attrs["group"]) if conv else 1
        s = get_quantized_conv_shape(parts) if conv else get_row_shape(parts)
        fits_tensor_cores = machine_has(backend, "wgmma") and group == 1 and s.c > 4
        if fits_tensor_cores and no_tensor_cores(merge_pixel_pairs(s) if conv else s, epilogue.residual is None, 1) is None:
            return "a tensor-core kernel takes this"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        if isinstance(parts, str):
            raise PlanRefused(parts)
        conv = parts.head.op == "Conv"
        epilogue = match_quantized_epilogue(parts, 1 if conv else layer.outputs[0].type.rank - 1)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        s: ConvShape = get_quantized_conv_shape(parts) if conv else get_row_shape(parts)
        group = int(parts.head.attrs["group"]) if conv else 1
        x, w, b = parts.operand_indices()
        weights, bias = parts.view.needs(w), None if b is None else parts.view.inputs[b]

        def filters() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32) if conv else filter_matrix(parts).astype(np.float32)
            return given.transpose(2, 3, 1, 0)  # [r, s, c of a group, k]

        def numbers() -> Factors:
            factor = np.broadcast_to(parts.reads[w].scale.astype(np.float64) * parts.reads[x].number, (s.k,))
            return Factors(factor.astype(np.float32), epilogue.bias(bias, s.k)[None], np.zeros(0, np.uint16))

        key = f"{make_key(parts, epilogue)}|direct {conv} {s}"
        packed = (
            make_packed_array(f"{key} weights", int(np.prod(static_shape(weights.shape))) * 4, filters),
            pack_factors(key, s, 1, False, numbers)[0],
        )
        kind = epilogue.post_ops.activation[0]
        stored, reads, out = signature.outputs[0].dtype.name, parts.reads[x], Output.of(parts, epilogue)
        added = stored if epilogue.residual is None else signature.needs(epilogue.residual).dtype.name
        constants = {"FROM": TYPES[reads.dtype.name], "TO": TYPES[stored], "ADD": TYPES[added], "FACTOR": 1, "ACT": ACTIVATIONS[kind]}
        count = s.m * s.k

        def make(args: Args) -> list:
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            arguments = ConvGenericArguments.of(
                s,
                group,
                addresses=(args.inputs[x], args.packed[0], args.packed[1], residual, args.outputs[0]),
                post_ops=epilogue.post_ops,
                in_zero=float(reads.zero),
                per_step=out.per_step,
                zero=out.zero,
                add_step=out.add_step,
                add_shift=out.add_shift,
                factor=args.packed[1] + count_bias_floats(s.k) * 4,
            )
            return [launch("direct", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation="direct", packed=packed, rtol=0.0 if stored in INT8_TYPES else RTOL[stored])
