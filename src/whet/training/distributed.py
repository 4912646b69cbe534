"""Several processes of one training, as `torchrun` starts them: one GPU each, gradients averaged by torch's DistributedDataParallel.

    torchrun --nproc-per-node=8 -m whet finetune model.onnx --data ...

`batch` stays the number of samples per step of all processes together, so the settings of one GPU hold for several. Batch norms use the samples of
their own process. Process 0 writes checkpoints, logs and the result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from whet.errors import UsageError
from whet.training.config import FinetuneConfig


@dataclass(frozen=True)
class Workers:
    """The processes of a training: this one's `rank` of `count`, and `local`, its number on this machine."""

    rank: int = 0
    count: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """True in the process that writes files."""
        return self.rank == 0

    def share(self, samples: torch.Tensor) -> torch.Tensor:
        """This process's part of a step's sample indices."""
        return samples[self.rank :: self.count]


ONE_PROCESS = Workers()


def read_workers() -> Workers:
    """The processes by torchrun's environment variables; a single one without them. Raises UsageError for damaged ones."""
    try:
        found = Workers(*(int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))))
    except ValueError:
        raise UsageError("RANK, WORLD_SIZE and LOCAL_RANK are integers that torchrun sets: unset them, or start the training with torchrun") from None
    return found if found.count > 1 else ONE_PROCESS


def join_process_group(config: FinetuneConfig, device: torch.device) -> Workers:
    """Joins torch's process group if there are several processes. Raises UsageError for settings that do not work there."""
    found = read_workers()
    if found.count == 1:
        return found
    if config.batch % found.count:
        raise UsageError(f"batch={config.batch} is shared by {found.count} processes: give a multiple of {found.count}")
    if config.seconds or config.views:
        raise UsageError("seconds and views work in one process only: leave them out, or start without torchrun")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return found


def wrap_module(module: nn.Module, device: torch.device, workers: Workers) -> nn.Module:
    """The module with averaged gradients; itself in a single process."""
    if workers.count == 1:
        return module
    return nn.parallel.DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


def copy_state_to_all(module: nn.Module, workers: Workers) -> None:
    """Copies the state of process 0 into the modules of all."""
    if workers.count > 1:
        for t in module.state_dict().values():
            torch.distributed.broadcast(t, 0)
