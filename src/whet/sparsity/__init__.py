"""Structured sparsity that kernels exploit: 2:4 along the reduction axis."""

from whet.sparsity.guard import BrokenLayer, TwoFourGuard
from whet.sparsity.patterns import Pattern, parse_pattern
from whet.sparsity.two_four import find_first_violation, find_reduction_axis, force_two_four, is_two_four, list_eligible_layers, two_four

__all__ = [
    "BrokenLayer",
    "Pattern",
    "TwoFourGuard",
    "find_first_violation",
    "find_reduction_axis",
    "force_two_four",
    "is_two_four",
    "list_eligible_layers",
    "parse_pattern",
    "two_four",
]  # fmt: skip
