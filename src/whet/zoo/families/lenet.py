"""LeNet-5 (LeCun et al. 1998) in its common modern form: ReLU, max pooling, three linear layers."""

from whet.zoo.layers import conv, gemm, max_pool
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter


def lenet5(g: GraphWriter, *, num_classes: int = 10) -> None:
    """input[N,1,32,32] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 1, 32, 32))
    x = max_pool(g, g.op("Relu", conv(g, x, "conv1", 1, 6, 5, bias=True, gain=1.0)), 2, stride=2)
    x = max_pool(g, g.op("Relu", conv(g, x, "conv2", 6, 16, 5, bias=True)), 2, stride=2)
    x = g.op("Flatten", x, axis=1)
    x = g.op("Relu", gemm(g, x, "fc1", 400, 120))
    x = g.op("Relu", gemm(g, x, "fc2", 120, 84, gain=2.0))
    g.output(gemm(g, x, "fc3", 84, num_classes), "output", (g.batch, num_classes))


register("lenet5", lenet5, about="two convolutions and three linear layers for 32x32 digits", parameters=61_706)
