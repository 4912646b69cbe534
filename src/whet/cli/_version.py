"""`whet --version`: the release, and the facts about the installation that a bug report needs."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import click

import whet

_LIBRARIES = ("numpy", "onnx", "ml_dtypes", "onednn-cpu-gomp", "llvmlite", "onnxruntime", "torch", "cuda-bindings", "nvidia-cuda-nvrtc")


def print_version(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Prints the release first, then Python, the machine and the libraries, and ends the command."""
    if not asked or context.resilient_parsing:
        return
    click.echo(f"whet, version {whet.__version__}")
    click.echo(f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs ({_cpu_name()})")
    for name in _LIBRARIES:
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} is not installed")
    context.exit()


def _cpu_name() -> str:
    """The CPU's model name from /proc/cpuinfo, or the architecture elsewhere."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
