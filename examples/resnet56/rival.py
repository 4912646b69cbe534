"""The published ResNet-56 pruned by Torch-Pruning and imported through ONNX, for comparison with whet's cuts.

    PYTHONPATH=src python examples/resnet56/rival.py DATA OUT      # needs torch, torch-pruning, onnxscript

MagnitudePruner ranks channels by their L2 norm and cuts the same share of each layer; GroupNormPruner ranks the channels of all layers
together by the norms of everything coupled to them (DepGraph, Fang et al. 2023). Torch-Pruning's dependency graph does not follow channels
through the shortcut of option A (subsampling and zero padding), so the shortcut is expressed as an equivalent convolution: 1x1, stride 2,
ones on a diagonal. The pruned network keeps this convolution.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from model import BLOCKS, WIDTHS, published
from torch import nn

import whet
from whet.frontends import save_onnx
from whet.network import Network
from whet.pruning import count_flops, count_params

#: Name -> (pruner, importance, whether all layers are ranked together, share of FLOPs kept, divisor of widths)
RIVALS = {
    "tp-magnitude-50": ("MagnitudePruner", "MagnitudeImportance", False, 0.50, None),
    "tp-group-50": ("GroupNormPruner", "GroupMagnitudeImportance", True, 0.50, None),
    "tp-group-50-by8": ("GroupNormPruner", "GroupMagnitudeImportance", True, 0.50, 8),
}


class Block(nn.Module):
    """Two 3x3 convolutions and a sum, with the published names."""

    def __init__(self, cin: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(cin, width, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class CifarResNet(nn.Module):
    """x[N,3,32,32] -> logits[N,10], with `blocks` residual blocks per stage (9: ResNet-56, 3: ResNet-20). The shortcuts of option A are
    convolutions, since Torch-Pruning does not follow channels through padding."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        cin = 16
        for stage, width in enumerate(WIDTHS, 1):
            layers = [Block(cin if i == 0 else width, width, 2 if i == 0 and width != cin else 1) for i in range(blocks)]
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
            cin = width
        self.linear = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def module(folder: Path) -> CifarResNet:
    """The network with the published weights."""
    values = {n: torch.from_numpy(np.array(a)) for n, a in published(folder).items()}
    made = CifarResNet()
    missing, unexpected = made.load_state_dict(values, strict=False)
    if unexpected or [n for n in missing if "shortcut" not in n and "num_batches" not in n]:
        raise SystemExit(f"the checkpoint does not fit: missing {missing}, unexpected {unexpected}")
    for stage in (made.layer2, made.layer3):
        w = stage[0].shortcut.weight
        with torch.no_grad():
            w.zero_()
            for i in range(w.shape[1]):
                w[i + (w.shape[0] - w.shape[1]) // 2, i] = 1
    return made.eval()


def pruned(folder: Path, name: str) -> Network:
    """The pruned network; its FLOPs are the smallest that whole channels allow at or above the requested share."""
    import torch_pruning as tp

    pruner, importance, together, share, multiple = RIVALS[name]
    example = torch.randn(1, 3, 32, 32)
    whole = tp.utils.count_ops_and_params(module(folder), example)[0]
    low, high, best = 0.0, 1.0, None
    for _ in range(9):
        made, ratio = module(folder), (low + high) / 2
        getattr(tp.pruner, pruner)(
            made, example, importance=getattr(tp.importance, importance)(p=2), global_pruning=together, pruning_ratio=ratio,
            ignored_layers=[made.linear], max_pruning_ratio=0.9, round_to=multiple,
        ).step()  # fmt: skip
        if tp.utils.count_ops_and_params(made, example)[0] > share * whole:
            low = ratio
        else:
            high, best = ratio, made
    if best is None:
        raise SystemExit(f"{name}: no ratio leaves {share:.0%} of the FLOPs")
    return whet.from_torch(best.eval(), example)


def main() -> None:
    """Writes every pruned network, before fine-tuning."""
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    whole = whet.from_torch(module(folder), torch.randn(1, 3, 32, 32))
    for name in RIVALS:
        net = pruned(folder, name)
        save_onnx(net, out / f"{name}.onnx")
        fewer = count_flops(whole) / count_flops(net)
        print(f"{name}: parameters {count_params(net):,}, FLOPs {count_flops(net) / 1e6:.1f} M ({fewer:.2f} times fewer)", flush=True)


if __name__ == "__main__":
    main()
