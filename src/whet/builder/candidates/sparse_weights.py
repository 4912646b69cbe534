"""Applying BuildConfig.sparsity to the weights: "force" overwrites all eligible weights with 2:4 sparse ones before the passes run.

As in trtexec's --sparsity, "disable" and "enable" leave weights unchanged ("enable" permits 2:4 kernels for weights that are 2:4 already), and
"force" overwrites them, so that the time of a sparse engine is known before a sparse network has been trained: "force" keeps the two largest
magnitudes of every four, "force:positional" the first two, as trtexec does.
"""

from __future__ import annotations

from whet.builder.config import BuildConfig
from whet.network import Network
from whet.sparsity import force_two_four

_NAMED = 4  # layers that the note names


def apply_sparsity(net: Network, config: BuildConfig) -> tuple[Network, list[str]]:
    """The source network with the weights of `config.sparsity`, and notes for the user.

    Returns `net` itself and no notes if no weight changes: without "force", or if the weights are 2:4 already.
    """
    if not config.sparsity.startswith("force"):
        return net, []
    positional = config.sparsity == "force:positional"
    sparse, done, left = force_two_four(net, positional=positional)
    if not done:
        return net, []
    note = (
        f"sparsity={config.sparsity} wrote 2:4 weights into {len(done)} layers (the {'first' if positional else 'largest'} two of every four "
        "along the reduction axis stay); "
        "the accuracy is meaningless before fine-tuning."
    )
    if left:
        more = f"; and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        note += f" {len(left)} weighted layers cannot be 2:4: " + "; ".join(f"{n}: {why}" for n, why in list(left.items())[:_NAMED]) + more
    return sparse, [note]
