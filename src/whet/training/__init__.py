"""A network as a trainable PyTorch module, fine-tuning, quantization-aware training. Needs the extra: pip install 'whet[train]'.

    module = net.to_torch()                                   # a torch.nn.Module of the same graph
    net = whet.training.from_module(net, module)              # copies its weights back into the network
    tuned = whet.training.finetune(net, data, config)         # labels, distillation, fixed masks, checkpoints
    ready = whet.training.train_quantization_aware(net, data, ...)  # the last step before an INT8 engine

Names are imported on first use. Without torch that raises BackendError with the install command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.registry import import_on_demand

if TYPE_CHECKING:
    from whet.training.config import FinetuneConfig as FinetuneConfig
    from whet.training.data import TrainingData as TrainingData
    from whet.training.data import read_training_data as read_training_data
    from whet.training.evaluate import accuracy as accuracy
    from whet.training.masks import hold as hold
    from whet.training.masks import make_masks as make_masks
    from whet.training.module import NetworkModule as NetworkModule
    from whet.training.module import from_module as from_module
    from whet.training.module import to_torch as to_torch
    from whet.training.qat import QuantizationAware as QuantizationAware
    from whet.training.qat import train_quantization_aware as train_quantization_aware
    from whet.training.tuning import Finetuned as Finetuned
    from whet.training.tuning import finetune as finetune

_HOME = {
    "FinetuneConfig": "whet.training.config",
    "Finetuned": "whet.training.tuning",
    "NetworkModule": "whet.training.module",
    "QuantizationAware": "whet.training.qat",
    "TrainingData": "whet.training.data",
    "accuracy": "whet.training.evaluate",
    "finetune": "whet.training.tuning",
    "from_module": "whet.training.module",
    "hold": "whet.training.masks",
    "make_masks": "whet.training.masks",
    "train_quantization_aware": "whet.training.qat",
    "to_torch": "whet.training.module",
    "read_training_data": "whet.training.data",
}

_WITHOUT_TORCH = ("whet.training", "whet.training.config", "whet.training.data")

__all__ = sorted(_HOME)

if not TYPE_CHECKING:  # where it is defined, type checkers take every name for Any

    def __getattr__(name: str) -> Any:
        if _HOME.get(name, __name__) not in _WITHOUT_TORCH:
            from whet.training._torch import require_torch

            require_torch()
        return import_on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
