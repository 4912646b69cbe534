"""The error for TensorRT's names that whet does not serve."""

from __future__ import annotations

from whet.errors import WhetError


class NotServedError(WhetError, AttributeError):
    """A name of TensorRT that whet.trt does not serve; the message says which and why.

    An AttributeError too, so that `hasattr` is False and clients use their fallback for older versions of TensorRT.
    """

    def __init__(self, name: str, why: str):
        super().__init__(f"whet.trt does not serve {name}: {why}")
