"""Networks that neither torchvision nor timm has: U-Nets, sub-pixel super-resolution, a text recognizer, a detector without its NMS."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class _UNet(nn.Module):
    """Two 3^n convolutions with batch norm and ReLU per level, max pooling down, transposed convolutions up, skips concatenated."""

    def __init__(self, dims: int, cin: int, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")

        def level(a: int, b: int) -> nn.Module:
            parts: list[nn.Module] = []
            for i in (a, b):
                parts += [conv(i, b, 3, padding=1, bias=False), norm(b), nn.ReLU()]
            return nn.Sequential(*parts)

        self.down = nn.ModuleList(level(a, b) for a, b in pairwise((cin, *widths)))
        self.pool = getattr(nn, f"MaxPool{dims}d")(2)
        backward = list(pairwise(widths[::-1]))
        self.widen = nn.ModuleList(getattr(nn, f"ConvTranspose{dims}d")(a, b, 2, 2) for a, b in backward)
        self.up = nn.ModuleList(level(2 * b, b) for _, b in backward)
        self.head = conv(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, down in enumerate(self.down):
            x = down(x if i == 0 else self.pool(x))
            skips.append(x)
        for widen, up, skip in zip(self.widen, self.up, skips[-2::-1], strict=True):
            x = up(torch.cat((skip, widen(x)), 1))
        return self.head(x)


class UNet2d(_UNet):
    """x[N,3,H,W] -> logits[N,2,H,W]; H and W are multiples of 16."""

    def __init__(self) -> None:
        super().__init__(2, 3, 2, (64, 128, 256, 512, 1024))


class UNet3d(_UNet):
    """x[N,1,D,H,W] -> logits[N,3,D,H,W]; sizes are multiples of 8."""

    def __init__(self) -> None:
        super().__init__(3, 1, 3, (32, 64, 128, 256))


class Espcn(nn.Module):
    """Luminance x[N,1,H,W] -> [N,1,3H,3W] (Shi et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 9, 3, padding=1), nn.PixelShuffle(3)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Crnn(nn.Module):
    """Text lines x[N,1,32,W] -> logits[W/4+1,N,37] (Shi et al. 2015): seven convolutions and two bidirectional LSTMs."""

    def __init__(self, classes: int = 37, hidden: int = 256) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        cin = 1
        pools = {0: (2, 2, 0), 1: (2, 2, 0), 3: ((2, 2), (2, 1), (0, 1)), 5: ((2, 2), (2, 1), (0, 1))}
        for i, width in enumerate((64, 128, 256, 256, 512, 512, 512)):
            parts += [nn.Conv2d(cin, width, 2 if i == 6 else 3, padding=0 if i == 6 else 1)]
            parts += [nn.BatchNorm2d(width)] if i in (2, 4, 6) else []
            parts += [nn.ReLU()]
            parts += [nn.MaxPool2d(*pools[i])] if i in pools else []
            cin = width
        self.features = nn.Sequential(*parts)
        self.first = nn.LSTM(512, hidden, bidirectional=True)
        self.middle = nn.Linear(2 * hidden, hidden)
        self.second = nn.LSTM(hidden, hidden, bidirectional=True)
        self.last = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.features(x).squeeze(2).permute(2, 0, 1)
        return self.last(self.second(self.middle(self.first(steps)[0]))[0])


class SsdLite(nn.Module):
    """torchvision's ssdlite320_mobilenet_v3_large up to box regressions and class scores: x[N,3,320,320] -> [N,anchors,4+91]."""

    def __init__(self) -> None:
        super().__init__()
        import torchvision

        net: Any = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        self.backbone, self.head = net.backbone, net.head

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(list(self.backbone(x).values()))
        return torch.cat((found["bbox_regression"], found["cls_logits"]), -1)


class DetrLike(nn.Module):
    """A detection transformer: a convolutional backbone, an encoder, queries that attend to it (torch's own layers), boxes and classes."""

    def __init__(self, width: int = 64, heads: int = 4, queries: int = 10, classes: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.ReLU(), nn.Conv2d(32, width, 3, 2, 1), nn.ReLU())
        encoder = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.queries, self.position = nn.Parameter(torch.randn(1, queries, width)), nn.Parameter(torch.randn(1, 64, width))
        self.head = nn.Linear(width, classes + 4)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(self.backbone(x).flatten(2).transpose(1, 2) + self.position)
        return self.head(self.decoder(self.queries.expand(x.shape[0], -1, -1), memory))


class UnetrLike(nn.Module):
    """A volume's patches through a transformer, and transposed convolutions with skips back to voxels."""

    def __init__(self, width: int = 64, heads: int = 4, side: int = 4) -> None:
        super().__init__()
        self.patches, self.side = nn.Conv3d(1, width, 8, 8), side
        self.position = nn.Parameter(torch.randn(1, side**3, width))
        layer = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 2 * width, **layer) for _ in range(2))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in pairwise((width, 32, 16, 8)))
        self.skip, self.head = nn.ConvTranspose3d(width, 32, 2, 2), nn.Conv3d(9, 2, 3, padding=1)
        self.norms = nn.ModuleList(nn.InstanceNorm3d(c) for c in (32, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).transpose(1, 2) + self.position
        maps = []
        for block in self.blocks:
            t = block(t)
            maps.append(t.transpose(1, 2).reshape(x.shape[0], -1, self.side, self.side, self.side))
        y = maps[-1]
        for i, (up, norm) in enumerate(zip(self.up, self.norms, strict=True)):
            y = up(y) + self.skip(maps[0]) if i == 0 else up(y)
            y = nn.functional.leaky_relu(norm(y), 0.01)
        return self.head(torch.cat((y, x), 1))


class InterleavedRotaryBlock(nn.Module):
    """Llama's block as its authors wrote it: pairs of neighbours are rotated as complex numbers' parts; keys and values are shared by groups."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2, length: int = 24) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.k, self.v = (nn.Linear(width, n * self.size, bias=False) for n in (heads, groups, groups))
        self.o, self.gate, self.up = nn.Linear(width, width, bias=False), nn.Linear(width, 128, bias=False), nn.Linear(width, 128, bias=False)
        self.down, self.norms = nn.Linear(128, width, bias=False), nn.ParameterList(torch.ones(width) for _ in range(2))
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", angles.cos()[None, :, None])
        self.register_buffer("sin", angles.sin()[None, :, None])

    def norm(self, x: Tensor, k: int) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norms[k]

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        return torch.stack((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        n, s, _ = x.shape
        y = self.norm(x, 0)
        q, k, v = (f(y).view(n, s, h, self.size) for f, h in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups)))
        q, k, v = self.rotate(q).transpose(1, 2), self.rotate(k).transpose(1, 2), v.transpose(1, 2)
        repeats = self.heads // self.groups
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, s, -1))
        y = self.norm(x, 1)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
