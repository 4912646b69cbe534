"""`whet --version`: the release, and the facts about the installation that a bug report needs."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import click

import whet
from whet.backends.cpu import info

_LIBRARIES = ("numpy", "onnx", "ml_dtypes", "onednn-cpu-gomp", "llvmlite", "onnxruntime", "torch", "cuda-bindings", "nvidia-cuda-nvrtc")


def print_version(context: click.Context, _option: click.Parameter, is_requested: bool) -> None:
    """Prints the release first, then Python, the machine and the libraries, and ends the command."""
    if not is_requested or context.resilient_parsing:
        return
    click.echo(f"whet, version {whet.__version__}")
    click.echo(f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs ({info.get_cpu_model()})")
    for name in _LIBRARIES:
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} is not installed")
    context.exit()
