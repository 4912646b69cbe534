"""The engine file: a plan as data on disk and back. No code, no pickle; all data is checked when it is read.

Sections (docs/design/engine_file.md): header, network, choices, arenas and index are JSON or text; weights are raw; packed weights
are optional; info (times, measured rates, candidates, dates) is the only section outside the engine's digest.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import mmap
import os
import re
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from whet.engine import codec, host_tail, packed, profile_plans
from whet.engine.check import check_plan
from whet.engine.json_data import Reader, from_json, to_json
from whet.engine.layout import Section, read_sections, read_table_digests, require_whole, write_sections
from whet.engine.plan import EnginePlan
from whet.engine.report import defer_report, report_from_data, report_to_data
from whet.engine.text import read_text
from whet.engine.weights import collect, iterate_constants, join_sources, list_expressions, read_weights
from whet.errors import EngineError, NetworkError, WhetError
from whet.files import cut_name, resolve_path
from whet.network import format_network
from whet.network.text import VERSION as TEXT_VERSION
from whet.plugin_packages import require

Source = str | os.PathLike | bytes | bytearray | memoryview

#: sections and the maximum bytes of each
SECTIONS = {
    "header": 1 << 22, "network": 1 << 26, "choices": 1 << 24, "arenas": 1 << 24, "further": 1 << 26, "tail": 1 << 26, "index": 1 << 26,
    "weights": 1 << 46, "packed_index": 1 << 24, "packed": 1 << 46, "info": 1 << 26,
}  # fmt: skip
REQUIRED = ("header", "network", "choices", "arenas", "index", "weights", "info")
OUTSIDE = frozenset({"info"})  # not part of the engine's digest
_DEEP = frozenset({"weights", "packed"})  # their readers verify digests array by array
_PATHS = frozenset({"timing_cache", "lock", "error_on_cache_miss"})  # options that are paths and do not affect the result


def write_engine(plan: EnginePlan, path: str | os.PathLike, *, packed_weights: Mapping[str, np.ndarray] | None = None) -> None:
    """Writes a plan to `path`: into a temporary file in the same folder, which is read back, then renamed, so that a failure loses no data.

    `packed_weights` (see `Engine.packed_weights`; default: those of the plan, which a file has given it) make the file larger and its loading
    on the same machine faster. They are used only with a probe, which runs when the file is loaded.
    Raises EngineError: the plan is inconsistent, no space, no permission.
    """
    import tempfile  # 5 ms of an import that a process without it saves

    check_plan(plan)
    sections = _list_sections(plan, packed_weights)
    target = resolve_path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{cut_name(target.name)}.", suffix=".part", dir=target.parent or Path())
    except OSError as e:
        raise EngineError(f"cannot write {target}: {e.strerror}; choose another path") from e
    try:
        with os.fdopen(handle, "wb") as out:
            write_sections(sections, out)
            out.flush()
            os.fsync(out.fileno())
        _read_back(name, plan)
        os.chmod(name, 0o666 & ~_get_umask())
        os.replace(name, target)
    except OSError as e:
        advice = "It is a folder: add a file name" if target.is_dir() else "Free some space or choose another path"
        raise EngineError(f"cannot write {target}: {e.strerror}; the target is unchanged. {advice}.") from e
    finally:
        Path(name).unlink(missing_ok=True)


def engine_bytes(plan: EnginePlan, *, packed_weights: Mapping[str, np.ndarray] | None = None) -> bytes:
    """The bytes that `write_engine` writes."""
    check_plan(plan)
    out = io.BytesIO()
    write_sections(_list_sections(plan, packed_weights), out)
    return out.getvalue()


def engine_digest(plan: EnginePlan, *, packed_weights: Mapping[str, np.ndarray] | None = None) -> str:
    """SHA-256 of the plan and its packed weights (as for `write_engine`), equal for equal plans; times and dates are not included."""
    return _digest({s.name: (s.size, s.content_digest()) for s in _list_sections(plan, packed_weights, info=False)})


def engine_versions(source: Source) -> dict[str, Any]:
    """Versions of the format, the network text and the whet that wrote it, without the weights. Raises EngineError."""
    from whet.engine.layout import VERSION

    with _open(source) as data:
        parts = read_sections(data, SECTIONS, _DEEP)
        require_sections(parts)
        info = _read_info(parts).free()
        header = Reader(from_json(parts["header"], "header"), "header").free()
        digest = _digest(read_table_digests(data))
        return {"format": VERSION, "text": header.get("text_version"), "whet": info.get("whet"), "digest": digest}


def read_engine(source: Source, *, defer: bool = False) -> EnginePlan:
    """The plan in a file (memory-mapped) or in bytes.

    Raises EngineError, and nothing else, for a file that is truncated, damaged, hostile or of another version. With `defer` each weight, and the
    build's report, is read and checked by its first access, which raises the EngineError: those that nothing reads take no time.
    """
    return _read_source(source, defer)


# reading


def _read_source(source: Source, defer: bool, evaluated: Collection[tuple[str, str]] | None = None) -> EnginePlan:
    opened = _Opened(source)
    try:
        return _read(opened.data, defer, evaluated)
    except EngineError as e:
        raise EngineError(f"{opened.name}: {e}") from e
    except (WhetError, ValueError, TypeError, KeyError, IndexError, OverflowError, SyntaxError, MemoryError, RecursionError) as e:
        raise EngineError(f"{opened.name}: it cannot be read: {type(e).__name__}: {str(e)[:300]}") from e


def release_pages(plan: EnginePlan) -> None:
    """Returns the memory of a mapped engine file and freed memory of the heap to the system, once its weights are computed and again once they are
    packed; weights that are needed again are read from the file. Otherwise the peak is larger by both: 200 MB for ResNet-50."""
    release_mapping(plan)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(ctypes.c_size_t(0))


def release_mapping(plan: EnginePlan) -> None:
    """The same, only for the mapped file: pages that are read again come from the page cache."""
    if plan.data is not None and isinstance(plan.data.obj, mmap.mmap):
        plan.data.obj.madvise(mmap.MADV_DONTNEED)


class _Opened:
    """A memory-mapped file, or bytes. The mapping lives as long as an array in it."""

    def __init__(self, source: Source):
        if isinstance(source, bytes | bytearray | memoryview):
            raw = bytes(source) if isinstance(source, bytearray) else source
            self.name, self.data = "these bytes", memoryview(raw).cast("B").toreadonly()
            return
        self.name = str(source)
        try:
            if not stat.S_ISREG(os.stat(source).st_mode):
                raise EngineError(f"cannot open {source}: it is not a file; engines are files saved by `whet`")
            with open(source, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                self.data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
        except (OSError, ValueError) as e:
            raise EngineError(f"cannot open {source}: {getattr(e, 'strerror', None) or e}; is it an engine saved by `whet`?") from e

    def __enter__(self) -> memoryview:
        return self.data

    def __exit__(self, *_: object) -> None:
        self.data.release()


def _open(source: Source) -> _Opened:
    return _Opened(source)


def require_sections(parts: Mapping[str, memoryview]) -> None:
    """Raises EngineError for a missing section."""
    missing = [n for n in REQUIRED if n not in parts]
    if missing or ("packed" in parts) != ("packed_index" in parts):
        raise EngineError(f"the engine has no section '{missing[0] if missing else 'packed'}': it is incomplete")


def _read(data: memoryview, defer: bool, evaluated: Collection[tuple[str, str]] | None) -> EnginePlan:
    parts = read_sections(data, SECTIONS, _DEEP)
    require_sections(parts)
    digests = read_table_digests(data)
    if digests["weights"][1] != hashlib.sha256(parts["index"]).digest():
        raise EngineError("section 'weights' is damaged: its digest does not match")
    header = Reader(from_json(parts["header"], "header"), "header")
    has_plugins = "plugins" in header.object().value
    header.object(*_HEADER, *(["plugins"] if has_plugins else []))
    plugins = {k: v.text(200) for k, v in header["plugins"].items()} if has_plugins else {}
    if header["text_version"].integer() != TEXT_VERSION:
        raise EngineError(f"its network text has version {header['text_version'].value}, this whet reads {TEXT_VERSION}: build it again")
    require(plugins)
    index = Reader(from_json(parts["index"], "index"), "index")
    weights, sources, quantized = read_weights(index, parts["weights"], defer=defer, evaluated=evaluated)

    def read_info() -> Reader:
        return _read_info(parts).object("report", "whet", *(["further"] if "further" in parts else []))

    others = Reader(from_json(parts["further"], "further"), "further") if "further" in parts else None
    tail = Reader(from_json(parts["tail"], "tail"), "tail").object("network", "constants", "outputs") if "tail" in parts else None
    of_tail = len(weights) - (tail["constants"].integer(0, len(weights)) if tail else 0)
    own = of_tail - (sum(row["constants"].integer() for row in others.rows()) if others else 0)
    if own < 0:
        raise EngineError(f"the networks of all profiles have more constants than the {len(weights)} of the index")
    net = read_text(parts["network"], weights[:own], header["name"].text(), {k: v.text() for k, v in header["metadata"].items()})
    plan = EnginePlan(
        network=net,
        choices=codec.decode_choices(Reader(from_json(parts["choices"], "choices"), "choices")),
        profiles=codec.decode_profiles(header["profiles"]),
        arenas=codec.decode_arenas(Reader(from_json(parts["arenas"], "arenas"), "arenas")),
        backend=header["backend"].text(60),
        machine=codec.decode_machine(header["machine"]),
        machine_key=header["machine_key"].text(),
        threads=header["threads"].integer(0, 1 << 16),
        model_digest=header["model_digest"].text(200),
        source_weights=join_sources(net, sources),
        quantized_weights=quantized,
        options=header["options"].free(),
        probe=codec.decode_probe(header["probe"]),
        report=defer_report(lambda: report_from_data(read_info()["report"])) if defer else report_from_data(read_info()["report"]),
        plugins=plugins,
        data=data,
    )
    if others is not None:
        plan.others = profile_plans.from_data(others, plan, weights[own:of_tail], read_info()["further"].rows())
    if tail is not None:
        plan.tail = host_tail.from_data(tail, weights[of_tail:])
    check_plan(plan)
    for part in plan.by_profile():
        check_probe(part)
    if "packed" in parts:
        plan.packed = packed.read(
            Reader(from_json(parts["packed_index"], "packed_index"), "packed_index"), parts["packed"], digests["packed"][1], defer=defer
        )
    return plan


def _read_info(parts: Mapping[str, memoryview]) -> Reader:
    return Reader(from_json(memoryview(decompress_info(parts["info"])), "info"), "info")


def compress_info(data: bytes) -> bytes:
    """The section `info`: in small engines its list of timed candidates would be larger than the weights."""
    return zlib.compress(data)


def decompress_info(data: bytes | memoryview) -> bytes:
    """The JSON of the section `info`. Raises EngineError, also if it would be larger than a section may be."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, SECTIONS["info"])
    except zlib.error as e:
        raise EngineError(f"section 'info' is damaged: {e}") from e
    if not stream.eof or stream.unused_data:
        raise EngineError("section 'info' is damaged or too large")
    return found


