"""Correctness of the tensor-core convolution: shapes x configurations against float32 accumulation on the CPU, outputs poisoned before each run.

Usage: python3 benchmarks/gpu_conv_check.py [first last]   (cases by number; each prints one line)
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import numpy as np

sys.path.insert(0, "src")
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import device
from whet.backends.cuda.launch import Graph
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Event, Stream
from whet.tactics.cuda.conv._conv import RELU, ConvShape, PostOps, View, pack_bias, pack_weights
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, conv_launch, conv_source

PAD1 = (1, 1, 1, 1)
CASES = [
    (ConvShape(1, 14, 14, 64, 64), ConvConfig(1, 1, 64), False),
    (ConvShape(1, 14, 14, 256, 1024), ConvConfig(1, 1, 64, stages=4), True),
    (ConvShape(1, 14, 14, 256, 256, 3, 3, pad=PAD1), ConvConfig(1, 1, 64, stages=4), True),
    (ConvShape(2, 28, 28, 128, 128, 3, 3, pad=PAD1), ConvConfig(2, 1, 128, stages=3), True),
    (ConvShape(1, 14, 14, 256, 256, 3, 3, pad=PAD1), ConvConfig(1, 1, 64, stages=6, sk=8), True),
    (ConvShape(1, 7, 7, 512, 512, 3, 3, pad=PAD1), ConvConfig(1, 1, 32, stages=6, sk=8), False),
    (ConvShape(1, 7, 7, 2048, 512), ConvConfig(1, 1, 64, stages=4, sk=16), True),
    (ConvShape(2, 56, 56, 256, 512, stride=(2, 2)), ConvConfig(1, 1, 128, stages=4), False),
    (ConvShape(3, 57, 41, 72, 40, 3, 3, (2, 1), (2, 1, 0, 1), (1, 2)), ConvConfig(1, 1, 32, stages=4), True),
    (ConvShape(3, 19, 23, 24, 72, 5, 5, pad=(2, 2, 2, 2)), ConvConfig(1, 1, 32, bk=32, stages=4), True),
    (ConvShape(3, 19, 23, 16, 24, 3, 3, pad=PAD1), ConvConfig(1, 1, 16, bk=16, stages=4), True),
    (ConvShape(16, 28, 28, 128, 512), ConvConfig(2, 2, 128, stages=2), True),
    (ConvShape(16, 28, 28, 128, 512), ConvConfig(2, 1, 256, stages=2), True),
    (ConvShape(16, 28, 28, 128, 384, 3, 3, pad=PAD1), ConvConfig(2, 1, 192, stages=3), True),
    (ConvShape(8, 56, 56, 64, 64, 3, 3, pad=PAD1), ConvConfig(2, 1, 64, stages=4, blocks=2), True),
    (ConvShape(1, 28, 28, 128, 128, 3, 3, pad=PAD1), ConvConfig(2, 1, 32, stages=4, sk=4), True),
    (ConvShape(1, 1, 1, 2048, 1000), ConvConfig(1, 1, 16, stages=6, sk=8), False),
]
CASES += [
    (shape, replace(config, direct=1), with_residual) for shape, config, with_residual in CASES if config.sk == config.mi == 1 and config.bn <= 128
]
CASES += [
    (ConvShape(1, 14, 14, 256, 256, 3, 3, pad=PAD1), ConvConfig(1, 1, 32, stages=9, sk=4, halo=1), True),
    (ConvShape(1, 14, 14, 256, 256, 3, 3, pad=PAD1), ConvConfig(1, 1, 64, stages=6, sk=8, halo=2), True),
    (ConvShape(1, 7, 7, 512, 512, 3, 3, pad=PAD1), ConvConfig(1, 1, 32, stages=9, sk=8, halo=1), False),
    (ConvShape(8, 56, 56, 64, 64, 3, 3, pad=PAD1), ConvConfig(2, 1, 64, stages=9, halo=2, direct=1), True),
    (ConvShape(3, 27, 19, 72, 40, 5, 3, pad=(2, 1, 2, 1)), ConvConfig(2, 1, 32, stages=6, halo=2, direct=1), True),
    (ConvShape(3, 27, 19, 24, 40, 3, 3, pad=PAD1), ConvConfig(1, 1, 32, bk=32, stages=6, halo=2, direct=1), True),
    (ConvShape(3, 27, 19, 16, 40, 3, 3, pad=PAD1), ConvConfig(1, 2, 32, bk=16, stages=6, halo=2, direct=1), True),
]
CASES += [(ConvShape(2, 20, 20, 512, 255), ConvConfig(1, 1, 64, stages=4, direct=1), False)]
CASES += [(ConvShape(8, 28, 28, 128, 384, 3, 3, pad=PAD1), ConvConfig(3, 1, 128, stages=3), True)]


def reference(shape: ConvShape, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The convolution's float32 sums, [n, p, q, k]."""
    t, left, b, right = shape.pad
    padded = np.pad(x.astype(np.float32), ((0, 0), (t, b), (left, right), (0, 0)))
    out = np.zeros((shape.n, shape.p, shape.q, shape.k), np.float32)
    (sh, sw), (dh, dw) = shape.stride, shape.dilation
    for r in range(shape.r):
        for s in range(shape.s):
            window = padded[:, r * dh : r * dh + (shape.p - 1) * sh + 1 : sh, s * dw : s * dw + (shape.q - 1) * sw + 1 : sw]
            out += window @ weights[:, :, r, s].T.astype(np.float32)
    return out


