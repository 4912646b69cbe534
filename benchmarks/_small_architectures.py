"""Small networks of families that packages of models lack, for pruned_architectures.py: each is a module with random weights and example inputs.

They were written from the papers, in the way people write them: weights shared between layers, features concatenated in trees, pixels shuffled,
kernels computed from the input, states carried along a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


def conv(i: int, o: int, k: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """Convolution, batch norm and an activation."""
    parts: list[nn.Module] = [nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*parts, *([nn.SiLU()] if act else []))


class Head(nn.Module):
    """Pooling and a linear layer after a trunk."""

    def __init__(self, trunk: nn.Module, width: int):
        super().__init__()
        self.trunk, self.fc = trunk, nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.trunk(x).mean((2, 3)))


class SqueezeExcite(nn.Module):
    """A channel gate by maximum and mean, and one of the spatial positions (CBAM)."""

    def __init__(self, c: int):
        super().__init__()
        self.fc, self.place = nn.Sequential(nn.Linear(c, c // 4), nn.ReLU(), nn.Linear(c // 4, c)), nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.fc(x.mean((2, 3))) + self.fc(x.amax((2, 3))))
        x = x * gate[:, :, None, None]
        return x * torch.sigmoid(self.place(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)))


class Shared(nn.Module):
    """One block applied three times, with batch norms of its own each time."""

    def __init__(self, c: int):
        super().__init__()
        self.body, self.norms = nn.Conv2d(c, c, 3, padding=1), nn.ModuleList(nn.BatchNorm2d(c) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = x + torch.relu(norm(self.body(x)))
        return x


class Tree(nn.Module):
    """A tree of concatenations: every node reads both of its children and the root."""

    def __init__(self, c: int, depth: int):
        super().__init__()
        self.left = Tree(c, depth - 1) if depth else conv(c, c)
        self.right = Tree(c, depth - 1) if depth else conv(c, c)
        self.root = conv(3 * c, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.left(x)
        return self.root(torch.cat([a, self.right(a), x], 1))


class SuperResolution(nn.Module):
    """Residual blocks with a pixel shuffle and a skip by interpolation (EDSR, ESPCN)."""

    def __init__(self, c: int):
        super().__init__()
        self.first, self.body = nn.Conv2d(3, c, 3, padding=1), nn.ModuleList(conv(c, c) for _ in range(3))
        self.up, self.last = nn.Conv2d(c, 4 * c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for part in self.body:
            y = y + 0.1 * part(y)
        return self.last(F.pixel_shuffle(self.up(y), 2)) + F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


class Hourglass(nn.Module):
    """Nested down and up paths with added outputs (stacked hourglass), with transposed grouped convolutions."""

    def __init__(self, c: int, depth: int):
        super().__init__()
        self.skip, self.down, self.up = conv(c, c), conv(c, c, stride=2), nn.ConvTranspose2d(c, c, 2, 2, groups=4)
        self.inner = Hourglass(c, depth - 1) if depth > 1 else conv(c, c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + self.up(self.inner(self.down(x)))


class UNet(nn.Module):
    """Down and up paths joined by concatenation, with transposed convolutions."""

    def __init__(self, c: int):
        super().__init__()
        self.a, self.b, self.c = conv(3, c), conv(c, 2 * c, stride=2), conv(2 * c, 4 * c, stride=2)
        self.up1, self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.d1, self.d2, self.out = conv(4 * c, 2 * c), conv(2 * c, c), nn.Conv2d(c, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(a)
        y = self.d1(torch.cat([self.up1(self.c(b)), b], 1))
        return self.out(self.d2(torch.cat([self.up2(y), a], 1)))


class HighResolution(nn.Module):
    """Parallel branches of two resolutions that exchange features by sums (HRNet)."""

    def __init__(self, c: int):
        super().__init__()
        self.stem, self.to_low = conv(3, c), conv(c, 2 * c, stride=2)
        self.high, self.low = nn.ModuleList(conv(c, c) for _ in range(2)), nn.ModuleList(conv(2 * c, 2 * c) for _ in range(2))
        self.down, self.up = nn.ModuleList(conv(c, 2 * c, stride=2) for _ in range(2)), nn.ModuleList(conv(2 * c, c, 1) for _ in range(2))
        self.out = nn.Conv2d(3 * c, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.stem(x)
        low = self.to_low(high)
        for h, w, d, u in zip(self.high, self.low, self.down, self.up, strict=True):
            h1, w1 = h(high), w(low)
            high, low = h1 + F.interpolate(u(w1), scale_factor=2.0), w1 + d(h1)
        return self.out(torch.cat([high, F.interpolate(low, scale_factor=2.0)], 1))


class Involution(nn.Module):
    """Kernels computed for each position and shared by the channels of a group (RedNet)."""

    def __init__(self, c: int, k: int = 3, groups: int = 4):
        super().__init__()
        self.k, self.groups, self.reduce, self.span = k, groups, conv(c, c // 4, 1), nn.Conv2d(c // 4, k * k * groups, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        kernels = self.span(self.reduce(x)).view(n, self.groups, 1, self.k * self.k, h, w)
        p = F.pad(x, [self.k // 2] * 4)
        patches = torch.stack([p[:, :, i : i + h, j : j + w] for i in range(self.k) for j in range(self.k)], 2)
        return (kernels * patches.view(n, self.groups, c // self.groups, self.k * self.k, h, w)).sum(3).view(n, c, h, w)


class RedNet(nn.Module):
    """Bottlenecks with involution."""

    def __init__(self, c: int):
        super().__init__()
        self.stem, self.a, self.inv, self.norm, self.b = conv(3, c), conv(c, c, 1), Involution(c), nn.BatchNorm2d(c), conv(c, c, 1, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return torch.relu(x + self.b(torch.relu(self.norm(self.inv(self.a(x))))))


class DynamicConv(nn.Module):
    """A mixture of kernels with weights from the input (CondConv), by a convolution of all experts."""

    def __init__(self, c: int, experts: int = 3):
        super().__init__()
        self.stem, self.route = conv(3, c), nn.Linear(c, experts)
        self.experts, self.out = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(experts)), conv(c, c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        gate = torch.softmax(self.route(x.mean((2, 3))), 1)
        return self.out(sum(gate[:, i, None, None, None] * e(x) for i, e in enumerate(self.experts)))


class Shuffle(nn.Module):
    """Grouped convolutions with channel shuffles and a split (ShuffleNet)."""

    def __init__(self, c: int):
        super().__init__()
        self.stem, self.a, self.dw, self.b = conv(3, c), conv(c, c, 1, groups=4), conv(c, c, groups=c, act=False), conv(c, c, 1, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.a(x)
        n, c, h, w = y.shape
        y = y.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)
        return torch.relu(x + self.b(self.dw(y)))


class MaxOut(nn.Module):
    """Features of two halves compared (MaxOut, LightCNN), and gated by a half (GLU)."""

    def __init__(self, c: int):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 2 * c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, padding=1), nn.Conv2d(c, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x).chunk(2, 1)
        return torch.relu(self.c(F.glu(self.b(torch.maximum(a, b)), 1)))


class Recurrent(nn.Module):
    """Convolutions over a spectrogram, a bidirectional recurrent layer and a linear one (CRNN)."""

    def __init__(self, kind: type[nn.RNNBase], c: int, hidden: int):
        super().__init__()
        self.conv = nn.Sequential(conv(1, c), nn.MaxPool2d(2), conv(c, c))
        self.rnn, self.fc = kind(c * 8, hidden, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(2 * hidden, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).permute(0, 3, 1, 2).flatten(2)
        return self.fc(self.rnn(y)[0])


class Temporal(nn.Module):
    """Dilated causal 1-D convolutions with gates and skips (WaveNet, TCN)."""

    def __init__(self, c: int):
        super().__init__()
        self.first, self.last = nn.Conv1d(2, c, 1), nn.Conv1d(c, 4, 1)
        self.gates = nn.ModuleList(nn.Conv1d(c, 2 * c, 2, dilation=d) for d in (1, 2, 4))
        self.mix, self.skip = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(3)), nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.first(x), 0
        for gate, mix, skip in zip(self.gates, self.mix, self.skip, strict=True):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            x, total = x + mix(y), total + skip(y)
        return self.last(torch.relu(total))


class GroupedQuery(nn.Module):
    """A decoder layer with rotary positions and two keys for four queries, with a gated MLP of experts that all tokens read."""

    def __init__(self, d: int = 32, heads: int = 4, keys: int = 2):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, d // heads
        self.embed, self.q, self.kv, self.o = nn.Embedding(50, d), nn.Linear(d, d), nn.Linear(d, 2 * keys * d // heads), nn.Linear(d, d)
        self.gate, self.up, self.down, self.out = nn.Linear(d, 3 * d), nn.Linear(d, 3 * d), nn.Linear(3 * d, d), nn.Linear(d, 50)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        angle = torch.arange(12)[:, None] / 100 ** (torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        n, t, _ = x.shape
        y = self.n1(x)
        q = self.rotate(self.q(y).view(n, t, self.heads, self.size).transpose(1, 2))
        k, v = self.kv(y).view(n, t, 2 * self.keys, self.size).transpose(1, 2).chunk(2, 1)
        k, v = (z.repeat_interleave(self.heads // self.keys, 1) for z in (self.rotate(k), v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / self.size**0.5, -1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(n, t, -1))
        y = self.n2(x)
        return self.out(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Mixer(nn.Module):
    """Tokens and channels mixed alternately, with a convolution of patches (MLP-Mixer)."""

    def __init__(self, c: int, tokens: int):
        super().__init__()
        self.patch, self.n1, self.n2 = nn.Conv2d(3, c, 4, 4), nn.LayerNorm(c), nn.LayerNorm(c)
        self.t1, self.t2, self.c1, self.c2 = nn.Linear(tokens, 24), nn.Linear(24, tokens), nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.out = nn.Linear(c, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.c2(F.gelu(self.c1(self.n2(x))))
        return self.out(x.mean(1))


class GraphConv(nn.Module):
    """Node features mixed along a given adjacency (a graph network), with weights for adjacent nodes and self."""

    def __init__(self, c: int):
        super().__init__()
        self.own, self.near = nn.ModuleList((nn.Linear(5, c), nn.Linear(c, c))), nn.ModuleList((nn.Linear(5, c), nn.Linear(c, c)))
        self.out = nn.Linear(c, 3)
        self.register_buffer("adjacency", torch.softmax(torch.randn(9, 9), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for own, near in zip(self.own, self.near, strict=True):
            x = torch.relu(own(x) + self.adjacency @ near(x))
        return self.out(x)


class Pyramid(nn.Module):
    """Levels of features summed top down, one head for all of them (FPN, RetinaNet)."""

    def __init__(self, c: int):
        super().__init__()
        self.stages = nn.ModuleList((conv(3, c), conv(c, 2 * c, stride=2), conv(2 * c, 4 * c, stride=2)))
        self.sides, self.head = nn.ModuleList(nn.Conv2d(w * c, c, 1) for w in (1, 2, 4)), nn.Sequential(conv(c, c), nn.Conv2d(c, 6, 3, padding=1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        y, outputs = None, []
        for side, level in zip(reversed(self.sides), reversed(levels), strict=True):
            y = side(level) if y is None else side(level) + F.interpolate(y, scale_factor=2.0)
            outputs.append(self.head(y).flatten(2))
        return (torch.cat(outputs, 2),)


class PyramidPooling(nn.Module):
    """Context of several grids, and dilated branches, concatenated (PSPNet, ASPP)."""

    def __init__(self, c: int):
        super().__init__()
        self.stem, self.out = conv(3, c), conv(2 * c + 2 * (c // 2), c, 1)
        self.pools = nn.ModuleList(nn.Sequential(nn.AvgPool2d(s), nn.Conv2d(c, c // 2, 1)) for s in (2, 8))
        self.dilated = nn.Conv2d(c, c, 3, padding=2, dilation=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        parts = [F.interpolate(p(x), size=x.shape[2:], mode="nearest") for p in self.pools]
        return self.out(torch.cat([x, self.dilated(x), *parts], 1))


class Video(nn.Module):
    """Convolutions of space and of time, factorized (R(2+1)D)."""

    def __init__(self, c: int):
        super().__init__()
        self.s1, self.t1 = nn.Conv3d(3, c, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(c, c, (3, 1, 1), padding=(1, 0, 0))
        self.s2, self.t2, self.norm = nn.Conv3d(c, c, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(c, c, (3, 1, 1), padding=(1, 0, 0)), nn.BatchNorm3d(c)
        self.out = nn.Linear(c, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.t1(torch.relu(self.s1(x))))
        x = torch.relu(x + self.norm(self.t2(torch.relu(self.s2(x)))))
        return self.out(x.mean((2, 3, 4)))


def _image(size: int = 32, channels: int = 3) -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, channels, size, size),)


NETWORKS: dict[str, Callable[[], Made]] = {
    "cbam": lambda: (Head(nn.Sequential(conv(3, 32), SqueezeExcite(32), conv(32, 32)), 32), _image()),
    "shared weights": lambda: (Head(nn.Sequential(conv(3, 32), Shared(32)), 32), _image()),
    "concat tree": lambda: (Head(nn.Sequential(conv(3, 32), Tree(32, 2)), 32), _image()),
    "pixel shuffle": lambda: (SuperResolution(32), _image(16)),
    "hourglass": lambda: (Head(nn.Sequential(conv(3, 32), Hourglass(32, 3)), 32), _image()),
    "u-net": lambda: (UNet(16), _image()),
    "high resolution": lambda: (HighResolution(16), _image()),
    "involution": lambda: (Head(RedNet(32), 32), _image(16)),
    "mixture of kernels": lambda: (Head(DynamicConv(32), 32), _image(16)),
    "channel shuffle": lambda: (Head(Shuffle(32), 32), _image()),
    "maxout and glu": lambda: (Head(MaxOut(32), 32), _image()),
    "lstm": lambda: (Recurrent(nn.LSTM, 16, 24), (torch.randn(4, 1, 16, 20),)),
    "gru": lambda: (Recurrent(nn.GRU, 16, 24), (torch.randn(4, 1, 16, 20),)),
    "temporal": lambda: (Temporal(32), (torch.randn(4, 2, 40),)),
    "grouped queries": lambda: (GroupedQuery(), (torch.randint(0, 50, (4, 12)),)),
    "mixer": lambda: (Mixer(32, 64), _image()),
    "graph": lambda: (GraphConv(32), (torch.randn(4, 9, 5),)),
    "feature pyramid": lambda: (Pyramid(16), _image()),
    "pyramid pooling": lambda: (Head(PyramidPooling(32), 32), _image()),
    "video": lambda: (Video(16), (torch.randn(2, 3, 6, 16, 16),)),
}


def make(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A network by name and its inputs."""
    return NETWORKS[name]()
