"""A path, bytes or a ModelProto -> a ModelProto with validated header: versions, opsets, training parts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from whet.errors import FrontendError
from whet.file_kinds import describe_kind
from whet.files import read_bounded
from whet.frontends import _onnx_convert
from whet.frontends._onnx_text import check_texts

OLDEST_OPSET = 7  # of the readers; older models, and those with an Upsample before opset 9, are converted to opset 9 by the onnx package
_CONVERSION_TIMEOUT = 300  # seconds
DEFAULT_DOMAINS = ("", "ai.onnx")
_MOST = 2**31 - 1  # protobuf's own limit of one message


def load_model(source: str | os.PathLike | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """Returns the model and the folder of its external data (None when loaded from memory). Raises FrontendError."""
    if isinstance(source, onnx.ModelProto):
        return _check(source, "the model"), None
    if isinstance(source, bytes | bytearray | memoryview):
        return _check(_parse(bytes(source), "the bytes given"), "the model"), None
    path = Path(source)
    try:
        if path.is_dir():
            kind = describe_kind(path)
            raise FrontendError(f"{path} is {kind}" if kind else f"{path} is a folder; give the .onnx file in it.")
        size = path.stat().st_size
        if size > _MOST:
            raise FrontendError(f"{path} has {size} bytes; a protobuf message has at most {_MOST}. Save it again with external data.")
        data = read_bounded(path, _MOST)
    except (OSError, ValueError) as e:
        raise FrontendError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}. Check the path and its permissions.") from e
    except MemoryError as e:
        raise FrontendError(f"cannot read {path}: its {size:,} bytes need more memory than this process may use.") from e
    return _check(_parse(data, str(path), path), str(path), path), path.resolve().parent


def _parse(data: bytes, subject: str, path: Path | None = None) -> onnx.ModelProto:
    if not data:
        raise FrontendError(f"{subject} is empty. Export or copy the model again.")
    if data.startswith(b"version https://git-lfs"):
        raise FrontendError(f"{subject} is a Git LFS pointer, not the model. Fetch it with `git lfs pull`.")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as e:
        if kind := describe_kind(data if path is None else path):
            raise FrontendError(f"{subject} is not an ONNX model, but {kind}") from e
        raise FrontendError(f"{subject} is not an ONNX model, or it is truncated ({len(data)} bytes): {e}. Copy or export it again.") from e
    return model


def _check(model: onnx.ModelProto, subject: str, path: Path | None = None) -> onnx.ModelProto:
    if not model.HasField("graph"):
        if path is not None and (kind := describe_kind(path)):
            raise FrontendError(f"{subject} is not an ONNX model, but {kind}")
        raise FrontendError(f"{subject} holds no graph: it is not an ONNX model, or it is truncated. Copy or export it again.")
    check_texts(model, subject)
    versions = read_opsets(model.opset_import, subject)
    if "" not in versions and any(n.domain in DEFAULT_DOMAINS for n in model.graph.node):
        raise FrontendError(f"{subject} names no opset for its ONNX ops. Export it again.")
    opset, newest = versions.get("", OLDEST_OPSET), onnx.defs.onnx_opset_version()
    if opset < OLDEST_OPSET or (opset < _onnx_convert.OPSET and any(n.op_type == "Upsample" for n in model.graph.node)):
        return _convert(model, subject, opset)
    if opset > newest:
        raise FrontendError(
            f"{subject} has opset {opset}; onnx {onnx.__version__} reads up to {newest}. Upgrade it, or export with an older one."
        )
    return model


def _convert(model: onnx.ModelProto, subject: str, opset: int) -> onnx.ModelProto:
    """The model at opset 9 by the onnx package, in a subprocess, since the converter may abort on damaged models. Raises FrontendError."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", Path(_onnx_convert.__file__).read_text(encoding="utf-8")],
            input=model.SerializeToString(),
            capture_output=True,
            timeout=_CONVERSION_TIMEOUT,
            check=True,
        )
        return onnx.ModelProto.FromString(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError, DecodeError) as e:
        said = getattr(e, "stderr", None) or b""
        last = said.decode(errors="replace").strip().rpartition("\n")[2] or type(e).__name__
        raise FrontendError(
            f"{subject} has opset {opset}, and onnx's version converter cannot convert it to opset {_onnx_convert.OPSET} ({last[:200]}). "
            "Export it with opset 13 or newer."
        ) from e


def read_opsets(imports, subject: str) -> dict[str, int]:
    """Domain -> version of an opset_import list, the default domain under ""."""
    versions: dict[str, int] = {}
    for entry in imports:
        domain = "" if entry.domain in DEFAULT_DOMAINS else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            raise FrontendError(
                f"{subject} imports two opsets of the domain {domain or 'ai.onnx'!r}: {versions[domain]} and {entry.version}. Export it again."
            )
    return versions


def external_files(path: str | os.PathLike) -> list[Path]:
    """The existing external-data files in a model's folder. Raises FrontendError for a file that is not a model."""
    model, folder = load_model(path)
    assert folder is not None
    named = {e.value for t in _iterate_tensors(model.graph) for e in t.external_data if e.key == "location"}
    files = []
    for name in sorted(named):
        try:
            file = find_data_file(folder, name)
            if file is not None and file.is_file():
                files.append(folder / name)
        except (OSError, ValueError, RuntimeError):  # no path; reading the weight names it
            continue
    return files


def find_data_file(folder: Path, location: str) -> Path | None:
    """The path of an external-data file without symbolic links, or None if it is outside the folder. Raises OSError, ValueError or RuntimeError
    for a location that is no path."""
    path = (folder / location).resolve()
    return path if location and path.is_relative_to(folder.resolve()) else None


def list_initializers(graph: onnx.GraphProto) -> list[tuple[str, onnx.TensorProto | onnx.SparseTensorProto]]:
    """A graph's weights with their names, those that are stored sparse at the end."""
    return [*((t.name, t) for t in graph.initializer), *((s.values.name, s) for s in graph.sparse_initializer)]


def _iterate_tensors(g: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers of a graph and of its subgraphs."""
    yield from g.initializer
    for s in g.sparse_initializer:
        yield from (s.values, s.indices)
    for a in (a for n in g.node for a in n.attribute):
        if a.HasField("t"):
            yield a.t
        if a.HasField("sparse_tensor"):
            yield from (a.sparse_tensor.values, a.sparse_tensor.indices)
        yield from a.tensors
        for inner in [*([a.g] if a.HasField("g") else []), *a.graphs]:
            yield from _iterate_tensors(inner)