def run(number: int) -> dict:
    shape, config, with_residual = CASES[number]
    rng = np.random.default_rng(number)
    x = rng.standard_normal((shape.n, shape.h, shape.w, shape.c)).astype(np.float16)
    weights = (rng.standard_normal((shape.k, shape.c, shape.r, shape.s)) / np.sqrt(shape.c * shape.r * shape.s)).astype(np.float16)
    bias = rng.standard_normal(shape.k).astype(np.float32)
    residual = rng.standard_normal((shape.n, shape.p, shape.q, shape.k)).astype(np.float16)
    want = reference(shape, x, weights) + bias + (residual if with_residual else 0)
    want = np.maximum(want, 0)
    device(0)
    stream = Stream()
    pitch = shape.k + 16 if shape.k % 8 == 0 else shape.k + 9  # the output starts 8 channels into a wider tensor
    bx, bw, bb, br = (DeviceBuffer.of(a) for a in (x, pack_weights(weights, config.bk, np.dtype(np.float16)), pack_bias(bias, shape.k), residual))
    out = DeviceBuffer(shape.m * pitch * 2)
    out.fill(0xFF)  # NaN
    launch = conv_launch(
        config,
        ConvProblem(
            shape=shape,
            input=View(bx.address, shape.c),
            weights=bw.address,
            bias=bb.address,
            output=View(out.address + 16, pitch),
            residual=View(br.address, shape.k) if with_residual else None,
            post_ops=PostOps(RELU),
        ),
        multiprocessors=device().multiprocessors,
    )
    launch.run(stream)
    stream.synchronize()
    got = out.read((shape.m, pitch), np.float16)
    inside = got[:, 8 : 8 + shape.k].astype(np.float32).reshape(want.shape)
    error = float(np.linalg.norm(inside - want) / np.linalg.norm(want))
    untouched = bool(np.isnan(got[:, :8].astype(np.float32)).all() and np.isnan(got[:, 8 + shape.k :].astype(np.float32)).all())
    graph = Graph([launch] * 50, stream)
    graph.run(stream)
    start, end = Event(), Event()
    start.record(stream)
    graph.run(stream)
    end.record(stream)
    end.synchronize()
    again = out.read((shape.m, pitch), np.float16)
    us = end.since(start) * 1000 / 50
    return {
        "case": number,
        "shape": str(shape),
        "config": str(config),
        "error": error,
        "untouched": untouched,
        "same_again": bool(np.array_equal(got.view(np.uint16), again.view(np.uint16))),
        "us": round(us, 2),
        "tflops": round(shape.flops / us / 1e6, 1),
        "regs": launch.kernel.attribute("NUM_REGS"),
        "local": launch.kernel.attribute("LOCAL_SIZE_BYTES"),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        for shape, config, _ in CASES:
            compile_cubin(conv_source(config, Features(not shape.plain and not config.halo)))
        sys.exit()
    first, last = (int(a) for a in sys.argv[1:3]) if len(sys.argv) > 2 else (0, len(CASES))
    for case in range(first, min(last, len(CASES))):
        begun = time.time()
        print(json.dumps(run(case)), round(time.time() - begun, 2), flush=True)
