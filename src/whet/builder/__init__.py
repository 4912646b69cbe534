"""Network -> engine: candidates, timing and its cache, choice of formats and tactics, memory plan, verification, lock."""

from whet.builder.building import build
from whet.builder.calibrating import Calibration
from whet.builder.config import BuildConfig
from whet.builder.float8 import build_float8
from whet.builder.lock import plan_digest, save_lock
from whet.builder.progress import Progress, Silent
from whet.builder.quantized import build_int8
from whet.builder.retune import retune

__all__ = [
    "BuildConfig", "Calibration", "Progress", "Silent", "build", "build_float8", "build_int8", "plan_digest", "retune", "save_lock",
]  # fmt: skip
