"""whet: builds the fastest correct inference engine from a trained network on the machine it will run on, and explains every decision.

    net = whet.network_from_onnx("model.onnx")
    plan = whet.build(net, whet.BuildConfig(precisions=("bf16",)))
    whet.write_engine(plan, "model.engine")
    engine = whet.Runtime().load("model.engine")
    outputs = engine.create_context().run({"input": array})

Names and sub-packages (`whet.builder.build_int8`) are imported on first use, so that `import whet` is light and the runtime can ship
alone. Type checkers and editors read the imports under TYPE_CHECKING.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.registry import on_demand

if TYPE_CHECKING:
    from whet import backends as backends
    from whet import builder as builder
    from whet import cli as cli
    from whet import composites as composites
    from whet import engine as engine
    from whet import errors as errors
    from whet import file_kinds as file_kinds
    from whet import files as files
    from whet import forks as forks
    from whet import frontends as frontends
    from whet import inspector as inspector
    from whet import measure as measure
    from whet import network as network
    from whet import ops as ops
    from whet import option_names as option_names
    from whet import passes as passes
    from whet import precision as precision
    from whet import pruning as pruning
    from whet import registry as registry
    from whet import report as report
    from whet import rewrite as rewrite
    from whet import runtime as runtime
    from whet import search as search
    from whet import sparsity as sparsity
    from whet import tactics as tactics
    from whet import torch_compile as torch_compile
    from whet import training as training
    from whet import trt as trt
    from whet import zoo as zoo
    from whet.builder import BuildConfig as BuildConfig
    from whet.builder import build as build
    from whet.engine import read_engine as read_engine
    from whet.engine import write_engine as write_engine
    from whet.errors import WhetError as WhetError
    from whet.frontends import check_onnx as check_onnx
    from whet.frontends import network_from_caffe as network_from_caffe
    from whet.frontends import network_from_onnx as network_from_onnx
    from whet.frontends import save_onnx as save_onnx
    from whet.frontends.torch import from_torch as from_torch
    from whet.runtime import Runtime as Runtime
    from whet.torch_compile import compile as compile

__version__ = "0.1.0"

_HOME = {
    "BuildConfig": "whet.builder",
    "Runtime": "whet.runtime",
    "WhetError": "whet.errors",
    "build": "whet.builder",
    "check_onnx": "whet.frontends",
    "compile": "whet.torch_compile",
    "from_torch": "whet.frontends.torch",
    "network_from_caffe": "whet.frontends",
    "network_from_onnx": "whet.frontends",
    "read_engine": "whet.engine",
    "save_onnx": "whet.frontends",
    "write_engine": "whet.engine",
    "zoo": "whet.zoo",
}

__all__ = [*_HOME]

if not TYPE_CHECKING:  # type checkers would give every name the type Any

    def __getattr__(name: str) -> Any:
        return on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
