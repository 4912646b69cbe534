"""Image augmentation: horizontal flip, random crop of the padded image, CutMix. Random draws are separate from their application."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from whet.errors import UsageError


@dataclass(frozen=True)
class Draws:
    """The random draws for n samples."""

    mirrored: torch.Tensor  # bool [n]
    cut: torch.Tensor  # int [2, n]: row and column offset of the crop
    other: torch.Tensor  # int [n]: index of the sample whose rectangle is pasted
    box: torch.Tensor  # f32 [3, n]: centre (row, column) and side of the rectangle, relative to the image; a side of 0 pastes nothing

    def of(self, samples: torch.Tensor) -> Draws:
        """The draws of `samples`; `other` still indexes all samples."""
        return Draws(self.mirrored[samples], self.cut[:, samples], self.other[samples], self.box[:, samples])


@dataclass(frozen=True)
class Augment:
    """The options `crop:N,flip,cutmix:PERCENT`; CutMix is applied to PERCENT of the samples (Yun et al., arXiv:1905.04899; uniform area)."""

    crop: int = 0
    flip: bool = False
    cutmix: int = 0

    @staticmethod
    def parse(text: str) -> Augment:
        """Parses the options. Raises UsageError for an unknown one."""
        crop, flip, cutmix = 0, False, 0
        for word in filter(None, (w.strip() for w in text.split(","))):
            name, _, value = word.partition(":")
            if name == "flip" and not value:
                flip = True
            elif name == "crop" and value.isdigit():
                crop = int(value)
            elif name == "cutmix" and value.isdigit() and int(value) <= 100:
                cutmix = int(value)
            else:
                raise UsageError(f"augmentation: {word!r} is none of crop:N, flip, cutmix:PERCENT")
        return Augment(crop, flip, cutmix)

    def __call__(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Augments x [N, C, H, W] of any dtype; pasted rectangles come from the same batch."""
        drawn = self.draw(len(x), generator, x.device)
        x = self.flip_and_crop(x, drawn)
        return self.paste_rectangles(x, x[drawn.other], drawn) if self.cutmix else x

    def draw(self, n: int, generator: torch.Generator, device: torch.device) -> Draws:
        """Draws for n samples. Options that are off consume no random numbers."""
        mirrored, cut = torch.zeros(n, dtype=torch.bool, device=device), torch.zeros(2, n, dtype=torch.int64, device=device)
        other, box = torch.arange(n, device=device), torch.zeros(3, n, device=device)
        if self.flip:
            mirrored = torch.rand(n, generator=generator, device=device) < 0.5
        if self.crop:
            cut = torch.randint(0, 2 * self.crop + 1, (2, n), generator=generator, device=device)
        if self.cutmix:
            other = torch.randperm(n, generator=generator, device=device)
            box = torch.rand(3, n, generator=generator, device=device)
            pasted = torch.rand(n, generator=generator, device=device) < self.cutmix / 100
            box[2] = torch.where(pasted, box[2].sqrt(), 0)
        return Draws(mirrored, cut, other, box)

    def flip_and_crop(self, x: torch.Tensor, drawn: Draws) -> torch.Tensor:
        """Applies flip and crop to x [N, C, H, W]."""
        n, _, h, w = x.shape
        if self.flip:
            x = torch.where(drawn.mirrored.reshape(-1, 1, 1, 1), x.flip(3), x)
        if self.crop:
            rows = (drawn.cut[0, :, None] + torch.arange(h, device=x.device))[:, None, :, None]
            columns = (drawn.cut[1, :, None] + torch.arange(w, device=x.device))[:, None, None, :]
            padded = F.pad(x, (self.crop,) * 4)
            samples = torch.arange(n, device=x.device).reshape(-1, 1, 1, 1)
            channels = torch.arange(x.shape[1], device=x.device).reshape(1, -1, 1, 1)
            x = padded[samples, channels, rows, columns]
        return x

    def paste_rectangles(self, x: torch.Tensor, others: torch.Tensor, drawn: Draws) -> torch.Tensor:
        """Pastes the rectangles of `others` into x [N, C, H, W]; rectangles are clipped at the border."""
        inside = []
        for middle, size in zip(drawn.box[:2], x.shape[2:], strict=True):
            place = (torch.arange(size, device=x.device) + 0.5) / size
            inside.append((place - middle[:, None]).abs() < drawn.box[2, :, None] / 2)
        return torch.where(inside[0][:, None, :, None] & inside[1][:, None, None, :], others, x)