def check_probe(plan: EnginePlan) -> None:
    """Raises EngineError if the probe does not fit the network and its profile."""
    if not plan.probe:
        return
    inputs = {t.name: t for t in plan.network.inputs}
    given = plan.profiles[0].shapes if plan.profiles else {}
    for name, t in inputs.items():
        want = list(given[name][1]) if name in given else [d for d in t.shape if isinstance(d, int)]
        if plan.probe["shapes"].get(name) != want:
            raise EngineError(f"the probe's shape of '{name}' is not the opt shape of its profile")
    if set(plan.probe["shapes"]) != set(inputs) or set(plan.probe["outputs"]) != {t.name for t in plan.network.outputs}:
        raise EngineError("the probe has other inputs or outputs than the network")


# writing

_HEADER = (
    "text_version", "name", "metadata", "backend", "machine", "machine_key", "threads", "model_digest", "options", "probe", "profiles",
)  # fmt: skip


def _list_sections(plan: EnginePlan, packed_weights: Mapping[str, np.ndarray] | None, *, info: bool = True) -> list[Section]:
    if plan.data is not None:
        require_whole(plan.data)
    try:
        return list(_make_sections(plan, plan.packed if packed_weights is None else packed_weights, info))
    except (NetworkError, TypeError, ValueError) as e:
        raise EngineError(f"the plan cannot be written: {e}") from e


