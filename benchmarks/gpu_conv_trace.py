"""Time distribution inside a small convolution: timestamps in the kernel (globaltimer) over a chain of overlapping launches."""

from __future__ import annotations

import sys

import numpy as np

sys.path.insert(0, "src")
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import device
from whet.backends.cuda.launch import Graph, Launch, Module
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Stream
from whet.tactics.cuda._device.source import kernel_text
from whet.tactics.cuda.conv._conv import RELU, ConvShape, PostOps, View, pack_bias
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import ConvArguments, ConvProblem, conv_launch

PAD1 = (1, 1, 1, 1)
R4B = ConvShape(1, 14, 14, 256, 256, 3, 3, pad=PAD1)
CASES = [
    (ConvShape(1, 14, 14, 64, 64), ConvConfig(1, 1, 64, stages=2)),
    (ConvShape(1, 14, 14, 1024, 256), ConvConfig(1, 1, 32, stages=8)),
    (R4B, ConvConfig(1, 1, 64, stages=6)),
    (R4B, ConvConfig(1, 1, 32, stages=4, sk=2)),
    (R4B, ConvConfig(1, 1, 32, stages=4, sk=4)),
    (R4B, ConvConfig(1, 1, 64, stages=4, sk=4)),
    (R4B, ConvConfig(1, 1, 64, stages=4, sk=8)),
    (R4B, ConvConfig(1, 1, 32, stages=9, sk=4, halo=1)),
    (ConvShape(1, 7, 7, 512, 512, 3, 3, pad=PAD1), ConvConfig(1, 1, 32, stages=9, sk=8, halo=1)),
    (ConvShape(1, 7, 7, 512, 512, 3, 3, pad=PAD1), ConvConfig(1, 1, 32, stages=6, sk=8)),
    (ConvShape(1, 14, 14, 512, 64), ConvConfig(1, 1, 64, stages=2, sk=8)),
]
NAMES = ("start", "weights asked", "previous done", "first tile", "multiplied", "cluster runs", "parts here", "end")


def sources():
    for shape, config in CASES:
        yield config, kernel_text("conv.cu", {**config.constants(im2col=not shape.plain and not config.halo, act=0, bf16=False), "TRACE": 1})


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        for _, text in sources():
            compile_cubin(text)
        sys.exit()
    device(0)
    stream = Stream()
    noise = DeviceBuffer.of((np.random.default_rng(0).standard_normal(1 << 23) / 16).astype(np.float16))
    bias = DeviceBuffer.of(pack_bias(None, 2048))
    for (shape, config), (_, text) in zip(CASES, sources(), strict=True):
        kernel = Module(compile_cubin(text)).kernel("conv", 227 * 1024)
        n = 12
        base = conv_launch(
            config,
            ConvProblem(
                shape=shape,
                input=View(noise.address, shape.c),
                weights=noise.address + (4 << 20),
                bias=bias.address,
                output=View(noise.address + (12 << 20), shape.k),
                post_ops=PostOps(RELU),
            ),
            multiprocessors=device().multiprocessors,
        )
        blocks = base.grid[0]
        traces = DeviceBuffer(n * blocks * 128)
        trace_at = ConvArguments.layout(("TRACE",))[0]["trace"]
        launches = []
        for i in range(n):
            args = bytearray(base.args + bytes(64))
            args[trace_at : trace_at + 8] = (traces.address + i * blocks * 128).to_bytes(8, "little")
            launches.append(
                Launch(kernel, base.grid, base.block, bytes(args), cluster=base.cluster, shared=base.shared if config.halo else config.shared)
            )
        graph = Graph(launches, stream)
        for _ in range(3):
            graph.run(stream)
            stream.synchronize()
        t = traces.read((n, blocks, 16), np.int64)[:, :, :8]
        print(config, shape.c, shape.k, shape.r, "blocks", blocks, "local", kernel.attribute("LOCAL_SIZE_BYTES"))
        for i in (5, 6, 7):
            zero = t[i - 1, :, 7].max()  # the last block of the previous launch has ended
            cells = [f"{name} {t[i, :, j].min() - zero}..{t[i, :, j].max() - zero}" for j, name in enumerate(NAMES) if t[i, :, j].min() > 0]
            print("  ns:", "; ".join(cells))
