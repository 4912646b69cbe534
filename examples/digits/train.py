"""Trains the demo's network on the digits of data.py and writes digits_resnet.onnx. Needs torch; whet itself does not.

    PYTHONPATH=src python examples/digits/train.py             # about nine minutes on two cores

The zoo's writer creates the ONNX graph from the trained state, with batch norms and the names that torch's exporter would give. Outputs
of both are compared before the file is accepted.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from data import load_heldback, load_train
from torch import nn
from torch.nn import functional as F

from whet.zoo.counting import count
from whet.zoo.layers import batch_norm, conv, flatten_head, gemm, relu
from whet.zoo.writer import GraphWriter

HERE = Path(__file__).parent
WIDTHS, BLOCKS = (48, 80, 160), (1, 2, 1)     # stages at 32x32, 16x16, 8x8: 120 M multiply-accumulates in 615 k parameters
SHIFT, TURN = 3, 8                            # augmentation: pixels, degrees


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a projection if the shape changes."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[N,cin,H,W] -> [N,cout,H/stride,W/stride]."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class DigitsResNet(nn.Module):
    """x[N,1,32,32] -> logits[N,10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, WIDTHS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTHS[0])
        cin = WIDTHS[0]
        for stage, (width, blocks) in enumerate(zip(WIDTHS, BLOCKS, strict=True)):
            made = []
            for i in range(blocks):
                made.append(Block(cin, width, 2 if stage and i == 0 else 1))
                cin = width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*made))
        self.fc = nn.Linear(cin, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[N,1,32,32] -> logits[N,10]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


def write_graph(g: GraphWriter) -> None:
    """The same network as ONNX: input[N,1,32,32] -> logits[N,10]."""
    x = g.input("input", (g.batch, 1, 32, 32))
    cin = WIDTHS[0]
    x = relu(g, batch_norm(g, conv(g, x, "conv1", 1, cin, 3, padding=1), "bn1", cin))
    for stage, (width, blocks) in enumerate(zip(WIDTHS, BLOCKS, strict=True)):
        with g.scope(f"layer{stage + 1}"):
            for i in range(blocks):
                stride = 2 if stage and i == 0 else 1
                with g.scope(str(i)):
                    y = relu(g, batch_norm(g, conv(g, x, "conv1", cin, width, 3, stride=stride, padding=1), "bn1", width))
                    y = batch_norm(g, conv(g, y, "conv2", width, width, 3, padding=1), "bn2", width)
                    if stride != 1 or cin != width:
                        with g.scope("downsample"):
                            x = batch_norm(g, conv(g, x, "0", cin, width, 1, stride=stride), "1", width)
                    x = relu(g, g.op("Add", y, x))
                cin = width
    g.output(gemm(g, flatten_head(g, x), "fc", cin, 10), "logits", (g.batch, 10))


def augment(x: torch.Tensor) -> torch.Tensor:
    """Each image shifted by up to SHIFT pixels and rotated by up to TURN degrees; new pixels are background."""
    n = len(x)
    angle = torch.empty(n).uniform_(-TURN, TURN).deg2rad()
    shift = torch.empty(n, 2).uniform_(-SHIFT, SHIFT) / (x.shape[-1] / 2)
    cos, sin = angle.cos(), angle.sin()
    theta = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), padding_mode="border", align_corners=False)


def accuracy(logits: np.ndarray, y: np.ndarray) -> float:
    """Share of rows whose largest logit is the digit."""
    return float((logits.argmax(1) == y).mean())


def train(seed: int, epochs: int, batch: int, weight_decay: float) -> DigitsResNet:
    """Returns the network after the last epoch; test images decide nothing."""
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    x, y = (torch.from_numpy(a) for a in load_train())
    net = DigitsResNet().to(memory_format=torch.channels_last)
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
                                lr=0.1, momentum=0.9, nesterov=True)
    steps = -(-len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * steps, pct_start=0.2)
    start = time.perf_counter()
    for epoch in range(epochs):
        net.train()
        total = 0.0
        for chosen in torch.randperm(len(x)).split(batch):
            images = augment(x[chosen]).to(memory_format=torch.channels_last)
            loss = F.cross_entropy(net(images), y[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(chosen)
        print(f"epoch {epoch + 1:3d}/{epochs}  loss {total / len(x):.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return net.eval()


def main() -> None:
    """Trains, writes the file, and prints the figures of the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--weight-decay", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=HERE / "digits_resnet.onnx")
    args = parser.parse_args()

    net = train(args.seed, args.epochs, args.batch, args.weight_decay)
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    g = GraphWriter(batch="N", opset=17, values=state)
    write_graph(g)
    model = g.model("digits_resnet")
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, args.out)

    x, y = load_heldback()
    session = onnxruntime.InferenceSession(str(args.out), providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input": x})[0]
    with torch.no_grad():
        difference = np.abs(net(torch.from_numpy(x)).numpy() - logits).max()
    if difference > 1e-4:
        raise SystemExit(f"the file differs from the trained network by {difference:.2e}: the graph is not the trained network")
    skeleton = GraphWriter(batch=1, opset=17, skeleton=True)
    write_graph(skeleton)
    counted = count(skeleton.model("count"), skeleton.trainable)
    train_x, train_y = load_train()
    print(f"test accuracy {100 * accuracy(logits, y):.2f} % of {len(y)}, "
          f"train {100 * accuracy(session.run(None, {'input': train_x})[0], train_y):.2f} % of {len(train_y)}")
    print(f"{counted.parameters} parameters, {2 * counted.macs / 1e6:.1f} MFLOP, {args.out.stat().st_size} bytes, "
          f"max difference to torch {difference:.1e}")


if __name__ == "__main__":
    main()
