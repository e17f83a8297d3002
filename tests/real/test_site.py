"""The documentation in a real browser, from disk, as on a cluster without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from tests.support.needs import need

SITE = Path(__file__).parents[2] / "site"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """The first page of the site; nothing may be requested from elsewhere or go wrong."""
    need("chromium")
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: run `make docs`")
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(request.url))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("file:", "data:")) else problems.append(request.url)
            ),
        )
        page.goto((SITE / "index.html").as_uri())
        yield page
        browser.close()
    assert problems == []


def test_an_error_message_is_found(page: Page) -> None:
    page.get_by_role("textbox").first.fill("has been removed from CMake")
    page.keyboard.press("Enter")
    result = page.locator("#search-results a").filter(has_text="CMake 4 rejects").first
    result.click(timeout=15_000)
    page.wait_for_url("**/cmake-4.html*")
    assert page.get_by_text("CMAKE_POLICY_VERSION_MINIMUM=3.5").first.is_visible()


def test_each_kind_of_page_is_in_the_navigation(page: Page) -> None:
    page.goto((SITE / "index.html").as_uri())
    navigation = page.get_by_role("navigation").first
    for title in ("Your first environment", "Add your cluster", "Commands", "Decisions"):
        assert navigation.get_by_role("link", name=title, exact=True).is_visible(), title
    picture = page.get_by_role("img", name="hvdenv verify names the rank")
    assert picture.evaluate("image => image.complete && image.offsetWidth") > 500
