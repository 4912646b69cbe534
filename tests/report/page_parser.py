"""Reads report pages: well-formed elements, addresses, words, and the compressed data of the charts."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "input", "br"}


class Wellformed(HTMLParser):
    """Collects scripts, addresses and text; every element must be closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action", "data", "srcset")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parsed(page: str) -> Wellformed:
    """The parsed page."""
    p = Wellformed()
    p.feed(page)
    p.close()
    return p


def chart_data(page: str) -> dict[str, Any]:
    """{"figures": ..., "details": ...} of a page."""
    found = re.search(r'id="data">([^<]*)<', page)
    assert found is not None
    return json.loads(gzip.decompress(b64decode(found[1])))


def check_page(page: str) -> None:
    """Fails for a page that is not well-formed, is too large, or could ask for anything outside itself."""
    p = parsed(page)
    assert p.open == []
    assert p.scripts == 3
    assert p.addresses == ["data:,"]
    markup = re.sub(r'(?s)<script type="application/gzip".*?</script>', "", page)
    assert not re.findall(r"(?:https?:)?//[a-z]|url\(|@import|fetch\(|XMLHttpRequest|WebSocket", markup.replace("http-equiv", ""))
    assert "default-src 'none'" in page
    assert len(page.encode()) < 6e6
    texts = json.dumps(chart_data(page))
    assert "<script" not in texts
