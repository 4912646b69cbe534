"""Structured sparsity that kernels exploit: 2:4 along the reduction axis."""

from whet.sparsity.guard import BrokenLayer, TwoFourGuard
from whet.sparsity.two_four import eligible_layers, first_violation, force_two_four, is_two_four, reduction_axis, two_four

__all__ = ["BrokenLayer", "TwoFourGuard", "eligible_layers", "first_violation", "force_two_four", "is_two_four", "reduction_axis", "two_four"]
