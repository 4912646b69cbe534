"""What a command says when it cannot go on, and its exit code."""

from __future__ import annotations

from whet.errors import UsageError, WhetError

Failure = WhetError | OSError | MemoryError


def said_of(e: Failure) -> tuple[str, int]:
    """(one text, exit code) of an error that is the user's, the disk's or the memory's; any other is a defect, and raised again."""
    if isinstance(e, WhetError):
        return f"{type(e).__name__}: {e}", 2 if isinstance(e, UsageError) else 1
    if isinstance(e, MemoryError):
        why = str(e) or "no memory is left"
        return f"MemoryError: {why}. Lower the shapes or the batch, or end other processes.", 1
    if e.errno is None:  # not from a file
        raise e
    where = f"{e.filename}: " if e.filename else ""
    return f"{type(e).__name__}: {where}{e.strerror or e}. Make room, or look at the path and its permissions.", 1