def _make_sections(plan: EnginePlan, packed_weights: Mapping[str, np.ndarray], info: bool) -> Iterator[Section]:
    header = {
        "text_version": TEXT_VERSION,
        "name": plan.network.name,
        "metadata": plan.network.metadata,
        "backend": plan.backend,
        "machine": plan.machine,
        "machine_key": plan.machine_key,
        "threads": plan.threads,
        "model_digest": plan.model_digest,
        "options": {k: v for k, v in plan.options.items() if k not in _PATHS},
        "probe": plan.probe,
        "profiles": codec.encode_profiles(plan.profiles),
        **({"plugins": plan.plugins} if plan.plugins else {}),
    }
    tail = [plan.tail.network] if plan.tail is not None else []
    smallest = plan.options.get("objective") == "size"
    pool = collect([plan.network, *(p.network for p in plan.others), *tail], plan.source_weights, plan.quantized_weights, smallest=smallest)
    index = to_json(pool.index())
    yield Section("header", [to_json(header)])
    yield Section("network", [format_network(plan.network).encode()])
    yield Section("choices", [to_json(codec.encode_choices(plan.choices))])
    yield Section("arenas", [to_json(codec.encode_arenas(plan.arenas))])
    if plan.others:
        yield Section("further", [to_json(profile_plans.to_data(plan))])
    if plan.tail is not None:
        yield Section("tail", [to_json(host_tail.to_data(plan.tail))])
    yield Section("index", [index])
    yield Section("weights", [packed.get_raw_bytes(a) for _, a in pool.arrays.values()], hashlib.sha256(index).digest())
    if packed_weights:
        yield from packed.make_packed_sections(packed_weights)
    if info:
        more = {"further": [report_to_data(p.report) for p in plan.others]} if plan.others else {}
        yield Section("info", [compress_info(to_json({"report": report_to_data(plan.report), "whet": _get_version(), **more}))])


