"""The standard networks as ONNX files, written from their definitions with seeded random weights.

Nothing is downloaded: the layers, their order, sizes and names are those of the published networks as PyTorch exports them,
batch norms kept. The weights are random, scaled so that activations stay bounded and outputs depend on inputs; a zoo model
has the speed and the parameter count of the published one, not its accuracy.

    whet.zoo.names()                                 -> ["bert_base", "densenet121", ...]
    whet.zoo.build("resnet18", batch=8)              -> onnx.ModelProto
    whet.zoo.save("resnet18", "resnet18-v1-7.onnx")
    whet.zoo.info("resnet18").parameters             -> 11689512

Adding a network: a file in families/ that ends with register(...).
"""

from whet.zoo.making import build, info, save
from whet.zoo.registry import names

__all__ = ["build", "info", "names", "save"]
