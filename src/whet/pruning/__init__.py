"""Pruning of source networks: coupled groups, branches, importance, selection by measured latency, cutting, label-free recovery, recipes."""

from whet.pruning.compare import Comparison, Facts, compare
from whet.pruning.counting import count_flops, count_params
from whet.pruning.coupling import Group, find_group, groups
from whet.pruning.cut import cut, zero_channels
from whet.pruning.depth import Branch, branches, remove_branches, silence_branches
from whet.pruning.importance import Samples, choose, importance
from whet.pruning.patterned import Patterned, apply_pattern
from whet.pruning.prune import PruneConfig, Pruned, prune
from whet.pruning.recipe import Recipe, apply_recipe, load_recipe, make_pruning_recipe, save_recipe, save_weights
from whet.pruning.recovery import RecoveryConfig, recover, reestimate_batch_norms
from whet.pruning.sparsity_advice import EngineTimes, LayerAdvice, SparsityAdvice, advise_sparsity
from whet.pruning.target import Target
from whet.pruning.unstructured import compute_zero_fraction, list_matrices, zero_smallest

__all__ = [
    "Branch",
    "Comparison",
    "EngineTimes",
    "Facts",
    "Group",
    "LayerAdvice",
    "Patterned",
    "PruneConfig",
    "Pruned",
    "Recipe",
    "RecoveryConfig",
    "Samples",
    "SparsityAdvice",
    "Target",
    "advise_sparsity",
    "apply_pattern",
    "apply_recipe",
    "branches",
    "choose",
    "compare",
    "compute_zero_fraction",
    "count_flops",
    "count_params",
    "cut",
    "find_group",
    "groups",
    "importance",
    "list_matrices",
    "load_recipe",
    "make_pruning_recipe",
    "prune",
    "recover",
    "reestimate_batch_norms",
    "remove_branches",
    "save_recipe",
    "save_weights",
    "silence_branches",
    "zero_channels",
    "zero_smallest",
]  # fmt: skip
