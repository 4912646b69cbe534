"""whet: takes a trained network and gives the fastest engine that is still right, on the machine it will run on, and shows why.

    net = whet.network_from_onnx("model.onnx")
    plan = whet.build(net, whet.BuildConfig(precisions=("bf16",)))
    whet.write_engine(plan, "model.engine")
    engine = whet.Runtime().load("model.engine")
    outputs = engine.create_context().run({"input": array})

Names are imported when they are first used, so that `import whet` is light and the runtime can ship alone.
"""

from __future__ import annotations

from typing import Any

from whet.registry import on_demand

__version__ = "0.1.0"

_HOME = {
    "BuildConfig": "whet.builder",
    "Runtime": "whet.runtime",
    "WhetError": "whet.errors",
    "build": "whet.builder",
    "check_onnx": "whet.frontends",
    "from_torch": "whet.frontends.torch",
    "network_from_onnx": "whet.frontends",
    "read_engine": "whet.engine",
    "save_onnx": "whet.frontends",
    "write_engine": "whet.engine",
    "zoo": "whet.zoo",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    return on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
