"""Reports: HTML pages of engines, comparisons, searches, 2:4 advice and sensitivity to low precision; the progress of a search in a terminal.

Pages are self-contained files without network access. They need the extra `report` (plotly).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.registry import import_on_demand
from whet.report.comparison_page import render_comparison_page
from whet.report.engine_page import render_engine_page
from whet.report.search_page import render_search_page
from whet.report.sensitivity_page import render_sensitivity_page
from whet.report.sparsity_page import render_sparsity_page

if TYPE_CHECKING:
    from whet.report import search_live as search_live

__all__ = ["render_comparison_page", "render_engine_page", "render_search_page", "render_sensitivity_page", "render_sparsity_page"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return import_on_demand(__name__, {"search_live": f"{__name__}.search_live"}, name)
