"""Consecutive max poolings and the Concat of their results, in one launch: a block keeps 16 bytes of an image's channels in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from whet.backends import Backend
from whet.network import I8, U8, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstUint4Pointer, Int32, Uint4Pointer
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, get_shared_limit, launch, list_float_types, make_stored_signature
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES

_MOST_THREADS = 1024


@dataclass(frozen=True)
class PoolChainArguments(Arguments, kernel="pool_chain.cu"):
    input: ConstUint4Pointer
    out: Uint4Pointer
    groups: Int32  # of 16 bytes of channels


@tactic
class PoolChain(Tactic):
    """Layers of fuse_pool_chain, in floats or 8-bit integers, channels last."""

    ops = ("*",)
    composites = ("PoolChain",)
    what = "max poolings in a row with their Concat"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer):
            return []
        x = layer.needs(0)
        types = [x.dtype] if x.dtype in (I8, U8) else list_float_types([x, layer.outputs[0]])
        return [make_stored_signature(layer, {0: Operand("nhwc", t)}, Operand("nhwc", t)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        n, c, h, w = static_shape(layer.needs(0).shape)
        if c % (each := _count_channels_per_vector(signature)):
            return f"{c} channels; takes a multiple of {each}"
        if n > 65535:
            return f"{n} samples; takes at most 65535"
        if (need := _count_shared_bytes(h, w)) > (limit := get_shared_limit(backend)):
            return f"an image of {h}x{w} needs {need} bytes of shared memory; a block has {limit}"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        _, c, h, w = static_shape(layer.needs(0).shape)
        sides = [
            side
            for side in (1, 2)
            if c % (side * _count_channels_per_vector(signature)) == 0 and _count_shared_bytes(h, w, side) <= get_shared_limit(backend)
        ]
        configs: list[Config] = [(("side", side),) for side in sides]
        compile_ahead(backend, [emit_kernel_source("pool_chain.cu", make_macros(layer, signature, side)) for side in sides])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        n, c, h, w = static_shape(layer.needs(0).shape)
        side = int(dict(config).get("side", 1))
        constants = make_macros(layer, signature, side)

        def make(args: Args) -> list:
            groups, shared = c // _count_channels_per_vector(signature), _count_shared_bytes(h, w, side)
            arguments = PoolChainArguments(args.inputs[0], args.outputs[0], groups)
            return [launch("pool_chain", arguments, constants, (groups // side, n, 1), constants["THREADS"], shared=shared, label=layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"{constants['POOLS']} poolings" + " by two" * (side == 2), rtol=0.0)


def _count_channels_per_vector(signature: Signature) -> int:
    """Channels in 16 bytes."""
    return 128 // signature.outputs[0].dtype.bits


def _count_shared_bytes(h: int, w: int, side: int = 1) -> int:
    """Bytes: `side` times 16 of channels of an image, twice."""
    return 2 * 16 * side * h * w


def make_macros(layer: Layer, signature: Signature, side: int) -> dict[str, int]:
    """The macros of an instance."""
    h, w = static_shape(layer.needs(0).shape)[2:]
    pools = [x for x in layer.regions["body"].layers if x.op == "MaxPool"]
    kind = signature.outputs[0].dtype.name
    each = -(-h * w * side // _MOST_THREADS)  # of a thread
    threads = -(-h * w * side // (32 * each)) * 32
    return {"TYPE": TYPES[kind], "H": h, "W": w, "R": int(pools[0].attrs["kernel_shape"][0]), "POOLS": len(pools), "SIDE": side, "THREADS": threads}
