"""A training step as one CUDA graph: with small networks a GPU is otherwise bound by launch overhead.

The first steps run eagerly (cuDNN selects kernels, the optimizer creates its state). Then one step is captured and replayed with each batch
copied into the same buffers (torch.cuda.graph; CUDA Programming Guide, "CUDA Graphs"). Results equal those of eager steps; the learning rate
is a device tensor, so it may change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from whet.training.config import FinetuneConfig

Feeds = dict[str, torch.Tensor]
Answers = tuple[torch.Tensor, ...]
Step = Callable[[Feeds, torch.Tensor | None, Answers], torch.Tensor]
"""step(inputs by name, labels, teacher outputs or none) -> loss; updates the weights."""

_WARM = 4  # eager steps before the capture


def can_be_graphed(config: FinetuneConfig, device: torch.device) -> bool:
    """True if a step never synchronizes with the host: on CUDA, without the fp16 loss scaler and without a user-defined loss (which may read
    values), with one batch per step, unless `config.graph` is False."""
    fits = device.type == "cuda" and config.precision != "fp16" and config.loss in ("auto", "cross_entropy", "mse") and config.distill_loss == "auto"
    return fits and config.accumulate == 1 and config.graph is not False


class GraphedStep:
    """Runs `step` eagerly for warm-up, then captures it once and replays it. Batches of other shapes run eagerly."""

    def __init__(self, step: Step):
        self.step = step
        self.done = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._feeds: Feeds = {}
        self._labels: torch.Tensor | None = None
        self._answers: Answers = ()
        self._loss: torch.Tensor | None = None

    def __call__(self, feeds: Feeds, labels: torch.Tensor | None, answers: Answers = ()) -> torch.Tensor:
        """Runs one step; the returned loss tensor is overwritten by the next step."""
        self.done += 1
        if self._graph is None:
            if self.done <= _WARM:
                return self._run_warm_up(feeds, labels, answers)
            self._record(feeds, labels, answers)
        if not self._fits(feeds, labels):
            return self.step(feeds, labels, answers)
        assert self._graph is not None
        assert self._loss is not None
        for name, x in feeds.items():
            self._feeds[name].copy_(x)
        if labels is not None and self._labels is not None:
            self._labels.copy_(labels)
        for here, x in zip(self._answers, answers, strict=True):
            here.copy_(x)
        self._graph.replay()
        return self._loss

    def _run_warm_up(self, feeds: Feeds, labels: torch.Tensor | None, answers: Answers) -> torch.Tensor:
        """Runs one warm-up step on a side stream, as graph capture requires."""
        stream, now = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            loss = self.step(feeds, labels, answers)
        now.wait_stream(stream)
        return loss

    def _record(self, feeds: Feeds, labels: torch.Tensor | None, answers: Answers) -> None:
        self._feeds = {name: x.clone() for name, x in feeds.items()}  # clone keeps channels last
        self._labels = None if labels is None else labels.clone()
        self._answers = tuple(x.clone() for x in answers)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss = self.step(self._feeds, self._labels, self._answers).detach()
        self._graph = graph

    def _fits(self, feeds: Feeds, labels: torch.Tensor | None) -> bool:
        same = all(x.shape == self._feeds[name].shape for name, x in feeds.items())
        return same and (labels is None) == (self._labels is None)
