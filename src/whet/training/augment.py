"""Augmentation of images: mirrored, cut from a padded one, a rectangle of another pasted in; what is drawn apart from what is done with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from whet.errors import UsageError


@dataclass(frozen=True)
class Draws:
    """What was drawn for n samples."""

    mirrored: torch.Tensor  # bool [n]
    cut: torch.Tensor  # int [2, n]: by how many rows and columns the padded ones are cut
    other: torch.Tensor  # int [n]: whose rectangle is pasted in
    box: torch.Tensor  # f32 [3, n]: the rectangle's middle (rows, columns) and its sides, in parts of the picture's; sides of 0 paste nothing

    def of(self, samples: torch.Tensor) -> Draws:
        """Those of some samples; `other` still counts all."""
        return Draws(self.mirrored[samples], self.cut[:, samples], self.other[samples], self.box[:, samples])


@dataclass(frozen=True)
class Augment:
    """What `crop:N,flip,cutmix:PERCENT` says; cutmix pastes into so many of a hundred (Yun et al., arXiv:1905.04899; area uniform)."""

    crop: int = 0
    flip: bool = False
    cutmix: int = 0

    @staticmethod
    def parse(text: str) -> Augment:
        """Raises UsageError for what there is not."""
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
        """x [N, C, H, W], of any type, changed at random; rectangles come from the same batch."""
        drawn = self.drawn(len(x), generator, x.device)
        x = self.moved(x, drawn)
        return self.pasted(x, x[drawn.other], drawn) if self.cutmix else x

    def drawn(self, n: int, generator: torch.Generator, device: torch.device) -> Draws:
        """For n samples. What is not asked for draws no numbers."""
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

    def moved(self, x: torch.Tensor, drawn: Draws) -> torch.Tensor:
        """x [N, C, H, W], mirrored and cut as was drawn."""
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

    def pasted(self, x: torch.Tensor, others: torch.Tensor, drawn: Draws) -> torch.Tensor:
        """x [N, C, H, W] with the rectangles of `others` in their places; at the border rectangles are cut off."""
        inside = []
        for middle, size in zip(drawn.box[:2], x.shape[2:], strict=True):
            place = (torch.arange(size, device=x.device) + 0.5) / size
            inside.append((place - middle[:, None]).abs() < drawn.box[2, :, None] / 2)
        return torch.where(inside[0][:, None, :, None] & inside[1][:, None, None, :], others, x)
