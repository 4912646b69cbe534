"""Dumps of `whet passes --dump`: the network after each pass that fired, or an engine's lowered network, as text and ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def dump_passes(path: str, folder: str, config: Any) -> list[Path]:
    """Writes the source network, the network after each pass that fired, and the lowered network; returns the ONNX files in order.

    An engine has its lowered network alone, with the reformats between its layers.
    """
    from whet.cli._model import read_network
    from whet.cli._runners import is_engine
    from whet.frontends.onnx_diagram import DiagramFolder

    target = DiagramFolder(folder)
    if is_engine(path):
        from whet.engine import read_engine

        return [target.save(part.network, f"engine{k or ''}") for k, part in enumerate(read_engine(path).by_profile())]
    from whet.builder.lowering import lower_network

    net, _ = read_network(path, None)
    files = [target.save(net, "000_source")]
    lowered, _ = lower_network(net, config, lambda name, changed: files.append(target.save(changed, f"{len(files):03d}_{name}")))
    return [*files, target.save(lowered, f"{len(files):03d}_lowered")]
