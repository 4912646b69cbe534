"""Verification that is not repeated: a record says that this very engine passed on this machine, and holds its report and its probe.

The name of a record is a digest of everything on which verification depends: the engine (its network with the digests of all weights, kernels,
arenas and shapes), the source network, the verified inputs, the options of the build, the device, its threads and libraries, the versions of Python
and NumPy, environment variables of whet and of the libraries, and the names, sizes and times of whet's source files, those of its kernels among
them. Any difference is another name, so that the engine is verified. `BuildConfig.verify_again` verifies in any case. The folder of the records is
that of whet.runtime.verified; WHET_VERIFIED=0 turns them off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.builder.assemble import compute_model_digest
from whet.builder.config import BuildConfig
from whet.builder.progress import ProgressLog
from whet.builder.verify.error_bounds import Checked
from whet.builder.verify.verification import verify_engine
from whet.engine import codec
from whet.engine.json_data import Reader, from_json, to_json
from whet.engine.plan import EnginePlan
from whet.engine.probe import make_probe
from whet.engine.report import VerificationRecord
from whet.engine.schema import decode, encode
from whet.errors import EngineError
from whet.files import read_bounded
from whet.network import Network, format_network
from whet.runtime.kernels import list_library_versions
from whet.runtime.verified import find_record, is_recorded, write_record
from whet.tactics import TACTICS

_LONGEST = 1 << 24  # bytes of a record: 256 values for each output
#: options that change neither an engine nor its verification
_WITHOUT_EFFECT = frozenset({"timing_cache", "error_on_cache_miss", "retime", "verify_again"})
_LIBRARIES = ("WHET_", "ONEDNN_", "DNNL_", "OMP_", "GOMP_", "KMP_", "CUDA_", "NVIDIA_", "CUDNN_", "CUBLAS", "OPENBLAS_", "NPY_")
REPEATED = "this very engine passed verification on this machine before, so it was not verified again; --verifyAgain verifies it in any case"


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of verification. `checked` is None if the engine passed earlier; `probe` is None if it failed."""

    report: VerificationRecord
    probe: dict[str, Any] | None
    checked: Checked | None = None

    def complete(self, plan: EnginePlan) -> None:
        """Puts the report and the probe into a plan."""
        plan.report.verification = self.report
        if self.probe is not None:
            plan.probe = self.probe
        if self.checked is None:
            plan.report.info = [*plan.report.info, REPEATED]


def verify_once(
    plan: EnginePlan, source: Network, backend: Backend, inputs: Mapping[str, np.ndarray] | None, config: BuildConfig, log: ProgressLog
) -> Verified:
    """Verifies an engine against its source network, or reads the result from the record of an earlier build on this machine."""
    record = find_verification_record(plan, source, backend, inputs, config)
    known = None if config.verify_again else _read_record(record)
    if known is not None:
        return known
    checked = verify_engine(plan, source, backend, inputs, config, log)
    if checked.failures:
        return Verified(checked.report(), None, checked)
    verified = Verified(checked.report(), make_probe(plan, checked.probe_outputs, seed=config.seed, rtol=checked.probe_rtol), checked)
    if record is not None:
        write_record(record, to_json({"report": encode(verified.report), "probe": verified.probe}))
    return verified


def find_verification_record(
    plan: EnginePlan, source: Network, backend: Backend, inputs: Mapping[str, np.ndarray] | None, config: BuildConfig
) -> Path | None:
    """The file of the record; None if there can be none: see whet.runtime.verified.find_record, and kernels from outside whet."""
    if any(c.tactic not in TACTICS or not type(TACTICS[c.tactic]).__module__.startswith("whet.") for c in plan.choices.values()):
        return None
    h = hashlib.sha256()
    for part in _list_parts(plan, source, inputs, config):
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return find_record(plan, f"verification {h.hexdigest()}", backend, list_library_versions(plan.choices, backend))


def _list_parts(plan: EnginePlan, source: Network, inputs: Mapping[str, np.ndarray] | None, config: BuildConfig) -> Iterator[bytes | memoryview]:
    yield format_network(plan.network).encode()  # it has the digests of all weights, as that of the source has
    yield compute_model_digest(source).encode()
    yield to_json(codec.encode_choices(plan.choices))
    yield to_json([codec.encode_profiles(plan.profiles), codec.encode_arenas(plan.arenas), plan.threads, plan.machine_key])
    yield to_json(encode({k: v for k, v in vars(config).items() if k not in _WITHOUT_EFFECT}))
    yield repr(sorted((k, v) for k, v in os.environ.items() if k.startswith(_LIBRARIES))).encode()
    for name, a in sorted((inputs or {}).items()):
        yield f"{name} {np.asarray(a).dtype} {np.shape(a)}".encode()
        yield np.asarray(a).tobytes()


def _read_record(record: Path | None) -> Verified | None:
    """The result in a record; None if there is none, or if it cannot be read."""
    if record is None or not is_recorded(record):
        return None
    try:
        data = Reader(from_json(memoryview(read_bounded(record, _LONGEST)), "record"), "record").object("report", "probe")
        report, probe = decode(VerificationRecord, data["report"]), codec.decode_probe(data["probe"])
    except (OSError, EngineError):
        return None
    return Verified(report, probe) if probe and not report.failures else None
