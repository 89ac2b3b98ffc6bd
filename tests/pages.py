"""A page of the report or of ``ftis watch``, read as a browser would."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ftis.records.following import Directory
from ftis.view.live import Address, View, of_directory


class Page(HTMLParser):
    """A page whose elements are closed in order, and which holds nothing that runs or asks elsewhere by itself.

    Attributes:
        scripts: the attributes of each script.
        addresses: all that the page refers to.
        text: its words.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.ids, self.addresses = list[str](), list[str](), list[str]()
        self.scripts: list[dict[str, str | None]] = []
        self._open, self._said = list[str](), ""
        self.feed(html)
        self.close()
        assert not self._open
        assert len(self.ids) == len(set(self.ids))
        self.text = re.sub(r"\s+", " ", self._said)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("iframe", "object", "embed", "form", "img"), tag
        self.tags.append(tag)
        if tag not in ("meta", "br", "link", "input"):
            self._open.append(tag)
        if tag == "script":
            self.scripts.append(dict(attrs))
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name != "style" or "url(" not in (value or "")
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster", "data-events"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._said += data


OF_ARM = Address(0, "F-TIS")


def view_of(run: Path, address: Address = OF_ARM) -> View:
    """A live page, by default of the arm F-TIS under seed 0."""

    def link(path: str, **query: Any) -> str:
        return f"/{path}"

    return View(of_directory(Directory(run), address, link), address, link)
