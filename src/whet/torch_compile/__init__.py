"""PyTorch modules as engines: `whet.compile`, and the backend "whet" of `torch.compile`. Needs the extra: pip install 'whet[export]'.

    fast = whet.compile(module, (x,), fp16=True)              # one engine; torch tensors in and out
    fast = torch.compile(module, backend="whet")              # an engine for each graph that torch finds; the rest runs in torch

torch finds the backend through the entry point `torch_dynamo_backends`, or after `import whet.torch_compile`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from whet.registry import import_on_demand

if TYPE_CHECKING:
    from whet.torch_compile.dynamo import whet_backend as whet_backend
    from whet.torch_compile.module import CompiledModule as CompiledModule
    from whet.torch_compile.module import compile as compile
    from whet.torch_compile.options import CompileOptions as CompileOptions
    from whet.torch_compile.options import Input as Input

_HOME = {
    "CompileOptions": "whet.torch_compile.options",
    "CompiledModule": "whet.torch_compile.module",
    "Input": "whet.torch_compile.options",
    "compile": "whet.torch_compile.module",
    "whet_backend": "whet.torch_compile.dynamo",
}

__all__ = sorted(_HOME)


def _has_torch() -> bool:
    return find_spec("torch") is not None


def _without_torch(name: str) -> Any:
    """What a public name is where torch is not installed: a function that says so when it is called."""

    def raise_missing_torch(*_: Any, **__: Any) -> Any:
        from whet.errors import BackendError

        raise BackendError(f"whet.torch_compile.{name} needs torch, which is not installed: pip install 'whet[export]'")

    raise_missing_torch.__name__ = name
    return raise_missing_torch


if not TYPE_CHECKING:  # type checkers would give every name the type Any

    def __getattr__(name: str) -> Any:
        if name in _HOME and not _has_torch():
            return _without_torch(name)
        return import_on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__


if _has_torch():
    from whet.torch_compile import dynamo as dynamo  # registers the backend
