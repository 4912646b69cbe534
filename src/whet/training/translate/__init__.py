"""What ops mean in PyTorch. One file a family; `torch_op("Name")` registers a function of a bound layer that returns a function of tensors.

An op that is not here is not trained; `why_not` names it with the reason.
"""

from whet.registry import load_folder
from whet.training.translate._base import TRANSLATIONS, torch_op, translated, why_not

load_folder(__name__, __path__)

__all__ = ["TRANSLATIONS", "torch_op", "translated", "why_not"]
