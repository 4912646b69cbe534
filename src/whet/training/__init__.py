"""A network as a trainable PyTorch module, fine-tuning, quantization-aware training. Needs the extra: pip install 'whet[train]'.

    module = net.to_torch()                                   # a torch.nn.Module of the same graph
    net = whet.training.from_module(net, module)              # its weights back in the network
    tuned = whet.training.finetune(net, data, config)         # labels, distillation, masks held, checkpoints
    ready = whet.training.quantization_aware(net, data, ...)  # the last step before an INT8 engine

Names are imported when they are first used; without torch that raises BackendError, which says what to install.
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "FinetuneConfig": "config",
    "Finetuned": "tuning",
    "NetworkModule": "module",
    "QuantizationAware": "qat",
    "TrainingData": "data",
    "accuracy": "evaluate",
    "finetune": "tuning",
    "from_module": "module",
    "hold": "masks",
    "masks_of": "masks",
    "quantization_aware": "qat",
    "to_torch": "module",
    "training_data": "data",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'whet.training' has no attribute {name!r}; it has {', '.join(_HOME)}")
    if _HOME[name] not in ("config", "data"):
        from whet.training._torch import need_torch

        need_torch()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
