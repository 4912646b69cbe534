"""A browser for the tests of pages."""

import pytest

from support import browser


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium: apt-get install chromium (or WHET_CHROMIUM=path) shows the page to a real browser")
    with browser.browser(executable, tmp_path_factory.mktemp("profile")) as page:
        yield page
