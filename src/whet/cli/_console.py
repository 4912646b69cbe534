"""The console that tables are printed on: as wide as the terminal; 140 columns into a file or a pipe, where nothing tells."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 140


def console() -> Console:
    """A rich console on standard output."""
    from rich.console import Console

    made = Console(soft_wrap=False)
    return made if made.is_terminal or "COLUMNS" in os.environ else Console(soft_wrap=False, width=PIPED_WIDTH)
