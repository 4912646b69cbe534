"""The check for an installed PyTorch and its error message."""

from __future__ import annotations

from importlib.util import find_spec

from whet.errors import BackendError

INSTALL = "pip install 'whet[train]' (any PyTorch from 2.4 on; the CPU build is enough to try things)"


def require_torch(package: str = "torch", subject: str = "Training") -> None:
    """Raises BackendError when `package` is not installed."""
    if find_spec(package) is None:
        raise BackendError(f"{subject} needs {package}, which is not installed: {INSTALL}")
