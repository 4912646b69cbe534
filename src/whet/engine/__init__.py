"""The engine as data, and its file format: writing, reading and validation."""

from whet.engine.file import engine_bytes, engine_digest, engine_versions, read_engine, write_engine
from whet.engine.names import display_names, profile_suffix
from whet.engine.plan import ArenaPlan, Choice, EnginePlan, Profile
from whet.engine.probe import make_probe, probe_differs, probe_inputs, probe_shapes
from whet.engine.report import BuildReport, Candidate
from whet.engine.times import LayerTimes

__all__ = [
    "ArenaPlan",
    "BuildReport",
    "Candidate",
    "Choice",
    "EnginePlan",
    "LayerTimes",
    "Profile",
    "display_names",
    "engine_bytes",
    "engine_digest",
    "engine_versions",
    "make_probe",
    "probe_differs",
    "probe_inputs",
    "probe_shapes",
    "profile_suffix",
    "read_engine",
    "write_engine",
]  # fmt: skip
