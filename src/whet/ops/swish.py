"""Swish: y = x * sigmoid(alpha * x); SiLU with alpha 1."""

from whet.ops._unary import register_unary, sigmoid

register_unary("Swish", lambda x, alpha: x * sigmoid(x * alpha), attrs={"alpha": 1.0}, samples=[{"alpha": 1.5}])
