"""PyTorch translations of ops, one file per family. `torch_op("Name")` registers a function from a bound layer to a function of tensors.

Ops without a translation cannot be trained; `why_not` gives the reason.
"""

from whet.registry import load_folder
from whet.training.translate._base import TRANSLATIONS, torch_op, translate_layer, why_not

load_folder(__name__, __path__)

__all__ = ["TRANSLATIONS", "torch_op", "translate_layer", "why_not"]
