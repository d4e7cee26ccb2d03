"""The browser of these tests, and a page in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chromium import Chromium, needs_chromium
from explored_page import Page


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    needs_chromium()
    with Chromium(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="session")
def shared_page(browser: Chromium) -> Iterator[Page]:
    made = Page(browser)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def page(shared_page: Page) -> Iterator[Page]:
    """Opened anew. No test may leave a complaint of a script behind."""
    shared_page.browser.problems.clear()
    shared_page.browser.requests.clear()
    shared_page.browser.open(shared_page.server.url)
    yield shared_page
    assert shared_page.browser.problems == []
