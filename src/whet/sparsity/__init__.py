"""Structured sparsity that kernels exploit: 2:4 along the reduction axis."""

from whet.sparsity.two_four import eligible_layers, force_two_four, is_two_four, reduction_axis, two_four

__all__ = ["eligible_layers", "force_two_four", "is_two_four", "reduction_axis", "two_four"]
