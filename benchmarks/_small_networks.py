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
