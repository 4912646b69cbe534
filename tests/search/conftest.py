"""Tests of the search share the case of support/search_case.py."""

import pytest

pytest.importorskip("optuna", reason="the search needs Optuna: pip install 'whet[search]'")
pytest.importorskip("yaml", reason="recipes need PyYAML: pip install 'whet[search]'")

from support.search_case import case as case  # a fixture
