"""A browser for the tests of the page, and a guard: whatever the page asks of the network, reports
as an error or does against its own policy fails the test.

Playwright drives the system's Chromium; nothing is downloaded. CLEARHEAD_CHROMIUM names another.
"""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from playwright.sync_api import sync_playwright

from clearhead.inspection.report import Report

TEXT = "The king thanked the queen because she had saved the ship ."
WORDS = TEXT.split()
HEADS = (3, 3, 2)  # layers may differ
ROLES = [
    ("pronoun to noun", 1, 2, 0.97, 0.5, 128, 0.95, "pronouns right 0.97 -> 0.70"),
    ("object to verb", 2, 1, 0.92, 0.41, 70, None, None),
    ("previous token", 0, 1, 0.73, 0.1, 400, 0.71, None),
    ("previous token", 2, 0, 0.61, 0.1, 400, 0.6, None),
]


def chromium():
    found = os.environ.get("CLEARHEAD_CHROMIUM") or shutil.which("chromium")
    if found is None:
        pytest.fail(
            "the page is tested in a browser and there is no chromium; `apt-get install chromium` "
            "brings it, or CLEARHEAD_CHROMIUM names another",
            pytrace=False,
        )
    return found


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        # Containers seldom allow the sandbox, and the page is ours.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


def weights_of(L, heads, causal=True, peaked=2.0):
    """Random weights of one layer, its queries and its keys, (heads, L, L) and (heads, L, 8)."""
    q, k = torch.randn(2, heads, L, 8) * peaked
    scores = q @ k.transpose(1, 2) / 8**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    return scores.softmax(-1), q, k


def report_of(words=WORDS, heads=HEADS, full=None, exact=True, causal=True, special=()):
    """A Report on random heads; not exact: as if of a model so large that weights are packed."""
    text, offsets = "", []
    for word in words:
        start = len(text)
        text += (" " if text else "") + word
        offsets.append((start, len(text)))
    added = [i in special for i in range(len(words))]
    shape = (len(heads), max(heads)) if exact else (1000, 1000)
    report = Report(text, offsets, added, list(words), shape, full)
    given = []
    for layer, count in enumerate(heads):
        weights, q, k = weights_of(len(words), count, causal)
        report.take(layer, q, k, q + k, None)
        report.add(layer, weights)
        given.append(weights)
    return SimpleNamespace(report=report, given=given)


@pytest.fixture(scope="session")
def make():
    """make(words, ...) -> report, given weights, and the page's text."""

    def make(*args, roles=ROLES, title="a model", **kwargs):
        torch.manual_seed(0)
        made = report_of(*args, **kwargs)
        made.html = made.report.html(title, "3 layers", roles)
        return made

    return make


@pytest.fixture(scope="session")
def usual(make):
    return make()


class Guard:
    """Collects what must not happen; check() fails on it."""

    def __init__(self, page):
        self.found = []
        page.on("console", self.console)
        page.on("pageerror", lambda error: self.found.append(f"error: {error}"))
        page.on("request", self.request)
        page.add_init_script(
            "window.violations = []; document.addEventListener('securitypolicyviolation', "
            "(event) => window.violations.push(event.violatedDirective));"
        )
        self.page = page

    def console(self, message):
        # Reading pixels back is what the tests do, not the page.
        if "willReadFrequently" not in message.text:
            self.found.append(f"console: {message.text}")

    def request(self, request):
        if not request.url.startswith(("file:", "data:", "about:")):
            self.found.append(f"request: {request.url}")

    def check(self):
        self.found += self.page.evaluate("window.violations")
        assert self.found == []


@pytest.fixture
def show(browser, tmp_path):
    """show(html, hash, width=...) opens a page under the guard, which is checked at the end."""
    opened = []

    def show(html, hash="", width=1280, height=800, scheme="light", guarded=True, **options):
        file = tmp_path / f"page{len(opened)}.html"
        file.write_bytes(html.encode())
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **options
        )
        page = context.new_page()
        page.set_default_timeout(15_000)
        guard = Guard(page)
        opened.append((context, guard if guarded else None))
        page.goto(file.as_uri() + hash)
        page.guard = guard
        return page

    yield show
    for context, guard in opened:
        if guard is not None:
            guard.check()
        context.close()


@pytest.fixture(scope="session")
def walkthrough():
    from clearhead.inspection.trace import worked_example

    steps = worked_example(["the", "dog", "fetched", "the", "ball"])
    return SimpleNamespace(steps=steps, html=steps.to_html())


SCALES = {
    "light": ["#f6f5f1", "#cfe3d4", "#7dc0b4", "#35919c", "#2b5f93", "#2f2b6e", "#180f3d"],
    "dark": ["#171b22", "#25345e", "#1f5f8b", "#1d8f8f", "#4fba74", "#b5d94f", "#fdf29a"],
}


@pytest.fixture(scope="session")
def colours():
    """colours(parts, scheme): the colours (n, 3) of numbers from 0 to 1, rounded to 255 steps."""

    def colours(parts, scheme="light"):
        stops = torch.tensor(
            [[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in SCALES[scheme]],
            dtype=torch.float64,
        )
        way = (parts.double().flatten() * 255).round() / 255 * (len(stops) - 1)
        left = way.floor().clamp(max=len(stops) - 2).long()
        a, b = stops[left], stops[left + 1]
        return (a + (b - a) * (way - left)[:, None]).round().long()

    return colours
