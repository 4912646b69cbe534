"""Quantization-aware training: the last step before an INT8 engine, with fake quantization exactly where whet inserts Q/DQ.

Batch norms are folded first, as the builder folds them; `precision.find_quantization_sites` returns the tensors and weights to quantize.
Training rounds them in the forward pass and uses the straight-through estimator in the backward pass. Weights have one scale per output
channel (largest magnitude / 127 at every step); activation scales start from calibration and are learned (LSQ, Esser et al.,
arXiv:1902.08153). The result is a network with Q/DQ nodes that `whet exec --int8` and other runtimes read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from whet.errors import TrainingError, UsageError
from whet.network import I8, Layer, Network
from whet.precision import QuantizationSites, Range, Ranges, calibrate, find_quantization_sites, quantize
from whet.precision.insert import get_weight_axis, merge_shared_ranges
from whet.pruning.order import check_order, note
from whet.training.config import FinetuneConfig
from whet.training.data import Batches, TrainingData
from whet.training.feeding import Feeder
from whet.training.free_batch import free_batch
from whet.training.loop import Progress
from whet.training.loss import to_outputs
from whet.training.module import Fakes, NetworkModule
from whet.training.tuning import Finetuned, fold_batch_norms, select_device, train_module, without_softmax

Skip = Callable[[Layer], bool] | Iterable[str]


@dataclass(frozen=True)
class QuantizationAware:
    """`network` has Q/DQ nodes; `floating` is the network before insertion; `ranges` are the learned ranges."""

    network: Network
    floating: Network
    ranges: Ranges
    training: Finetuned


class FakeActivation(nn.Module):
    """Fake quantization with a range. A learned scale is a parameter, stored as a logarithm so that it stays positive."""

    def __init__(self, range_: Range, *, learn: bool):
        super().__init__()
        self.signed, self.zero = range_.dtype == I8, range_.zero
        self.low, self.top = (-128 - self.zero, 127 - self.zero) if self.signed else (-self.zero, 255 - self.zero)
        self.first = float(range_.scale)
        if learn:
            self.grown = nn.Parameter(torch.zeros(()))
        else:
            self.register_buffer("grown", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x rounded, in f32."""
        x = x.float()
        p = self.grown
        if isinstance(p, nn.Parameter):
            p = _Tempered.apply(p, (x.numel() * self.top) ** -0.5 / self.first**2)
        s = self.first * torch.exp(p)
        v = torch.clamp(x / s, self.low, self.top)
        return (v + (torch.round(v) - v).detach()) * s

    def range(self) -> Range:
        """The learned range. Raises TrainingError for a scale that is not finite."""
        s = self.first * float(torch.exp(self.grown.detach().double()))
        if not np.isfinite(s) or s <= 0:
            raise TrainingError(f"a learned scale became {s}: lower the learning rate, or keep the calibrated ranges (learn_ranges=False)")
        return Range(-127 * s, 127 * s, "learned") if self.signed else Range(self.low * s, self.top * s, "learned")


class _Tempered(torch.autograd.Function):
    """Identity on the logarithm of a scale. Its gradient is normalized as in LSQ and clipped to 1, so that no step changes a scale by more
    than the learning rate."""

    @staticmethod
    def forward(ctx, p, factor):
        ctx.factor = factor
        return p.clone()

    @staticmethod
    def backward(ctx, *grads):
        return torch.clamp(grads[0] * ctx.factor, -1, 1), None


