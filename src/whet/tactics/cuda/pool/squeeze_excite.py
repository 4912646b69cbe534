"""Squeeze and excitation in one launch: means over the image, two small products, and the image times the gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, ConstU16Pointer, Pointer
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, launch, machine_has
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.pool._squeeze_excite import Gate, SqueezeExciteTactic, match_gate

_CLUSTERS = (8, 4)  # blocks of an image
_ITEMS = {256: 20, 512: 14}  # pixels that a thread can hold in registers
_SHARED = 48 * 1024
_MOST_CONFIGS = 16


@dataclass(frozen=True)
class SqueezeExciteArguments(Arguments, kernel="squeeze_excite.cu"):
    input: ConstPointer
    out: Pointer
    w1: ConstU16Pointer  # [CC][S][GC] both
    w2: ConstU16Pointer
    b1: ConstFloatPointer
    b2: ConstFloatPointer
    act: ActivationParameters
    act2: ActivationParameters


@dataclass(frozen=True)
class _Split:
    """Distribution of an image to a cluster: blocks along channels and pixels, threads of a block."""

    channels: int
    pixels: int
    threads: int

    def items(self, gate: Gate) -> int:
        """Pixels that a thread holds."""
        rows = self.threads // (gate.c // 8 // self.channels)
        share = -(-gate.pixels // self.pixels)
        return -(-share // rows) if rows else share

    def shared(self, gate: Gate) -> int:
        """Bytes of static shared memory; mirrors squeeze_excite.cu."""
        own = gate.c // self.channels
        return self.threads * 32 + own * 8 + gate.hidden * (own * 2 + self.channels * self.pixels * 4 + 4) + 64

    def fits(self, gate: Gate) -> bool:
        """True if the kernel supports this distribution."""
        own = gate.c // self.channels
        whole = gate.c % (8 * self.channels) == 0 and max(own, gate.hidden) <= self.threads and self.pixels <= gate.pixels
        cluster = self.channels * self.pixels
        return whole and cluster in _CLUSTERS and self.items(gate) <= _ITEMS.get(self.threads, 0) and self.shared(gate) <= _SHARED


@tactic
class SqueezeExcite(SqueezeExciteTactic):
    """Layers of the pass fuse_squeeze_excite: a multiple of 8 channels, 16-bit floats; the image fits a cluster's registers."""

    what = "squeeze and excitation"

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's clusters (sm_90)"
        gate = match_gate(layer)
        if isinstance(gate, str):
            return gate
        if _list_splits(gate, backend.capabilities.multiprocessors):
            return None
        return f"no cluster of blocks holds {gate.pixels} pixels of {gate.c} channels, {gate.hidden} hidden values"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        gate = match_gate(layer)
        if isinstance(gate, str):
            return []
        ways = _list_splits(gate, backend.capabilities.multiprocessors)
        compile_ahead(backend, [emit_kernel_source("squeeze_excite.cu", _make_constants(gate, w, signature)) for w in ways])
        return [(("channels", w.channels), ("pixels", w.pixels), ("threads", w.threads)) for w in ways]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        gate, way = match_gate(layer), _Split(**{k: int(v) for k, v in config})
        if isinstance(gate, str):
            raise PlanRefused(gate)
        if not way.fits(gate):
            raise PlanRefused(f"{way} does not divide {gate.pixels} pixels of {gate.c} channels")
        constants = _make_constants(gate, way, signature)
        packed = gate.pack(signature.outputs[0].dtype.numpy, way.channels, gate.c // way.channels)

        def make(args: Args) -> list:
            cluster = way.channels * way.pixels
            limits = (gate.activations[0][1:], gate.activations[1][1:])
            w1, w2, b1, b2 = args.packed
            arguments = SqueezeExciteArguments(args.inputs[gate.x], args.outputs[0], w1, w2, b1, b2, *limits)
            return [launch("squeeze", arguments, constants, (gate.n * cluster, 1, 1), way.threads, cluster=cluster, label=layer.name)]

        name = f"squeeze and excitation c{way.channels} p{way.pixels} t{way.threads}"
        return GpuKernel(layer, signature, make, implementation=name, packed=packed)


def _make_constants(gate: Gate, way: _Split, signature: Signature) -> dict[str, int]:
    """The macros of an instance."""
    return {
        "TYPE": TYPES[signature.outputs[0].dtype.name], "G": gate.c // 8 // way.channels, "CC": way.channels, "CP": way.pixels,
        "THREADS": way.threads, "ITEMS": way.items(gate), "S": gate.hidden, "PIXELS": gate.pixels,
        "ACT": ACTIVATIONS[gate.activations[0][0]], "ACT2": ACTIVATIONS[gate.activations[1][0]],
    }  # fmt: skip


def _list_splits(gate: Gate, multiprocessors: int) -> list[_Split]:
    """The ways that fit, the most promising first."""
    configs: dict[_Split, float] = {}
    for cluster in _CLUSTERS:
        for channels in (d for d in range(1, cluster + 1) if cluster % d == 0):
            for threads in _ITEMS:
                way = _Split(channels, cluster // channels, threads)
                if way.fits(gate):
                    configs[way] = _estimate(gate, way, multiprocessors)
    return sorted(configs, key=lambda w: (configs[w], w.channels, w.threads))[:_MOST_CONFIGS]


def _estimate(gate: Gate, way: _Split, multiprocessors: int) -> float:
    """A rough time in ns, which only orders candidates. A multiprocessor reads and writes about 60 bytes per ns."""
    blocks, own = gate.n * way.channels * way.pixels, gate.c // way.channels
    turns = -(-blocks // (multiprocessors * (1024 // way.threads)))
    return turns * (2500 + way.items(gate) * way.threads * 32 / 60 + gate.hidden * own / way.threads * 20)
