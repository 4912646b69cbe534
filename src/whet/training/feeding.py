"""From arrays to batches on the device: order, augmentation and preprocessing as pure functions of seed, epoch and step.

So an interrupted training resumes with identical values without any generator state. With `views` each epoch uses one of a fixed number of
augmented views of the data, selected by the epoch number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from whet.errors import TrainingError, UsageError
from whet.network import Network, Tensor
from whet.precision import Preprocessing
from whet.training.augment import Augment, Draws
from whet.training.data import Batches, TrainingData
from whet.training.distributed import ONE_PROCESS, Workers

Batch = tuple[dict[str, torch.Tensor], torch.Tensor | None]
Step = tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]
"""Inputs by name, labels, sample indices (None for user-defined batches)."""


class Feeder:
    """Batches of one data set for one network on one device. Arrays that are small relative to its memory are moved there once."""

    def __init__(self, net: Network, data: TrainingData | Batches, *, batch: int, device: torch.device, augment: str = "", seed: int = 0,
                 channels_last: bool = False, views: int = 0, workers: Workers = ONE_PROCESS):  # fmt: skip
        if views and isinstance(data, Batches):
            raise UsageError("views are cached by sample, and user-defined batches have no sample indices: set views=0, or give arrays")
        self.views, self.workers = views, workers
        self.net, self.data, self.device, self.seed, self.channels_last = net, data, device, seed, channels_last
        self.augment = Augment.parse(augment)
        self.batch = _batch_size(net, data, batch)
        self.steps = len(data) if isinstance(data, Batches) else max(len(data) // self.batch, 1)
        self.generator = torch.Generator(device)
        self._arrays: dict[str, torch.Tensor] = {}
        self._labels: torch.Tensor | None = None
        if isinstance(data, TrainingData):
            for t in net.inputs:
                if t.name not in data.inputs:
                    raise TrainingError(f"the data have no array for the input '{t.name}'; they have {', '.join(data.inputs)}")
                self._arrays[t.name] = self.place(self._to_network_layout(torch.from_numpy(np.ascontiguousarray(data.inputs[t.name])), t))
            if data.labels is not None:
                self._labels = torch.from_numpy(np.ascontiguousarray(data.labels)).to(device)

    def epoch(self, number: int, start: int = 0) -> Iterator[Step]:
        """Batches of an epoch from step `start`, in the order of that epoch."""
        if isinstance(self.data, Batches):
            for i, (inputs, labels) in enumerate(self.data):
                if i >= start:
                    tensors = {t.name: self._to_network_layout(torch.from_numpy(np.ascontiguousarray(inputs[t.name])), t) for t in self.net.inputs}
                    given = None if labels is None else torch.from_numpy(np.ascontiguousarray(labels)).to(self.device)
                    yield self._ready(tensors, number, i), given, None
            return
        order = torch.from_numpy(np.random.default_rng([self.seed, number]).permutation(len(self.data))).to(self.device)
        drawn = self.draw(number % self.views) if self.views else None
        for i in range(start, self.steps):
            at = self.workers.share(order[i * self.batch : (i + 1) * self.batch])
            feeds = self._ready(self._pick(at), number, i) if drawn is None else self._augment(at, drawn)
            yield feeds, None if self._labels is None else self._labels[at], at

    def view(self, number: int, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """All samples of one view, in order."""
        drawn = self.draw(number)
        for i in range(0, len(self.data), batch):
            yield self._augment(torch.arange(i, min(i + batch, len(self.data)), device=self.device), drawn)

    def all(self) -> Iterator[Batch]:
        """All samples in order without augmentation (the last batch may be smaller)."""
        if isinstance(self.data, Batches):
            for inputs, labels in self.data:
                tensors = {t.name: self._to_network_layout(torch.from_numpy(np.ascontiguousarray(inputs[t.name])), t) for t in self.net.inputs}
                yield {n: self._prepare(x) for n, x in tensors.items()}, None if labels is None else torch.from_numpy(labels).to(self.device)
            return
        for i in range(0, len(self.data), self.batch):
            at = torch.arange(i, min(i + self.batch, len(self.data)), device=self.device)
            yield {n: self._prepare(x) for n, x in self._pick(at).items()}, None if self._labels is None else self._labels[at]

    def _pick(self, at: torch.Tensor) -> dict[str, torch.Tensor]:
        return {n: a[at.to(a.device)].to(self.device, non_blocking=True) for n, a in self._arrays.items()}

    def _ready(self, tensors: dict[str, torch.Tensor], epoch: int, step: int) -> dict[str, torch.Tensor]:
        if self.augment != Augment():
            self.generator.manual_seed(_seed(self.seed, epoch, step))
            tensors = {n: self.augment(x.to(self.device), self.generator) if x.ndim == 4 else x for n, x in tensors.items()}
        return {n: self._prepare(x) for n, x in tensors.items()}

    def draw(self, view: int) -> Draws:
        """The random draws of a view."""
        self.generator.manual_seed(_seed(self.seed, view))
        return self.augment.draw(len(self.data), self.generator, self.device)

    def _augment(self, at: torch.Tensor, drawn: Draws) -> dict[str, torch.Tensor]:
        moved = self._flip_and_crop(at, drawn)
        if self.augment.cutmix:
            others = self._flip_and_crop(drawn.other[at], drawn)
            moved = {n: self.augment.paste_rectangles(x, others[n], drawn.of(at)) if x.ndim == 4 else x for n, x in moved.items()}
        return {n: self._prepare(x) for n, x in moved.items()}

    def _flip_and_crop(self, at: torch.Tensor, drawn: Draws) -> dict[str, torch.Tensor]:
        return {n: self.augment.flip_and_crop(x, drawn.of(at)) if x.ndim == 4 else x for n, x in self._pick(at).items()}

    def _to_network_layout(self, x: torch.Tensor, t: Tensor) -> torch.Tensor:
        """Transposes channels-last images to [N, C, H, W] where the network takes that."""
        p = self.data.preprocessing
        if p is not None and x.ndim == 3 and t.type.rank == 4:
            x = x[..., None]
        if p is not None and p.layout == "nchw" and x.ndim == 4 and t.type.rank == 4 and x.shape[1] != t.shape[1] and x.shape[3] == t.shape[1]:
            x = x.permute(0, 3, 1, 2).contiguous()
        if x.ndim != t.type.rank:
            raise TrainingError(f"the data for '{t.name}' have shape {list(x.shape)}, the input is {t.type}")
        for have, want in zip(x.shape[1:], t.shape[1:], strict=True):
            if isinstance(want, int) and have != want:
                raise TrainingError(f"the data for '{t.name}' have shape {list(x.shape)}, the input is {t.type}; is preprocessing missing?")
        return x

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """x on the device if it is small relative to the device memory, else x."""
        if self.device.type != "cuda":
            return x
        free, _ = torch.cuda.mem_get_info(self.device)
        return x.to(self.device) if x.numel() * x.element_size() < free // 3 else x.pin_memory()

    def _prepare(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.device)
        p = self.data.preprocessing
        if p is not None and x.ndim == 4:
            x = normalize(x, p)
        elif x.dtype == torch.uint8 or x.dtype == torch.float64:
            x = x.float()
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.ndim == 4 else x


def normalize(x: torch.Tensor, p: Preprocessing) -> torch.Tensor:
    """(x * scale - mean) / std of images [N, C, H, W] (or [N, H, W, C] where the layout is nhwc), in f32."""
    axis = 1 if p.layout == "nchw" else 3
    column = [1, 1, 1, 1]
    column[axis] = -1
    if p.order == "bgr":
        x = x.flip(axis)
    mean, std = (_make_constants(tuple(v), x.device).reshape(column) for v in (p.mean, p.std))
    return (x.float() * p.scale - mean) / std


@lru_cache(maxsize=64)
def _make_constants(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Constants cached on the device: a copy per batch would synchronize with earlier steps."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _batch_size(net: Network, data: TrainingData | Batches, wanted: int) -> int:
    fixed = {t.shape[0] for t in net.inputs if t.type.rank and isinstance(t.shape[0], int)}
    if isinstance(data, Batches):
        return wanted
    if fixed:
        only = int(min(fixed))
        if only == wanted or only == len(data):
            return only
        raise TrainingError(
            f"'{net.name}' takes batches of exactly {only}: export it with a dynamic batch, or train with batch={only} "
            "(batch-norm statistics are noisy then)"
        )
    return min(wanted, len(data))


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
