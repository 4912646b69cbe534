"""What BuildConfig.sparsity asks of the weights: "force" writes 2:4 into all that can have it, before anything else looks at the network.

As trtexec's --sparsity: "disable" and "enable" leave weights as they are ("enable" lets kernels for 2:4 be chosen where weights have it),
"force" overwrites them, so that the time of a sparse engine is known before anybody has trained one.
"""

from __future__ import annotations

from whet.builder.config import BuildConfig
from whet.network import Network
from whet.sparsity import force_two_four

_NAMED = 4  # layers that the note names


def with_sparsity(net: Network, config: BuildConfig) -> tuple[Network, list[str]]:
    """The source network with the weights that `config.sparsity` asks for, and what to tell the user of it.

    `net` itself, and nothing to tell, where no weight changes: without "force", and for a network that has been here already.
    """
    if config.sparsity != "force":
        return net, []
    made, done, left = force_two_four(net)
    if not done:
        return net, []
    said = (
        f"sparsity=force wrote 2:4 weights into {len(done)} layers (the two largest of every four along the reduction axis stay); "
        "the accuracy is not to be trusted before fine-tuning."
    )
    if left:
        more = f"; and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        said += f" {len(left)} weighted layers cannot be 2:4: " + "; ".join(f"{n}: {why}" for n, why in list(left.items())[:_NAMED]) + more
    return made, [said]