class FakeWeight(nn.Module):
    """Rounds weights to 8 bits with one scale an output channel, along `axis`."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """w rounded."""
        w = w.float()
        others = tuple(i for i in range(w.ndim) if i != self.axis)
        top = w.detach().abs().amax(others, keepdim=True)
        s = torch.where(top > 0, top / 127, torch.ones_like(top))
        v = torch.clamp(w / s, -128, 127)
        return (v + (torch.round(v) - v).detach()) * s


def train_quantization_aware(
    net: Network,
    data: TrainingData | Batches,
    config: FinetuneConfig | None = None,
    *,
    ranges: Ranges | None = None,
    samples: int = 256,
    learn_ranges: bool = True,
    skip: Skip = (),
    teacher: Network | None = None,
    test: TrainingData | Batches | None = None,
    progress: Progress | None = None,
    insist: bool = False,
) -> QuantizationAware:
    """Trains `net` (fine-tuned, floating point) to be right in INT8. Without `ranges` it is calibrated on the first `samples` of the data.

    `skip` names layers (or says of one) that stay in floating point; `teacher` is for distillation, `net` itself is a good one.
    The default config is a short training at a low rate; folded weights differ widely in size, which AdamW takes better than SGD.
    `insist`: train although the network was cut and neither recovered nor fine-tuned since, or is quantized already.
    Raises CalibrationError, TrainingError, UsageError, PruneError (the order of steps).
    """
    check_order(net, "calibrate", insist)
    if config is not None and config.prune_to:
        raise UsageError("prune_to is for fine-tuning in floating point: prune and fine-tune first, then train for INT8 without it")
    config = config or FinetuneConfig(epochs=2, optimizer="adamw", lr=1e-4, weight_decay=0.0, warmup=0.0)
    skip = skip if callable(skip) else tuple(skip)
    device = select_device(config.device)
    made = fold_batch_norms(net)
    sites = find_quantization_sites(made, skip)
    if not sites.layers:
        raise TrainingError(f"'{net.name}' has no quantizable layer: no convolution or matrix product with constant weights")
    if ranges is None:
        feeds = Feeder(made, data, batch=1, device=device)
        ranges = calibrate(
            made, _iterate_first_batches(feeds, samples), run=_make_runner(made, find_quantization_sites(made).names(), device), zero_points=True
        )
    fakes, learned = make_fakes(sites, ranges, learn_ranges)
    student = free_batch(without_softmax(made), data, config.batch, device)
    module = NetworkModule(student, freeze=config.freeze, train=config.train, fakes=fakes).to(device)
    answers = None
    if config.distill > 0:
        answers = NetworkModule(free_batch(without_softmax(teacher or net), data, config.batch, device)).to(device).eval().requires_grad_(False)
    done = train_module(
        made, module, data, replace(config, freeze=(), train=()), teacher=answers, test=test, progress=progress, title="quantization-aware"
    )
    final = Ranges({name: learned[name].range() for name in sites.names()}, ranges.model, ranges.samples)
    quantized = quantize(done.network, final, skip=skip)
    note(quantized, "calibrate", by="quantization-aware training", steps=done.steps)
    return QuantizationAware(quantized, done.network, final, done)


def make_fakes(sites: QuantizationSites, ranges: Ranges, learn: bool) -> tuple[Fakes, dict[str, FakeActivation]]:
    """The fake-quantization sites, and the module per tensor; tensors with one range share one."""
    merged = merge_shared_ranges(sites, ranges)
    by_group = {group: FakeActivation(r, learn=learn) for group, r in merged.items()}
    hows = {t.name: by_group[sites.shared[t]] for t in sites.roots}
    values = {t.name: (None if readers is None else frozenset(r.name for r in readers), hows[t.name]) for t, readers in sites.roots.items()}
    weights = {layer.name: FakeWeight(get_weight_axis(layer)) for layer in sites.layers}
    return Fakes(values, weights), hows


def _iterate_first_batches(feeder: Feeder, count: int) -> Iterable[dict[str, np.ndarray]]:
    for k, (feeds, _) in enumerate(feeder.all()):
        if k == count:
            return
        yield {n: x.cpu().numpy() for n, x in feeds.items()}


def _make_runner(net: Network, wanted: list[str], device: torch.device) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Returns a runner that computes the requested tensors of a sample."""
    watched = net.clone()
    inputs = {t.name for t in watched.inputs}
    names = [n for n in wanted if n not in inputs]
    watched.outputs = [watched.tensor(n) for n in names]
    module = NetworkModule(watched).to(device).eval()

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            got = to_outputs(module(**{n: torch.from_numpy(np.array(a)).to(device) for n, a in feeds.items()}))
        return {**{n: np.asarray(a) for n, a in feeds.items()}, **{n: x.float().cpu().numpy() for n, x in zip(names, got, strict=True)}}

    return run
