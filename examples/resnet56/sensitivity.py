"""Change of the published network's outputs without each block: prints the contents of variants.LEAST.

    PYTHONPATH=src python examples/resnet56/sensitivity.py DATA      # two minutes on two cores; needs torch
"""

import sys
from pathlib import Path

import data as cifar
import model
import torch

from whet.pruning import branches, remove_branches

IMAGES = 200


def main() -> None:
    """KL divergence to the published network's outputs on training images, per block in ascending order."""
    folder = Path(sys.argv[1])
    net = model.load(folder)
    x = torch.from_numpy(cifar.normalized(cifar.train_set(folder, IMAGES).inputs["x"]))

    def outputs(of):
        with torch.no_grad():
            return torch.log_softmax(of.to_torch().eval()(x), 1)

    want, found = outputs(net), {}
    for b in branches(net):
        found[b.name] = float(torch.nn.functional.kl_div(outputs(remove_branches(net, [b.name])), want, reduction="batchmean", log_target=True))
    for name, lost in sorted(found.items(), key=lambda item: item[1]):
        print(f'    "{name}",  # {lost:.3f}')


if __name__ == "__main__":
    main()
