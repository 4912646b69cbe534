"""Structured sparsity that kernels exploit: 2:4 along the reduction axis."""

from whet.sparsity.guard import BrokenLayer, TwoFourGuard
from whet.sparsity.patterns import Pattern, parse_pattern
from whet.sparsity.two_four import eligible_layers, first_violation, force_two_four, is_two_four, reduction_axis, two_four

__all__ = [
    "BrokenLayer", "Pattern", "TwoFourGuard", "eligible_layers", "first_violation", "force_two_four", "is_two_four", "parse_pattern",
    "reduction_axis", "two_four",
]  # fmt: skip
