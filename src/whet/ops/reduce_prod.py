"""ReduceProd: the product over axes."""

from operator import mul

from whet.ops._reduce import register_reduction, shape_value_by

register_reduction("ReduceProd", lambda x, axes, keep: x.prod(axis=axes, keepdims=keep), shape_value=shape_value_by(mul))
