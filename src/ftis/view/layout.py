"""Pages as HTML from typed values: the static report and the page that is watched, through the same templates.

Text that models, peers or data sets wrote is shown, never interpreted: the templates escape every value, and every
character is made visible. A page has no script but the watched one's own file, and reads nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ftis.check.formatting import visible
from ftis.view.drawing import INKS
from ftis.view.plots import Chart


@dataclass(frozen=True)
class Section:
    """A part of the page; ``templates/<anchor>.html`` lays ``view`` out."""

    anchor: str
    title: str
    view: object


@dataclass(frozen=True)
class PageLink:
    """A page beside this one, as another arm's; ``current`` is this one."""

    title: str
    address: str
    current: bool = False


@dataclass(frozen=True)
class Watching:
    """What a watched page needs: the addresses of its stylesheet, its script and its events.

    Attributes:
        about: what it follows, as a sentence.
    """

    stylesheet: str
    script: str
    events: str
    about: str
    places: Sequence[PageLink] = ()


@dataclass(frozen=True)
class Page:
    title: str
    facts: Sequence[str]
    question: str
    headlines: Sequence[str]
    sections: Sequence[Section]
    watching: Watching | None = None


def render(page: Page) -> str:
    """The page as one HTML document. A static page has its stylesheet in itself, and no script."""
    return render_around(page, [render_section(section) for section in page.sections])


def render_around(page: Page, sections: Sequence[str]) -> str:
    """The same around sections that were rendered before."""
    body = Markup("\n").join(map(Markup, sections))
    return _environment().get_template("page.html").render(page=page, body=body, css=asset("page.css")) + "\n"


def render_header(page: Page) -> str:
    """What a watched page has above its sections."""
    return _environment().get_template("header.html").render(page=page)


def render_section(section: Section) -> str:
    """One section by itself, as it stands in a page."""
    return _environment().get_template("section.html").render(section=section)


def figure_svg(chart: Chart) -> str:
    """A chart as an SVG document of its own."""
    return _environment().get_template("figure.svg").render(chart=chart, inks=INKS) + "\n"


def asset(name: str) -> str:
    """A file beside the templates."""
    return files("ftis.view").joinpath("templates", name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("ftis.view"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: object) -> str:
    """What a template's expression becomes before it is escaped; what is HTML already stays as it is."""
    return value if isinstance(value, Markup) else visible(value)
