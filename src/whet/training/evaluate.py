"""Accuracy of a trainable module on labelled data."""

from __future__ import annotations

import torch

from whet.errors import TrainingError
from whet.network import Network
from whet.training.data import Batches, TrainingData
from whet.training.feeding import Feeder
from whet.training.loss import to_outputs
from whet.training.module import NetworkModule


def accuracy(net: Network | NetworkModule, data: TrainingData | Batches, *, batch: int = 256, device: str = "cpu") -> float:
    """Top-1 accuracy of the first output in fp32, 0..1. Raises TrainingError without labels."""
    module = net if isinstance(net, NetworkModule) else net.to_torch()
    where = next((p.device for p in module.parameters()), torch.device(device)) if isinstance(net, NetworkModule) else torch.device(device)
    module.to(where)
    was = module.training
    module.eval()
    right = total = 0
    with torch.no_grad():
        for feeds, labels in Feeder(module.network, data, batch=batch, device=where).all():
            if labels is None:
                raise TrainingError("accuracy needs labels: the data have none")
            found = to_outputs(module(**feeds))[0].argmax(1)
            right += int((found == labels.to(found.device)).sum())
            total += len(labels)
    module.train(was)
    return right / total
