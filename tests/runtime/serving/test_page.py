"""The page, in a browser (Debian's chromium and its driver; where they are not installed, this is skipped)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.serving.browser import MISSING, Browser, ask, opened
from tests.runtime.serving.fake_server import running, serving
from tests.runtime.serving.fake_stepper import FakeStepper, spoken_logits

pytestmark = pytest.mark.skipif(MISSING, reason="needs chromium and chromedriver")

TEXT = "<b>größer</b> & 日本 "


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as made:
        yield made


def stepper() -> FakeStepper:
    """It says TEXT over and over, slowly enough to be seen coming and to be stopped."""
    return FakeStepper(
        vocab_size=256, max_length=256, num_blocks=80, logits=spoken_logits(TEXT.encode()), seconds=0.01, max_tokens=256
    )


def test_text_comes_while_it_is_made(browser: Browser, tmp_path: Path) -> None:
    size = len(TEXT.encode())
    with running(serving(stepper(), template=False)) as address:
        browser.open(address)
        assert browser.run("return at('model').textContent") == "fake"
        ask(browser, "\0", 3 * size)
        first = browser.until("at('output').textContent.length > 5 && at('output').textContent")
        assert len(first) < 3 * len(TEXT), "it came all at once"
        browser.until("at('status').textContent.includes('tokens in')")
        assert browser.run("return at('output').textContent").lstrip("\0") == 3 * TEXT, "nothing of it became HTML"
        assert browser.run("return at('status').textContent").startswith(f"{3 * size} tokens")
        assert len(browser.picture()) > 1000


def test_stopping_and_errors(browser: Browser) -> None:
    served = serving(stepper(), template=False)
    with running(served) as address:
        browser.open(address)
        ask(browser, "\0", 200)
        browser.until("at('output').textContent.length > 5")
        browser.run("at('stop').click()")
        browser.until("at('status').textContent == 'stopped'")
        ask(browser, "\0", 3000)
        browser.until(
            "at('status').className == 'error' && at('status').textContent.includes('maximum context length')"
        )


def test_a_conversation(browser: Browser) -> None:
    with running(serving(api_key="secret")) as address:
        browser.open(address)
        assert browser.run("return at('key').offsetParent === null"), "nobody asked for a key yet"
        ask(browser, "hi", 5)
        browser.until("at('key').offsetParent !== null && at('status').textContent.includes('API key')")
        browser.run("at('clear').click(); at('key').value = 'secret'")
        for turn in (1, 2):
            ask(browser, f"turn {turn}", 5)
            browser.until(f"turns.length == {2 * turn} && !running")
        roles = browser.run("return [...document.querySelectorAll('.turn b')].map(e => e.textContent)")
        assert roles == ["user", "assistant"] * 2


def test_what_is_cleared_stays_away(browser: Browser) -> None:
    """Though its answer was still coming, which ends on the server, too."""
    served = serving(stepper())
    with running(served) as address:
        browser.open(address)
        ask(browser, "first", 200)
        browser.until("turns.length == 1 && at('output').innerText.length > 22")
        browser.run("at('clear').click()")
        browser.until("!running")
        assert served.engine.generated < 200
        empty = "turns.length == 0 && !at('output').textContent && !at('status').textContent && !at('prompt').value"
        assert browser.run(f"return {empty}")
        ask(browser, "second", 3)
        browser.until("turns.length == 2 && !running")
        assert browser.run("return turns[0].content") == "second"
        assert "first" not in browser.run("return at('output').textContent")


def test_a_message_that_fails_comes_back(browser: Browser) -> None:
    with running(serving(api_key="secret")) as address:
        browser.open(address)
        ask(browser, "a long message", 5)
        browser.until("at('status').className == 'error' && !running")
        assert browser.run("return at('prompt').value") == "a long message"
        assert browser.run("return turns.length == 0 && !at('output').textContent")
        browser.run("at('key').value = 'secret'; at('send').click()")
        browser.until("turns.length == 2 && !running")
        assert browser.run("return [turns[0].content, at('prompt').value]") == ["a long message", ""]
