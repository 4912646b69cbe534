"""Reformat: the same values in another memory format or storage type. Only lowered networks hold it; the builder puts it there."""

from whet.ops._base import REQUIRED, op
from whet.ops._types import same_as_input

op(
    "Reformat",
    same_as_input,
    lambda layer, x: x,
    attrs={"source_format": REQUIRED, "source_dtype": REQUIRED, "format": REQUIRED, "dtype": REQUIRED},
    onnx_ops=(),
)
