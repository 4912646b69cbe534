"""The message and exit code of a failed command."""

from __future__ import annotations

from whet.errors import UsageError, WhetError

Failure = WhetError | OSError | MemoryError


def describe_failure(e: Failure) -> tuple[str, int]:
    """The message and exit code of a whet error, a file error or exhausted memory. Any other OSError is a defect and raised again."""
    if isinstance(e, WhetError):
        return f"{type(e).__name__}: {e}", 2 if isinstance(e, UsageError) else 1
    if isinstance(e, MemoryError):
        why = str(e) or "no memory is left"
        return f"MemoryError: {why}. Lower the shapes or the batch, or end other processes.", 1
    if e.errno is None:  # not from a file
        raise e
    file = f"{e.filename}: " if e.filename else ""
    return f"{type(e).__name__}: {file}{e.strerror or e}. Free disk space, or check the path and its permissions.", 1
