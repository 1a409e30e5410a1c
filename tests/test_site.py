"""The built site, as a reader gets it: `make test-slow` builds it once and opens it in Chromium.

Knows Markdown's rules from another program than the one that builds the site (markdown-it, which
follows GitHub's), and what is wrong for a reader from axe. Does not know what the pages say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from markdown_it import MarkdownIt

from support.docs import DOCS, ROOT, pages
from support.every import every

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

LANGUAGES = ("en", "zh")
START = {"en": "", "zh": "zh/"}  # of the address of a page
PAGES = [*pages("en"), *pages("zh"), *sorted(DOCS.glob("decisions/*.md")), *DOCS.glob("*.md")]
NOT_FOUND = {"en": "No matching documents", "zh": "没有找到符合条件的结果"}
QUERIES = {  # what a reader asks, and what each page that is found must have
    "en": {
        "--policy": ["policy"],
        "PREEMPT": ["preempt"],
        "kv_usage": ["kv", "usage"],
        "Scheduler.schedule": ["scheduler", "schedule"],
        '"free list"': ["free", "list"],
    },
    "zh": {
        "--policy": ["policy"],
        "PREEMPT": ["preempt"],
        "kv_usage": ["kv", "usage"],
        "显存": ["显存"],
        "抢占": ["抢占"],
        "前缀缓存": ["前缀", "缓存"],
    },
}
WIDTHS = (390, 1280)
COLOURS = ("light", "dark")
LOOKED_AT = (  # one page of each kind, for axe
    "index.html",
    "tour.html",
    "exports.html",
    "concepts/preemption.html",
    "change/add-an-event.html",
    "decisions/0003-the-free-list-is-the-eviction-order.html",
)
LOOKED_AT_ALL = {("en", "light", 1280), ("zh", "dark", 390)}  # elsewhere, at the first
BLOCKS = {"p", "li", "td", "th", "pre", "dt", "dd", *(f"h{level}" for level in range(1, 7))}
STRUCTURE = {"ul", "ol", "table", "blockquote", "pre", *(f"h{level}" for level in range(1, 7))}


def build(folder: Path, **environment: str) -> None:
    """Build the site into a folder, warnings being errors."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict"),
            *("-f", "docs/site/mkdocs.yml", "-d", folder),
        ],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


def address_of(page: Path) -> str:
    """Where a page is in the site."""
    place = page.relative_to(DOCS).with_suffix(".html")
    return str(place.relative_to("en") if place.parts[0] == "en" else place)


# -- what is built ---------------------------------------------------------------------------------


class Reading(HTMLParser):
    """What a reader sees of a page: its blocks of text, each with the lists and tables around it.

    Attributes:
        blocks: such as ("table td", "int | None"), in the page's order.
        links: where its links, pictures and scripts lead.
        names: what a link to a place in it may name.
    """

    def __init__(self, *, is_article: bool) -> None:
        super().__init__()
        self.blocks: list[tuple[str, str]] = []
        self.links: list[tuple[str, str]] = []
        self.names: set[str] = set()
        self._around: list[str] = []
        self._text = ""
        self._is_inside = is_article
        self._is_permalink = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        self.links += [(tag, values[name]) for name in ("href", "src") if name in values]
        if tag == "article":
            self._is_inside = True
        self._is_permalink = tag == "a" and values.get("class") == "headerlink"
        if tag in BLOCKS | STRUCTURE:
            self._end_block()
            self._around.append(tag)
        if tag == "img":
            self._text += f"[{values.get('alt')}]"

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._end_block()
            self._is_inside = False
        elif tag in BLOCKS | STRUCTURE and tag in self._around:
            self._end_block()
            while self._around.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not self._is_permalink:
            self._text += data
        self._is_permalink = False

    def _end_block(self) -> None:
        is_code = "pre" in self._around
        text = self._text.strip("\n") if is_code else " ".join(self._text.split())
        if text and self._is_inside:
            self.blocks.append((" ".join(tag for tag in self._around if tag != "p"), text))
        self._text = ""


def read(html: str, *, is_article: bool = False) -> Reading:
    """Read a page, or what is one article."""
    reading = Reading(is_article=is_article)
    reading.feed(html)
    reading.close()
    return reading


@cache
def read_file(path: Path) -> Reading:
    """Read a page of the site."""
    return read(path.read_text("utf-8"))


@every("page", PAGES)
def test_a_page_shows_what_is_meant(site: Path, page: Path) -> None:
    text = re.sub(r"(?m)^(#+ .*?) *\{ *#[\w-]+ *\} *$", r"\1", page.read_text("utf-8"))
    meant = read(MarkdownIt("commonmark").enable("table").render(text), is_article=True)
    shown = read_file(site / address_of(page))
    assert [block for block in shown.blocks if block not in meant.blocks] == []
    assert Counter(shown.blocks) == Counter(meant.blocks)


def test_links_and_their_anchors_lead_somewhere(site: Path) -> None:
    broken = []
    for path in sorted(site.rglob("*.html")):
        for tag, link in read_file(path).links:
            parts = urlsplit(link)
            if path.name == "404.html" or parts.scheme in {"http", "https", "javascript"}:
                assert tag in {"a", "link"} or path.name == "404.html", f"{path}: {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_there = target.is_file() and not parts.path.startswith("/")
            if is_there and parts.fragment and target.suffix == ".html":
                is_there = unquote(parts.fragment) in read_file(target).names
            if not is_there:
                broken.append((str(path.relative_to(site)), link))
    assert broken == []