def _get_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes 10 ms, which opening an engine does not need

    try:
        return version("whet")
    except PackageNotFoundError:  # run from a checkout without installation
        return "unknown"


def _digest(sections: Mapping[str, tuple[int, bytes]]) -> str:
    h = hashlib.sha256()
    for name, (size, digest) in sorted(sections.items()):
        if name not in OUTSIDE:
            h.update(f"{name} {size} {digest.hex()}\n".encode())
    return h.hexdigest()


def _read_back(name: str, plan: EnginePlan) -> None:
    """Checks that the written file opens as the same engine, so that a plan that cannot be read back is refused now. All sections are read, and the
    digests of all arrays are compared. Expressions were evaluated when they were written: one that is read with the same text has the same value.
    """
    nets = [*(p.network for p in plan.by_profile()), *([plan.tail.network] if plan.tail is not None else [])]
    try:
        again = _read_source(name, defer=False, evaluated=list_expressions(nets))
    except EngineError as e:
        raise EngineError(f"the engine cannot be read back: {re.sub(re.escape(name) + ': ', '', str(e))}") from e
    was, now = ([t.constant().digest for part in p.by_profile() for t in iterate_constants(part.network)] for p in (plan, again))
    if was != now:
        raise EngineError("the engine's weights changed while they were written. This is a mistake in whet: please report it.")


def _get_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
