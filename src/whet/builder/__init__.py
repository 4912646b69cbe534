"""Network -> engine: candidates, timing and its cache, choice of formats and tactics, memory plan, verification, lock."""

from whet.builder.api import build, build_float8, build_int8, retune
from whet.builder.config import BuildConfig
from whet.builder.lock.lock import plan_digest, save_lock
from whet.builder.precision.calibration import Calibration
from whet.builder.progress import Progress, Silent

__all__ = [
    "BuildConfig", "Calibration", "Progress", "Silent", "build", "build_float8", "build_int8", "plan_digest", "retune", "save_lock",
]  # fmt: skip