def test_each_page_leads_to_itself_in_the_other_language(site: Path) -> None:
    for page in pages("en"):
        english = site / address_of(page)
        chinese = site / "zh" / address_of(page)
        for one, other in ((english, chinese), (chinese, english)):
            targets = {(one.parent / link).resolve() for _, link in read_file(one).links}
            assert other in targets, one


def test_the_map_of_the_site_has_real_addresses_or_is_left_out(site: Path, tmp_path: Path) -> None:
    assert not list(site.glob("sitemap*"))
    build(tmp_path, SITE_URL="https://docs.example.org/nano/")
    places = re.findall(r"<loc>(.*?)</loc>", (tmp_path / "sitemap.xml").read_text("utf-8"))
    assert len(places) == len({*places}) > len(PAGES)
    for place in places:
        name = place.removeprefix("https://docs.example.org/nano/")
        assert (tmp_path / (name or "index.html")).is_file(), place


# -- in a browser ----------------------------------------------------------------------------------


class QuietHandler(SimpleHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its base names it so
        pass


@pytest.fixture(scope="session")
def places(site: Path) -> Iterator[dict[str, str]]:
    """Where a reader may have the site: on a server, on a disk."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {"server": f"http://127.0.0.1:{server.server_port}", "disk": site.as_uri()}
        server.shutdown()
        thread.join()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """An empty tab. No script may fail in it, and it may fetch nothing from elsewhere."""
    complaints: list[str] = []
    with browser.new_context() as context:
        context.set_default_timeout(2_000)
        tab = context.new_page()
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on(
            "requestfailed",
            lambda request: (  # a page that is left while it loads aborts the rest
                complaints.append(request.url) if request.failure != "net::ERR_ABORTED" else None
            ),
        )
        tab.on("request", lambda request: fetched.append(request.url))
        fetched: list[str] = []
        tab.on(
            "console",
            lambda message: (
                complaints.append(message.text) if message.type in {"error", "warning"} else None
            ),
        )
        yield tab
    assert complaints == []
    own = ("http://127.0.0.1:", "file:", "data:", "blob:")
    assert [url for url in fetched if not url.startswith(own)] == []


@pytest.mark.parametrize("place", ["server", "disk"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_search_finds_pages_of_its_language(
    tab: Page, places: dict[str, str], site: Path, place: str, language: str
) -> None:
    tab.goto(f"{places[place]}/{START[language]}tour.html")
    tab.keyboard.press("s")
    field, results = tab.locator("input[name=query]"), tab.locator(".md-search-result__link")
    for query, words in QUERIES[language].items():
        field.fill("qqqxyz")
        tab.keyboard.press("End")  # the theme waits for a key; input methods give none for a letter
        tab.locator(".md-search-result__meta", has_text=NOT_FOUND[language]).wait_for()
        field.fill(query)
        tab.keyboard.press("End")
        results.first.wait_for(state="attached")
        assert tab.locator(".md-search-result__terms").count() == 0, f"{query}: a word is missing"
        start = urlsplit(places[place]).path
        addresses = results.evaluate_all("all => all.map(a => a.href)")
        names = {unquote(urlsplit(link).path).removeprefix(start).lstrip("/") for link in addresses}
        assert {name.startswith("zh/") for name in names} == {language == "zh"}
        for name in names:
            text = "\n".join(text for _, text in read_file(site / name).blocks).lower()
            assert [word for word in words if word not in text] == [], (query, name)


def test_no_page_scrolls_sideways(tab: Page, places: dict[str, str]) -> None:
    wide = []
    for page in PAGES:
        tab.goto(f"{places['disk']}/{address_of(page)}", wait_until="domcontentloaded")
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 800})
            tab.evaluate("new Promise(drawn => requestAnimationFrame(drawn))")
            if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append((address_of(page), width))
    assert wide == []


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("colours", COLOURS)
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_serious(
    tab: Page, places: dict[str, str], language: str, colours: str, width: int
) -> None:
    tab.emulate_media(color_scheme="dark" if colours == "dark" else "light")
    tab.set_viewport_size({"width": width, "height": 800})
    others = LOOKED_AT[1:] if (language, colours, width) in LOOKED_AT_ALL else ()
    for name in (LOOKED_AT[0], *others):
        tab.goto(f"{places['server']}/{START[language]}{name}")
        scheme = tab.locator("body").get_attribute("data-md-color-scheme")
        assert scheme == {"dark": "slate", "light": "default"}[colours]
        found = Axe().run(tab, options={"resultTypes": ["violations"]}).response["violations"]
        assert [
            (violation["id"], node["html"], node["failureSummary"])
            for violation in found
            if violation["impact"] in {"serious", "critical"}
            for node in violation["nodes"]
        ] == [], name


def test_a_reader_changes_colours_and_language(tab: Page, places: dict[str, str]) -> None:
    tab.goto(f"{places['server']}/tour.html")
    for scheme in ("slate", "default"):
        tab.locator("form[data-md-component=palette] label:visible").click()
        tab.locator(f"body[data-md-color-scheme={scheme}]").wait_for()
    tab.locator(".md-select").hover()
    tab.locator(".md-select__link", has_text="中文").click()
    tab.wait_for_url("**/zh/tour.html")
    assert tab.locator("html").get_attribute("lang") == "zh"


@every("language", LANGUAGES)
def test_the_site_is_read_from_a_disk(tab: Page, places: dict[str, str], language: str) -> None:
    tab.goto(f"{places['disk']}/{START[language]}index.html")
    for _ in range(3):
        tab.locator(".md-footer__link--next").click()
        tab.wait_for_load_state()
    assert tab.url.endswith("architecture.html")
    assert tab.locator("html").get_attribute("lang") == language
