"""Pruning of source networks: coupled groups, importance, cutting, recovery without labels, recipes."""

from whet.pruning.counting import count_flops, count_params
from whet.pruning.coupling import Group, find_group, groups
from whet.pruning.cut import cut, zeroed
from whet.pruning.importance import choose, importance
from whet.pruning.prune import PruneConfig, Pruned, prune
from whet.pruning.recipe import Recipe, apply_recipe, load_recipe, recipe_of, save_recipe
from whet.pruning.recovery import RecoveryConfig, recover, reestimate_batch_norms
from whet.pruning.unstructured import matrices, zero_smallest, zeros

__all__ = [
    "Group", "PruneConfig", "Pruned", "Recipe", "RecoveryConfig", "apply_recipe", "choose", "count_flops", "count_params", "cut",
    "find_group", "groups", "importance", "load_recipe", "matrices", "prune", "recipe_of", "recover", "reestimate_batch_norms",
    "save_recipe", "zero_smallest", "zeroed", "zeros",
]  # fmt: skip
