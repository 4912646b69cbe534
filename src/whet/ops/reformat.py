"""Reformat: the same values in another memory format or storage type. Inserted by the builder into lowered networks."""

from whet.ops._base import REQUIRED, op
from whet.ops._types import infer_same_as_input

op(
    "Reformat",
    infer_same_as_input,
    lambda layer, x: x,
    attrs={"source_format": REQUIRED, "source_dtype": REQUIRED, "format": REQUIRED, "dtype": REQUIRED},
    onnx_ops=(),
)
