"""Network -> engine: candidates, timing and its cache, choice of formats and tactics, memory plan, verification, lock."""

from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.lock.lock import plan_digest, save_lock
from whet.builder.precision.calibration import Calibration
from whet.builder.precision.float8 import build_float8
from whet.builder.precision.int8 import build_int8
from whet.builder.progress import Progress, Silent
from whet.builder.retune import retune

__all__ = [
    "BuildConfig", "Calibration", "Progress", "Silent", "build", "build_float8", "build_int8", "plan_digest", "retune", "save_lock",
]  # fmt: skip
