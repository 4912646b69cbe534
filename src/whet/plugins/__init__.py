"""Ops of one's own in packages outside whet: `whet.register` and the tactics that it takes (docs/plugins.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.registry import import_on_demand

if TYPE_CHECKING:
    from whet.plugins.cuda_tactic import CudaTactic as CudaTactic
    from whet.plugins.cupy_tactic import CupyTactic as CupyTactic
    from whet.plugins.llvm_tactic import LlvmTactic as LlvmTactic
    from whet.plugins.numpy_tactic import NumpyTactic as NumpyTactic
    from whet.plugins.registration import register as register
    from whet.plugins.sample_checks import Checked as Checked
    from whet.plugins.sample_checks import check_samples as check_samples
    from whet.plugins.tactic import PluginTactic as PluginTactic
    from whet.plugins.triton_tactic import TritonTactic as TritonTactic

_HOME = {
    "Checked": "whet.plugins.sample_checks",
    "CudaTactic": "whet.plugins.cuda_tactic",
    "CupyTactic": "whet.plugins.cupy_tactic",
    "LlvmTactic": "whet.plugins.llvm_tactic",
    "NumpyTactic": "whet.plugins.numpy_tactic",
    "PluginTactic": "whet.plugins.tactic",
    "TritonTactic": "whet.plugins.triton_tactic",
    "check_samples": "whet.plugins.sample_checks",
    "register": "whet.plugins.registration",
}

__all__ = [*_HOME]

if not TYPE_CHECKING:  # type checkers would give every name the type Any

    def __getattr__(name: str) -> Any:
        return import_on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted(__all__)
