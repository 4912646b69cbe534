"""Checks before any work that data and packages for the steps of run.py are available."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

WEIGHTS = "cifar10/resnet/resnet56-4bfd9763.th"
JPEGS, EXACT = "cifar10/cifar10_jpeg60k.npz", "cifar10/cifar10_lossless.npz"
DATA = {"prune": (WEIGHTS,), "tune": (JPEGS, EXACT), "build": (JPEGS,), "judge": (JPEGS, EXACT)}
PACKAGES = {"prune": ("torch",), "tune": ("torch", "PIL"), "build": ("PIL",), "judge": ("PIL",)}


def lacking(steps: Collection[str], data: Path, published: bool) -> str:
    """What is missing for these steps and how to get it, or "". `published`: the published network is built too."""
    wanted = [s for s in DATA if s in steps]
    more = ((WEIGHTS,), ("torch",)) if published and "build" in steps else ((), ())
    files = [f for f in dict.fromkeys([*(f for s in wanted for f in DATA[s]), *more[0]]) if not (data / f).is_file()]
    packages = [m for m in dict.fromkeys([*(m for s in wanted for m in PACKAGES[s]), *more[1]]) if find_spec(m) is None]
    said = []
    if files:
        said.append(
            f"{data} has no {', '.join(files)}. Fetch it (python examples/fetch.py cifar10 --to {data}) or pass --data FOLDER. Without a network "
            "and such a folder `make demo` shows the same steps on digits that are in the repository."
        )
    if packages:
        said.append(f"{', '.join(packages)} cannot be imported: pip install '.[train,images]'")
    if said and "build" in steps and published and set(files) <= {WEIGHTS} and set(packages) <= {"torch"} and not {"prune", "tune"} & set(steps):
        said.append("--no-published omits the published network, which is the only one that needs this.")
    return "\n".join(said)
