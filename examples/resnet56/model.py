"""CIFAR-10's ResNet-56 (He et al. 2015, shortcuts of option A) with its published weights, batch norms kept, as ONNX and as a Network.

The zoo's writer creates the graph with the names of the published checkpoint (akamaster/pytorch_resnet_cifar10, BSD-2-Clause).
The file is an old PyTorch pickle, so it is read with torch.load(weights_only=True), which loads tensors only.

    PYTHONPATH=src python examples/resnet56/model.py DATA resnet56.onnx       # DATA contains cifar10/resnet/resnet56-4bfd9763.th
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from whet.network import Network
from whet.zoo.layers import batch_norm, conv, gemm, relu
from whet.zoo.writer import GraphWriter

CHECKPOINT = "cifar10/resnet/resnet56-4bfd9763.th"
BLOCKS, WIDTHS = 9, (16, 32, 64)


def published(folder: Path) -> dict[str, np.ndarray]:
    """The checkpoint's arrays by name."""
    import torch

    state = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)["state_dict"]
    return {name.removeprefix("module."): t.numpy() for name, t in state.items()}


def resnet56(values: dict[str, np.ndarray]) -> bytes:
    """The ONNX model: x[N,3,32,32] (normalized) -> logits[N,10]."""
    g = GraphWriter(batch="N", opset=17, values=values)
    x = relu(g, batch_norm(g, conv(g, g.input("x", (g.batch, 3, 32, 32)), "conv1", 3, 16, 3, padding=1), "bn1", 16))
    cin = 16
    for stage, width in enumerate(WIDTHS, 1):
        with g.scope(f"layer{stage}"):
            for block in range(BLOCKS):
                with g.scope(str(block)):
                    x = _block(g, x, cin, width, 2 if width != cin else 1)
                cin = width
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    g.output(gemm(g, x, "linear", 64, 10), "logits", (g.batch, 10))
    return g.model("resnet56").SerializeToString()


def _block(g: GraphWriter, x: str, cin: int, width: int, stride: int) -> str:
    y = relu(g, batch_norm(g, conv(g, x, "conv1", cin, width, 3, stride=stride, padding=1), "bn1", width))
    y = batch_norm(g, conv(g, y, "conv2", width, width, 3, padding=1), "bn2", width)
    if stride != 1:  # option A: every other pixel, and channels of zeros on both sides
        with g.scope("shortcut"):
            x = g.op("Slice", x, g.const([0, 0]), g.const([2**31 - 1] * 2), g.const([2, 3]), g.const([2, 2]))
            side = (width - cin) // 2
            x = g.op("Pad", x, g.const([0, side, 0, 0, 0, side, 0, 0]), g.const(0.0, "float32"))
    return relu(g, g.op("Add", y, x))


def load(folder: Path) -> Network:
    """The published network, source stage."""
    from whet import network_from_onnx

    return network_from_onnx(resnet56(published(folder)))


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(resnet56(published(Path(sys.argv[1]))))
