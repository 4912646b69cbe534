"""whet: builds the fastest correct inference engine from a trained network on the machine it will run on, and explains every decision.

    import numpy as np, whet

    engine = whet.build("model.onnx", shapes={"input": (1, 3, 224, 224)}, bf16=True)     # a file, a torch module or a whet network
    y = engine(np.zeros((1, 3, 224, 224), np.float32))                                    # NumPy, torch or CuPy; from any thread
    engine.save("model.engine")
    engine = whet.load("model.engine")
    print(engine.benchmark())                                                             # latency and throughput
    print(engine.explain())                                                               # times, kernels and types by layer

`help(whet.build)` has all parameters: ranges of shapes, FP16, INT8 with calibration data, accuracy budgets, backend="cuda".
`whet.ort.InferenceSession` takes the place of ONNX Runtime's. `whet.WhetError` is the base of all errors.

The lower level: `network_from_onnx` and `from_torch` read networks, `whet.builder.build` makes a plan of one, `Runtime().load(plan)` an engine,
`Engine.create_context` a context with bound buffers. Names and sub-packages (`whet.pruning.prune`) are imported on first use, so that
`import whet` is light and the runtime can ship alone. Type checkers and editors read the imports under TYPE_CHECKING.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.registry import import_on_demand

if TYPE_CHECKING:
    from whet import api as api
    from whet import array_files as array_files
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
    from whet import ort as ort
    from whet import passes as passes
    from whet import plugin_packages as plugin_packages
    from whet import plugins as plugins
    from whet import precision as precision
    from whet import progress_lines as progress_lines
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
    from whet.api import Profile as Profile
    from whet.api import build as build
    from whet.api import load as load
    from whet.builder import BuildConfig as BuildConfig
    from whet.engine import read_engine as read_engine
    from whet.engine import write_engine as write_engine
    from whet.errors import WhetError as WhetError
    from whet.frontends import check_onnx as check_onnx
    from whet.frontends import network_from_caffe as network_from_caffe
    from whet.frontends import network_from_file as network_from_file
    from whet.frontends import network_from_onnx as network_from_onnx
    from whet.frontends import network_from_tensorflow as network_from_tensorflow
    from whet.frontends import save_onnx as save_onnx
    from whet.frontends.torch import from_torch as from_torch
    from whet.plugins.registration import register as register
    from whet.runtime import Engine as Engine
    from whet.runtime import Runtime as Runtime
    from whet.torch_compile import compile as compile

__version__ = "0.1.0"

_HOME = {
    "BuildConfig": "whet.builder",
    "Engine": "whet.runtime",
    "Profile": "whet.api",
    "Runtime": "whet.runtime",
    "WhetError": "whet.errors",
    "build": "whet.api",
    "check_onnx": "whet.frontends",
    "compile": "whet.torch_compile",
    "from_torch": "whet.frontends.torch",
    "load": "whet.api",
    "network_from_caffe": "whet.frontends",
    "network_from_file": "whet.frontends",
    "network_from_onnx": "whet.frontends",
    "network_from_tensorflow": "whet.frontends",
    "read_engine": "whet.engine",
    "register": "whet.plugins.registration",
    "save_onnx": "whet.frontends",
    "write_engine": "whet.engine",
    "zoo": "whet.zoo",
}

__all__ = [*_HOME]

if not TYPE_CHECKING:  # type checkers would give every name the type Any

    def __getattr__(name: str) -> Any:
        return import_on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
