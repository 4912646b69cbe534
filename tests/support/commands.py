"""Runs a `whet` command inside the test's process: the exit code and output of the entry point without the start of a Python process."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from whet.cli import main
from whet.errors import BuildWarning


def run_command(*args: str, cwd: Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """(exit code, standard output followed by standard error) of `whet ARGS` in the folder `cwd`, with the changes to the environment."""
    written = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(b, encoding="utf-8", write_through=True) for b in written)

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restores it: the entry point replaces it
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", category=BuildWarning)  # pytest ignores them; a command prints them
        patch.setattr(warnings, "showwarning", show)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = 0
        try:
            main(list(args))
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
    return code, "".join(b.getvalue().decode() for b in written)
