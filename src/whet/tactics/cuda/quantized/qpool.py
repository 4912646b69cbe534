"""Quantized average pooling, channels last: windows and whole images, in steps of the result's scale."""

from __future__ import annotations

from collections.abc import Sequence

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.kernel import GpuKernel
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.pool.pool import counts_ceil_padding, list_pool_configs, make_pool_work
from whet.tactics.cuda.quantized._quantized import match_parts
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic


@tactic
class QPool(QuantizedTactic):
    """AveragePool and GlobalAveragePool of integers into integers, of e4m3 into e4m3."""

    ops = ("AveragePool", "GlobalAveragePool")
    float8 = True

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        x = parts.source_index()
        if x not in parts.reads or parts.stores is None or parts.steps or layer.outputs[0].type.rank != 4:
            return "pools integer images and stores integers"
        return None

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        if parts.stores is None:
            return []
        x = parts.source_index()
        ins = tuple(Operand("nhwc", parts.reads[i].dtype) if i == x else None for i in range(len(layer.inputs)))
        forms = ("nhwc", "linear") if parts.head.op == "GlobalAveragePool" else ("nhwc",)  # one value per channel is row-major as well
        return [Signature(ins, (Operand(f, parts.stores.dtype),)) for f in forms]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        parts = match_parts(layer)
        if isinstance(parts, str):
            return parts
        channels = parts.head.needs(0).shape[1]
        if channels % 8:
            return f"{channels} channels; takes a multiple of 8"
        return "ceil_mode adds padding, which the kernel does not count" if counts_ceil_padding(parts.head) else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        parts = match_parts(layer)
        return [] if isinstance(parts, str) else list_pool_configs(parts.head, backend)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        if isinstance(parts, str) or parts.stores is None:
            raise PlanRefused(str(parts))
        x = parts.source_index()
        reads, stores = parts.reads[x], parts.stores
        work = make_pool_work(parts.head, static_shape(layer.outputs[0].shape), TYPES[reads.dtype.name], TYPES[stores.dtype.name], config)
        numbers = (float(reads.zero), reads.number / stores.number, float(stores.zero))

        def make(args: Args) -> list:
            return work.launches(args.inputs[x], args, *numbers)

        return GpuKernel(layer, signature, make, implementation=f"{work.entry} of integers", scratch=work.scratch, rtol=0.0)
