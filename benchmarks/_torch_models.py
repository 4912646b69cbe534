"""The peers' networks in torch: torchvision's, and YOLOv5s v6 as Ultralytics describes it (torchvision has none). Random weights, FP16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ANCHORS = ((10, 13, 16, 30, 33, 23), (30, 61, 62, 45, 59, 119), (116, 90, 156, 198, 373, 326))
STRIDES = (8, 16, 32)


def conv(cin: int, cout: int, kernel: int = 1, stride: int = 1, pad: int | None = None) -> nn.Module:
    """Convolution, batch norm, SiLU."""
    layer = nn.Conv2d(cin, cout, kernel, stride, kernel // 2 if pad is None else pad, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(cout, eps=1e-3), nn.SiLU(inplace=True))


class Bottleneck(nn.Module):
    """1x1, 3x3, and the input added if `shortcut`."""

    def __init__(self, width: int, shortcut: bool) -> None:
        super().__init__()
        self.a, self.b, self.shortcut = conv(width, width), conv(width, width, 3), shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Two branches of half the width, one through bottlenecks, concatenated."""

    def __init__(self, cin: int, cout: int, count: int, shortcut: bool = True) -> None:
        super().__init__()
        half = cout // 2
        self.a, self.b, self.c = conv(cin, half), conv(cin, half), conv(2 * half, cout)
        self.m = nn.Sequential(*(Bottleneck(half, shortcut) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.cat((self.m(self.a(x)), self.b(x)), 1))


class Sppf(nn.Module):
    """Three consecutive 5x5 poolings, all outputs concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.m = conv(width, width // 2), conv(width * 2, width), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        y = self.m(x)
        z = self.m(y)
        return self.b(torch.cat((x, y, z, self.m(z)), 1))


class Yolov5s(nn.Module):
    """images[N,3,640,640] -> [N,25200,85], boxes decoded."""

    def __init__(self, classes: int = 80, image: int = 640) -> None:
        super().__init__()
        self.fields = 5 + classes
        self.to_p3 = nn.Sequential(conv(3, 32, 6, 2, 2), conv(32, 64, 3, 2), C3(64, 64, 1), conv(64, 128, 3, 2), C3(128, 128, 2))
        self.to_p4 = nn.Sequential(conv(128, 256, 3, 2), C3(256, 256, 3))
        self.to_p5 = nn.Sequential(conv(256, 512, 3, 2), C3(512, 512, 1), Sppf(512), conv(512, 256))
        self.up = nn.Upsample(scale_factor=2)
        self.n4, self.l4, self.n3 = C3(512, 256, 1, False), conv(256, 128), C3(256, 128, 1, False)
        self.d3, self.o4, self.d4, self.o5 = conv(128, 128, 3, 2), C3(256, 256, 1, False), conv(256, 256, 3, 2), C3(512, 512, 1, False)
        self.heads = nn.ModuleList(nn.Conv2d(c, 3 * self.fields, 1) for c in (128, 256, 512))
        for i, stride in enumerate(STRIDES):
            side = image // stride
            y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
            grid = torch.stack((x, y), 2).expand(1, 3, side, side, 2) - 0.5
            self.register_buffer(f"grid{i}", grid.clone())
            self.register_buffer(f"anchors{i}", torch.tensor(ANCHORS[i]).float().view(1, 3, 1, 1, 2).expand(1, 3, side, side, 2).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p3 = self.to_p3(x)
        p4 = self.to_p4(p3)
        top = self.to_p5(p4)
        middle = self.l4(self.n4(torch.cat((self.up(top), p4), 1)))
        o3 = self.n3(torch.cat((self.up(middle), p3), 1))
        o4 = self.o4(torch.cat((self.d3(o3), middle), 1))
        o5 = self.o5(torch.cat((self.d4(o4), top), 1))
        found = []
        for i, feature in enumerate((o3, o4, o5)):
            raw = self.heads[i](feature)
            n, _, h, w = raw.shape
            y = raw.view(n, 3, self.fields, h, w).permute(0, 1, 3, 4, 2).sigmoid()
            xy, wh, rest = y.split((2, 2, self.fields - 4), 4)
            xy = (xy * 2 + getattr(self, f"grid{i}")) * STRIDES[i]
            wh = (wh * 2) ** 2 * getattr(self, f"anchors{i}")
            found.append(torch.cat((xy, wh, rest), 4).reshape(n, -1, self.fields))
        return torch.cat(found, 1)


def model(name: str) -> nn.Module:
    """The network in FP16, channels last, on the GPU."""
    import torchvision

    network: Any = Yolov5s() if name == "yolov5s" else getattr(torchvision.models, name)(weights=None)
    network = network.eval().half().cuda()
    for p in network.parameters():  # not module.to(): it refuses a decoder's grids, which have rank 5
        if p.dim() == 4:
            p.data = p.data.to(memory_format=torch.channels_last)
    return network


def image(name: str, batch: int) -> torch.Tensor:
    """Random pictures in FP16, channels last, on the GPU."""
    side = 640 if name == "yolov5s" else 224
    return torch.randn(batch, 3, side, side, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
