"""ONNX Runtime's execution providers as backends of whet."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from whet.backends import get_backend, get_capabilities
from whet.errors import BackendError, UsageError, WhetWarning

_BACKENDS = {
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "CUDAExecutionProvider": "cuda",
    "OpenVINOExecutionProvider": "cpu",
    "DnnlExecutionProvider": "cpu",
    "CPUExecutionProvider": "cpu",
}
_PRECISIONS = {"trt_fp16_enable": "fp16", "trt_bf16_enable": "bf16"}  # options of TensorRT's provider
Provider = str | tuple[str, dict[str, Any]]


def _can_open(backend: str) -> bool:
    try:
        get_backend(backend)
    except BackendError:
        return False
    return True


def get_available_providers() -> list[str]:
    """The providers that this machine has a backend for, in the order of preference."""
    gpu = ["TensorrtExecutionProvider", "CUDAExecutionProvider"] if _can_open("cuda") else []
    return [*gpu, "CPUExecutionProvider"]


def get_device() -> str:
    """ "GPU" or "CPU"."""
    return "GPU" if _can_open("cuda") else "CPU"


def set_default_logger_severity(severity: int) -> None:
    """Accepted without effect: whet's notes are Python warnings."""


def select_provider(providers: Sequence[Provider] | None, options: Sequence[dict[str, Any]] | None) -> tuple[str, str, dict[str, Any]]:
    """(provider, backend, parameters of `whet.build`) of the first usable provider; the CPU without any.

    A provider that cannot be used is skipped with a WhetWarning, as in ONNX Runtime. Raises UsageError for an unsuitable argument.
    """
    if isinstance(providers, str):
        raise UsageError(f"providers: a list such as [{providers!r}], not a text")
    if options is not None and len(options) != len(providers or ()):
        raise UsageError(f"provider_options: {len(options)} dicts for {len(providers or ())} providers")
    for k, provider in enumerate(providers or ()):
        name, given = (provider, {}) if isinstance(provider, str) else provider
        given = {**given, **(options[k] if options is not None else {})}
        backend = _BACKENDS.get(name)
        if backend is None:
            warnings.warn(f"whet has no provider {name}; it has {', '.join(_BACKENDS)}", WhetWarning, stacklevel=3)
        elif not get_capabilities(backend).host_memory and not _can_open(backend):
            warnings.warn(f"{name} cannot be used: there is no GPU that whet can use", WhetWarning, stacklevel=3)
        else:
            return name, backend, {p: True for key, p in _PRECISIONS.items() if str(given.get(key, "0")).lower() in ("1", "true")}
    return "CPUExecutionProvider", "cpu", {}
