"""python -m whet.trt MODULE ARGUMENTS: runs a module (polygraphy.tools, for example) with whet.trt as `tensorrt`, on host memory."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module

from whet.trt import connect_polygraphy, install


def main() -> None:
    """Runs the module that the command line names; `polygraphy` is Polygraphy's command."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m whet.trt MODULE [ARGUMENTS], for example python -m whet.trt polygraphy run model.onnx --trt --onnxrt")
    install()
    del sys.argv[0]
    if sys.argv[0] == "polygraphy":
        connect_polygraphy()
        sys.exit(import_module("polygraphy.tools").main())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
