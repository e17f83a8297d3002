"""The HTML report in a real browser, as somebody opens it from a ticket, and the documentation, from disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from hvdenv.reports.page import render
from hvdenv.reports.report import Report
from tests.support.needs import need

SITE = Path(__file__).parents[2] / "site"
EVERYTHING = Path(__file__).parents[1] / "cases" / "reports" / "everything.json"
WIDTHS = (400, 1400)
SCHEMES = ("light", "dark")
UNFOLD = "document.querySelectorAll('details').forEach(each => each.open = true)"

# Texts that have less contrast than 4.5 with what lies behind them, as WCAG 2.2 reckons.
PALE = """
() => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const drawn = colours => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = rgb => rgb.map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = element => element
    ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : [];
  const pale = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || element.closest('title')) continue;
    const style = getComputedStyle(element);
    const [front, back] = [drawn([...behind(element), style.color]), drawn(behind(element))].map(luminance);
    const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (contrast < 4.5) pale.push([texts.currentNode.data, contrast]);
  }
  return pale;
}
"""

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    need("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report() -> Report:
    return Report.from_json(json.loads(EVERYTHING.read_text(encoding="utf-8")))


@pytest.fixture
def show(browser: Browser, report: Report, tmp_path: Path) -> Iterator[Open]:
    """Open the report; afterwards nobody may have complained, run or fetched anything."""
    path = tmp_path / "verify.html"
    path.write_text(render(report), encoding="utf-8")
    said: list[str] = []

    def show(width: int = 1400, scheme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: said.append(request.url))
        page.goto(path.as_uri())
        return page

    yield show
    assert set(said) == {path.as_uri()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_read(show: Open, width: int, scheme: str) -> None:
    page = show(width, scheme)
    for _ in ("folded", "unfolded"):
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.evaluate(UNFOLD)
    assert page.evaluate(PALE) == []
    # No name of the table is broken over two lines.
    names = page.locator(".judged th[scope=row]")
    assert names.count() == 10
    assert all(box["height"] < 40 for box in map(Locator.bounding_box, names.all()) if box)


def test_what_is_in_it(show: Open, report: Report) -> None:
    page = show()
    assert page.title() == "fail: neuron+nccl on gpu32.cluster.example.org"
    assert page.get_by_role("heading", level=1).inner_text() == "neuron+nccl"
    assert page.locator(".verdict").inner_text().split(maxsplit=1)[0] == "FAIL"
    row = page.get_by_role("row", name="PyTorch")
    assert row.get_by_role("cell").all_inner_texts() == ["yes", "yes", "no"]
    # What needs somebody is there at once, its evidence and what is good only when asked for.
    failed = page.locator("#fail article")
    assert failed.get_by_text("was ended by SIGKILL").is_visible()
    assert failed.get_by_text("What to do: look at the memory limit").is_visible()
    assert not failed.locator("pre").is_visible()
    failed.get_by_text("Evidence").click()
    assert failed.locator("pre").is_visible()
    assert not page.get_by_text("Horovod 0.28.1: NCCL").is_visible()
    page.locator("#pass > summary").click()
    assert page.get_by_text("Horovod 0.28.1: NCCL").is_visible()
    assert page.get_by_role("row", name="horovod 0.28.1").is_visible()


def test_the_page_itself_forbids_scripts(browser: Browser, report: Report) -> None:
    """If markup came in all the same, it would still do nothing."""
    page = browser.new_page()
    page.set_content(render(report).replace("<main>", "<main><i onclick='this.id = 1'>x</i>"))
    page.locator("i").click()
    assert page.locator("i").get_attribute("id") is None


def test_paper_has_all_of_it(show: Open) -> None:
    page = show(800, "dark")
    page.emulate_media(media="print")
    assert page.locator("#fail pre").bounding_box()["height"] > 50  # type: ignore[index]
    assert page.get_by_text("Horovod 0.28.1: NCCL").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf(format="A4").startswith(b"%PDF")


# The documentation.


@pytest.fixture(scope="module")
def site(browser: Browser) -> Iterator[Page]:
    """Its first page; nothing may be requested from elsewhere or go wrong."""
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: run `make docs`")
    requested: list[str] = []
    problems: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.on("request", lambda request: requested.append(request.url))
    page.goto((SITE / "index.html").as_uri())
    yield page
    assert problems == []
    assert [each for each in requested if not each.startswith(("file:", "data:"))] == []


def test_an_error_message_is_found(site: Page) -> None:
    site.get_by_role("textbox").first.fill("has been removed from CMake")
    site.keyboard.press("Enter")
    result = site.locator("#search-results a").filter(has_text="CMake 4 rejects").first
    result.click(timeout=15_000)
    site.wait_for_url("**/cmake-4.html*")
    assert site.get_by_text("CMAKE_POLICY_VERSION_MINIMUM=3.5").first.is_visible()


def test_each_kind_of_page_is_in_the_navigation(site: Page) -> None:
    site.goto((SITE / "index.html").as_uri())
    navigation = site.get_by_role("navigation").first
    for title in ("Your first environment", "Add your cluster", "Commands", "Decisions"):
        assert navigation.get_by_role("link", name=title, exact=True).is_visible(), title
    picture = site.get_by_role("img", name="hvdenv verify names the rank")
    assert picture.evaluate("image => image.complete && image.offsetWidth") > 500
