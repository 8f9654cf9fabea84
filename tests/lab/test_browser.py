"""What the pages promise in a real browser: drawn, sorted, filtered, by keyboard, on a phone, in the dark, offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import test_compare
import test_demo
import test_paper
from browser import CHROMIUM, Browser
from sweep_tools import manifest, run

from autoopt_lab.compare import HEADINGS
from autoopt_lab.report import compare_page, page, paper_page, run_page
from autoopt_lab.results import load
from autoopt_lab.tasks.digits import task

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on the PATH; on Debian: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]

# By page: the table that sorts and filters, its headings, and words that some of its rows have.
PAGES = {
    "demo": ("runs", ["Optimizer", "Rate", "Seed", "Train error", "Test error", "Averaged", "Seconds"], "adam 0.01"),
    "report": (
        "settings",
        ["Data", "Optimizer", "Setting", "Test error", "Averaged", "Train error", "Seeds", "Diverged"],
        "auto 8",
    ),
    "paper": (
        "settings",
        ["Data", "Optimizer", "Setting", "Test error", "Averaged", "Train error", "Seeds", "Diverged"],
        "adam 128",
    ),
    "compare": ("compared", list(HEADINGS), "auto no"),
}
ERROR = {"compare": "Averaged"}  # the heading to sort by; "Test error" elsewhere
ROWS = "[...document.querySelector('table.sortable').tBodies[0].rows]"
FOCUSED = "(e => (e.getAttribute('aria-label') || e.placeholder || e.textContent).trim())(document.activeElement)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run(folder / "tiny", manifest(2))
    content = {
        "demo": page.render(page.Report(task, test_demo.runs(0.01, 0.02, 0.3), workers=2, seconds=1.0)),
        "report": run_page.render(load(folder / "tiny")[0]),
        "paper": paper_page.render(test_paper.results(test_paper.as_published)),
        "compare": compare_page.render(test_compare.comparison()),
    }
    for name, html in content.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in content}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driven = Browser(tmp_path_factory.mktemp("profile"))
    yield driven
    driven.close()


def reach(browser: Browser, name: str) -> None:
    """By the Tab key alone, opening what is folded on the way."""
    for _ in range(30):
        browser.press("Tab")
        if browser.run("document.activeElement.tagName") == "SUMMARY":
            browser.press("Enter")
        if browser.run(FOCUSED) == name:
            return
    pytest.fail(f"Tab never reached {name}")


def column(browser: Browser, heading: int) -> list[float]:
    """The numbers of the shown rows; infinity for what is none, such as a divergence."""
    number = "parseFloat(row.cells[k].dataset.value ?? row.cells[k].textContent)"
    shown = f"{ROWS}.filter(row => !row.hidden)"
    values = browser.run(f"(k => {shown}.map(row => {number}).map(x => isNaN(x) ? null : x))({heading})")
    return [float("inf") if value is None else float(value) for value in values]


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (375, True)], ids=["desk, light", "phone, dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_fits_its_window_and_asks_for_nothing(
    name: str, width: int, dark: bool, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages[name], width, dark)
    marks = "plot.querySelectorAll('.scatterlayer .trace path, .heatmaplayer image').length"
    drawn = browser.run(f"[...document.querySelectorAll('.plot')].map(plot => {marks})")
    assert drawn
    assert all(drawn)
    for axis in ("xtick", "ytick"):  # an axis with one label, or none, says nothing
        labels = browser.run(
            f"[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.{axis} text').length)"
        )
        assert min(labels) >= 2
    wide = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll table') && e.getBoundingClientRect()"
    )
    assert browser.run(f"{wide}.right > innerWidth + 1).map(e => e.outerHTML.slice(0, 90))") == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints == []
    assert browser.requests == []


@pytest.mark.parametrize("name", PAGES)
def test_the_table_is_reached_and_sorted_by_keyboard(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    _, headings, _ = PAGES[name]
    browser.open(pages[name])
    reach(browser, headings[0])
    order = [headings[0]]
    for _ in headings[1:]:
        browser.press("Tab")
        order.append(browser.run(FOCUSED))
    assert order == headings
    browser.open(pages[name])
    error = ERROR.get(name, "Test error")
    reach(browser, error)
    heading = headings.index(error)
    before = column(browser, heading)
    browser.press("Enter")
    assert column(browser, heading) == sorted(before)
    assert browser.run("document.activeElement.parentElement.getAttribute('aria-sort')") == "ascending"
    browser.press(" ")
    assert column(browser, heading) == sorted(before, reverse=True)
    assert browser.run("document.querySelectorAll('[aria-sort]').length") == 1
    assert browser.complaints == []


@pytest.mark.parametrize("name", PAGES)
def test_the_table_is_filtered_by_words_and_says_how_many_rows_are_left(
    name: str, browser: Browser, pages: dict[str, Path]
) -> None:
    table, _, words = PAGES[name]
    browser.open(pages[name])
    total = browser.run(f"{ROWS}.length")
    reach(browser, browser.run("document.querySelector('input[data-filters]').placeholder"))
    browser.type(words)
    shown = browser.run(f"{ROWS}.filter(row => row.checkVisibility()).map(row => row.textContent.toLowerCase())")
    assert 0 < len(shown) < total
    assert all(word in text for text in shown for word in words.split())
    assert browser.run(f"document.getElementById('{table}-count').textContent") == f"{len(shown)} of {total}"
    browser.type(" no such row")
    assert browser.run(f"{ROWS}.filter(row => row.checkVisibility()).length") == 0
    assert browser.complaints == []


@pytest.mark.parametrize("name", PAGES)
def test_page_and_figures_follow_the_theme_while_they_are_open(
    name: str, browser: Browser, pages: dict[str, Path]
) -> None:
    colours = """[
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.body).color,
        getComputedStyle(document.querySelector('.plot .xtick text')).fill,
    ].map(colour => colour.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part) / 765, 0))"""
    browser.open(pages[name])
    page_light, *text_light = browser.run(colours)
    browser.theme(dark=True)
    browser.run("new Promise(done => setTimeout(done, 500))")
    page_dark, *text_dark = browser.run(colours)
    assert page_light > 0.9
    assert page_dark < 0.2
    assert all(light < 0.3 for light in text_light)
    assert all(dark > 0.7 for dark in text_dark)


def test_the_client_sees_what_a_page_does_wrong(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<p style='width: 2000px'>wide</p><img src='other.png'><script>console.error(1); nothing()</script>")
    browser.open(bad, width=375)
    assert len(browser.complaints) >= 2
    assert browser.requests == [(tmp_path / "other.png").as_uri()]
    assert browser.run("document.documentElement.scrollWidth") > 375
