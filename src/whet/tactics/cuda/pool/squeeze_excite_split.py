"""Squeeze and excitation of images of any size in two launches: parts of the hidden values, then the gates and the image times the gates.

Measured: benchmarks/results/h100/networks.json: EfficientNet-B4 at batch 1 selects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import (
    ActivationParameters,
    Arguments,
    ConstFloatPointer,
    ConstPointer,
    ConstU16Pointer,
    FloatPointer,
    Int32,
    Pointer,
)
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, launch
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.pool._squeeze_excite import Gate, SqueezeExciteTactic, match_gate

_THREADS = 256
_GROUPS = 8  # groups of eight channels of a block: 128 bytes of a pixel
_BLOCKS = (1, 2, 4)  # blocks per multiprocessor
_MOST_WEIGHTS = 32 * 1024  # bytes of the second product's weights in shared memory


@dataclass(frozen=True)
class SqueezeExciteSplitArguments(Arguments, kernel="squeeze_excite_split.cu"):
    input: ConstPointer
    out: Pointer
    parts: FloatPointer  # [images][S][shares * columns]
    w1: ConstU16Pointer  # [columns][S][GC] both
    w2: ConstU16Pointer
    b1: ConstFloatPointer
    b2: ConstFloatPointer
    act: ActivationParameters
    act2: ActivationParameters
    channels: Int32
    pixels: Int32
    columns: Int32  # blocks along the channels
    shares: Int32  # blocks along the pixels


@tactic
class SqueezeExciteSplit(SqueezeExciteTactic):
    """Layers of the pass fuse_squeeze_excite: a multiple of 8 channels, 16-bit floats, up to 256 hidden values."""

    what = "squeeze and excitation in two launches"

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        gate = match_gate(layer)
        if isinstance(gate, str):
            return gate
        if gate.c % 8:
            return f"{gate.c} channels; takes a multiple of 8"
        if gate.hidden > _THREADS:
            return f"{gate.hidden} hidden values; takes at most {_THREADS}"
        return f"{gate.n} images; takes at most 65535" if gate.n > 65535 else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        gate = match_gate(layer)
        if isinstance(gate, str):
            return []
        configs = _list_configs(gate, backend.capabilities.multiprocessors)
        groups = {dict(c)["groups"] for c in configs}
        compile_ahead(backend, [emit_kernel_source("squeeze_excite_split.cu", _make_constants(gate, int(g), signature)) for g in groups])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        gate, (groups, shares) = match_gate(layer), (int(v) for _, v in config)
        if isinstance(gate, str):
            raise PlanRefused(gate)
        if not _fits(gate, groups, shares):
            raise PlanRefused(f"{groups} groups and {shares} shares do not divide {gate.pixels} pixels of {gate.c} channels")
        constants = _make_constants(gate, groups, signature)
        columns = _count_columns(gate, groups)
        limits = (gate.activations[0][1:], gate.activations[1][1:])
        grid = (columns * shares, gate.n, 1)

        def make(args: Args) -> list:
            w1, w2, b1, b2 = args.packed
            arguments = SqueezeExciteSplitArguments(
                args.inputs[gate.x], args.outputs[0], args.scratch, w1, w2, b1, b2, *limits, gate.c, gate.pixels, columns, shares
            )
            return [launch(entry, arguments, constants, grid, _THREADS, label=layer.name) for entry in ("squeeze", "excite")]

        name = f"squeeze, then excitation g{groups} s{shares}"
        packed = gate.pack(signature.outputs[0].dtype.numpy, columns, 8 * groups)
        return GpuKernel(layer, signature, make, implementation=name, packed=packed, scratch=gate.n * gate.hidden * columns * shares * 4)


def _make_constants(gate: Gate, groups: int, signature: Signature) -> dict[str, int]:
    """The macros of an instance."""
    activations = {"ACT": ACTIVATIONS[gate.activations[0][0]], "ACT2": ACTIVATIONS[gate.activations[1][0]]}
    return {"TYPE": TYPES[signature.outputs[0].dtype.name], "G": groups, "THREADS": _THREADS, "S": gate.hidden, **activations}


def _count_columns(gate: Gate, groups: int) -> int:
    """Blocks along the channels."""
    return -(-gate.c // (8 * groups))


def _fits(gate: Gate, groups: int, shares: int) -> bool:
    """True if the kernels support this distribution: their shared memory holds the weights, and no share of the pixels is empty."""
    return 1 <= groups <= gate.c // 8 and groups * 8 <= _THREADS and groups * 16 * gate.hidden <= _MOST_WEIGHTS and 1 <= shares <= gate.pixels


def _list_configs(gate: Gate, multiprocessors: int) -> list[Config]:
    """Groups of a block and shares of an image: a number of blocks for each multiprocessor, each with at least one pixel per thread."""
    groups = gate.c // 8
    narrow = next(g for g in range(min(groups, _GROUPS), 0, -1) if _fits(gate, g, 1))
    configs: dict[Config, None] = {}
    for width in {narrow, groups} if _fits(gate, groups, 1) else {narrow}:
        for each in _BLOCKS:
            shares = max(1, min(each * multiprocessors // (gate.n * _count_columns(gate, width)), gate.pixels * width // _THREADS))
            configs[("groups", width), ("shares", shares)] = None
    return sorted(configs)
