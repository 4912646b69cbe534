"""python -m whet.trt SCRIPT.py|MODULE ARGUMENTS: runs a script or module with whet.trt as `tensorrt`.

On the CPU backend, memory of Polygraphy and of cuda-python is host memory. `polygraphy` is Polygraphy's command.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from whet.backends import get_backend
from whet.trt import connect_cuda_python, connect_polygraphy, install
from whet.trt.device import get_backend_name


def main() -> None:
    """Runs the script or module that the command line names."""
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python -m whet.trt SCRIPT.py|MODULE [ARGUMENTS], for example python -m whet.trt polygraphy run model.onnx --trt --onnxrt"
        )
    install()
    if get_backend(get_backend_name()).capabilities.host_memory:
        for connect in (connect_polygraphy, connect_cuda_python):
            with suppress(ImportError):  # not installed
                connect()
    del sys.argv[0]
    if sys.argv[0] == "polygraphy":
        sys.exit(import_module("polygraphy.tools").main())
    if sys.argv[0].endswith(".py"):
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
