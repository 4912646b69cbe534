"""Reports: HTML pages of engines, comparisons and searches, and the progress of a search in a terminal.

Pages are self-contained files without network access. They need the extra `report` (plotly).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.registry import import_on_demand
from whet.report.comparison_page import comparison_page
from whet.report.engine_page import engine_page
from whet.report.search_page import search_page

if TYPE_CHECKING:
    from whet.report import search_live as search_live

__all__ = ["comparison_page", "engine_page", "search_page"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return import_on_demand(__name__, {"search_live": f"{__name__}.search_live"}, name)
