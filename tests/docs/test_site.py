"""The site's hooks: fences with a second word are code blocks, and a page in which one is text ends the build."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
HOOKS = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="howto/gpu.md"))


def rendered(text: str) -> str:
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("pymdownx")
    changed = HOOKS["on_page_markdown"](text, PAGE, None, None)
    return HOOKS["on_page_content"](markdown.markdown(changed, extensions=["pymdownx.superfences"]), PAGE, None, None)


@pytest.mark.parametrize("language", ["python", "python torch", "sh gpu", "text"])
def test_fences_are_code_blocks(language):
    html = rendered(f"Text.\n\n```{language}\nx = 1  # y\n```\n\nMore.\n")
    assert "<code" in html
    assert "<h1" not in html


def test_every_page_of_the_docs_is_rendered():
    for path in sorted((ROOT / "docs").rglob("*.md")):
        assert rendered(path.read_text())


def test_a_fence_that_is_text_ends_the_build():
    error = pytest.importorskip("mkdocs.exceptions").PluginError
    with pytest.raises(error, match=r"howto/gpu.md: .*not a code block"):
        HOOKS["on_page_content"]("<p>```python torch import x</p>", PAGE, None, None)


def test_links_of_the_changelog_lead_to_pages_of_the_site():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="CHANGELOG.md"))
    text = HOOKS["on_page_markdown"]((ROOT / "CHANGELOG.md").read_text(), page, None, None)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
