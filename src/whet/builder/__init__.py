"""Network -> engine: candidates, timing and its cache, choice of formats and tactics, memory plan, verification, lock."""

from whet.builder.building import build
from whet.builder.config import BuildConfig
from whet.builder.lock import plan_digest, save_lock
from whet.builder.progress import Progress, Silent

__all__ = ["BuildConfig", "Progress", "Silent", "build", "plan_digest", "save_lock"]
