"""The documentation as a site, in a real browser: it loads nothing from elsewhere, and can be read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

import pytest

from report import browser

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
#: One of each kind: tabs, code and what it prints, tables, a list of rules, a rule.
PAGES = ["index", "getting-started", "precision", "sweep", "rules/index", "rules/ALN001"]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not SITE.exists():
        pytest.skip("no site: make site builds it")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    executable = browser.find()
    if executable is None:
        pytest.skip(f"no browser on this machine: looked for {', '.join(browser.NAMES)}")
    with browser.running(executable, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_quiet_fits_and_keeps_nobody_from_reading_it(
    chromium: browser.Browser, address: str, page: str, width: int, scheme: str
) -> None:
    axe = files(pytest.importorskip("axe_core_python")).joinpath("axe.min.js").read_text(encoding="utf-8")
    chromium.forget()  # a page stores the scheme that it was first shown in, and may do so at any time
    chromium.open(f"{address}/{page}.html", width=width, scheme=scheme)
    scheme_of_page = {"light": "default", "dark": "slate"}[scheme]
    assert chromium.evaluate("document.body.dataset.mdColorScheme") == scheme_of_page
    assert chromium.errors == []
    assert [each for each in chromium.requests if not each.startswith((address, "data:", "blob:"))] == []
    assert chromium.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    chromium.evaluate(f"{axe};0")
    serious = "found.violations.filter(each => ['serious', 'critical'].includes(each.impact))"
    told = f"{serious}.map(each => `${{each.impact}} ${{each.id}}: ${{each.nodes[0].html}}`)"
    assert chromium.evaluate(f"axe.run().then(found => {told})") == []


def test_the_search_finds_a_rule(chromium: browser.Browser, address: str) -> None:
    chromium.open(f"{address}/index.html")
    chromium.evaluate("document.querySelector('[data-md-toggle=search]').click()")
    chromium.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    chromium.type("first convolution")
    found = (
        "new Promise(done => { const look = () => {"
        "const links = [...document.querySelectorAll('.md-search-result__link')].map(each => each.href);"
        "links.length ? done(links) : setTimeout(look, 50) }; look() })"
    )
    assert any("/rules/" in link for link in chromium.evaluate(found))
