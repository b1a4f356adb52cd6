"""The page as a page: its policy, hostile tokens, address, keys, sizes, themes, print, a frame."""

import re

import pytest
from playwright.sync_api import Error

from clearhead.view import page as pages

PANELS = ("three", "overview", "head", "text", "steps", "roles")

HOSTILE = [
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=2>",
    "\"'`><b>bold</b>&amp;&lt;",
    "<!--",
    "]]>",
    "\u202eright to left\u202c",
    "שלום",
    "مرحبا",
    "👩\u200d👩\u200d👧",
    "🏳️\u200d🌈",
    "zero\u200bwidth\ufeff",
    "\u2028\u2029",
    "line\nbreak",
    "\x00\x07\x1b[31m",
    "x" * 10_000,
    "{{constructor}}",
    "\ud800",
    "javascript:alert(1)",
]


def tree(page):
    """The names of all elements with how many there are of each."""
    return page.evaluate(
        "() => Object.entries(Object.groupBy([...document.querySelectorAll('*')], "
        "(e) => e.localName)).map(([name, all]) => [name, all.length]).sort()"
    )


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_opens_without_a_complaint(show, usual, panel):
    page = show(usual.html, f"#{panel}/1.1")
    assert page.locator(f"#panel-{panel}").is_visible()
    assert page.get_by_role("tab", selected=True).get_attribute("id") == f"tab-{panel}"
    assert page.locator("[role=tabpanel]:visible").count() == 1
    assert page.title() == "a model: clearhead"


def test_the_guard_sees_what_is_forbidden(show, usual):
    page = show(usual.html, guarded=False)
    page.evaluate("document.body.append(document.createElement('img')); "
                  "document.body.lastChild.src = 'http://localhost:9/x.png'")  # fmt: skip
    page.evaluate(
        "() => { const s = document.createElement('style'); s.textContent = 'b{}'; "
        "document.head.append(s); }"
    )
    page.wait_for_function("window.violations.length >= 2")
    with pytest.raises(AssertionError, match="img-src"):
        page.guard.check()
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>bold</b>'")
    with pytest.raises(Error, match="TrustedScript"):
        page.evaluate("() => { const s = document.createElement('script'); s.text = '1'; }")


def test_the_policy_allows_one_script_and_one_style(usual):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', usual.html)[1]
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert policy.startswith("default-src &#x27;none&#x27;;")
    assert len(re.findall(r"sha256-[\w+/]{43}=", policy)) == 2
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", usual.html)
    executed = re.findall(r"<script(?![^>]*type=)[^>]*>", usual.html)
    assert executed == ["<script>"]


@pytest.mark.parametrize("width", [380, 1280])
def test_tokens_never_become_markup(show, make, width):
    tame = make([f"word{n}" for n in range(len(HOSTILE))], roles=[], title="a model")
    made = make(HOSTILE, roles=[], title="</title><script>window.hacked=3</script>")
    for panel in ("three", "overview", "head", "text", "steps"):
        page = show(made.html, f"#{panel}/0.0", width=width)
        other = show(tame.html, f"#{panel}/0.0", width=width)
        page.wait_for_timeout(100)
        assert page.evaluate("window.hacked") is None
        odd = {"svg", "path", "circle", "br"}
        elements = [pair for pair in tree(page) if pair[0] not in odd]
        assert elements == [pair for pair in tree(other) if pair[0] not in odd]
        assert overflow(page) <= 0
    page.get_by_role("tab", name="Text").click()
    shown = page.locator("#panel-text .piece").all_inner_texts()
    assert shown[0] == HOSTILE[0] and shown[1] == HOSTILE[1] and shown[2] == HOSTILE[2]
    assert shown[5] == "⟨202E⟩right to left⟨202C⟩"
    assert shown[6:8] == ["שלום", "مرحبا"]
    assert shown[8] == HOSTILE[8] and shown[9] == HOSTILE[9]
    assert shown[10] == "zero⟨200B⟩width⟨FEFF⟩"
    assert "⟨2028⟩" in shown[11] and "⏎" in shown[12] and "⟨001B⟩" in shown[13]
    assert len(shown[14]) == 48 and shown[14].endswith("…")
    assert "⟨D800⟩" in shown[16]
    page.click(".side:visible .piece[data-token='8']")
    assert HOSTILE[8] in page.locator(".side .said").first.inner_text()


def test_text_from_right_to_left_runs_from_right_to_left(show, make):
    made = make(["الملك", "شكر", "الملكة", "لأنها", "أنقذت", "السفينة"], roles=[])
    page = show(made.html, "#text/0.0")
    lefts = page.locator("#panel-text .piece").evaluate_all(
        "a => a.slice(0, 6).map(b => b.getBoundingClientRect().left)"
    )
    assert lefts == sorted(lefts, reverse=True)


def test_the_address_keeps_panel_and_head(show, usual):
    page = show(usual.html)
    page.click("#tab-head")
    assert page.evaluate("location.hash") == "#head/1.2"  # of the first of the three
    page.keyboard.press("ArrowLeft")  # the tab has the focus: to the panel before
    assert page.evaluate("location.hash") == "#overview/1.2"
    page.keyboard.press("ArrowRight")
    page.evaluate("document.activeElement.blur()")
    for key, place in [
        ("ArrowLeft", "1.1"),
        ("ArrowDown", "2.1"),
        ("ArrowRight", "2.1"),  # layer 2 has two heads
        ("ArrowUp", "1.1"),
        ("ArrowRight", "1.2"),
        ("ArrowDown", "2.1"),
        ("ArrowDown", "2.1"),
    ]:
        page.keyboard.press(key)
        assert page.evaluate("location.hash") == f"#head/{place}"
        page.wait_for_selector(f"canvas.heat[data-shown='{place}']")
        assert page.get_by_role("combobox", name="Layer").first.input_value() == place[0]
    page.evaluate("location.hash = '#text/0.2'")
    page.wait_for_selector("#panel-text:visible .side[data-heads='0.2']")
    page.keyboard.press("2")
    assert page.evaluate("location.hash") == "#overview/0.2"


@pytest.mark.parametrize(
    ("given", "panel", "head"),
    [
        ("#head/99.99", "head", "2.1"),
        ("#nonsense/1.1", "three", "1.1"),
        ("#text", "text", "1.2"),
        ("#<b>", "three", "1.2"),
    ],
)
def test_a_wrong_address_leads_to_the_nearest_right_one(show, usual, given, panel, head):
    page = show(usual.html, given)
    assert page.locator(f"#panel-{panel}").is_visible()
    page.click("#tab-head")
    page.wait_for_selector(f"canvas.heat[data-shown='{head}']")


def test_the_picker_leads_to_heads(show, usual):
    page = show(usual.html, "#head/0.0")
    page.get_by_role("combobox", name="Layer").first.select_option("2")
    page.wait_for_selector("canvas.heat[data-shown='2.0']")
    page.get_by_role("button", name="Next head").first.click()
    page.wait_for_selector("canvas.heat[data-shown='2.1']")
    assert "object to verb" in page.locator("#panel-head .badges").inner_text()
    assert (
        page.get_by_role("combobox", name="Head").first.locator("option:not([hidden])").count() == 2
    )


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


CLIPPED = """() => [...document.querySelectorAll(
    "button, h1, h2, h3, h4, th, dt, dd, p, li, .badge, .chip, .figure")]
  .filter((e) => e.checkVisibility() && !e.closest("canvas, .holder, .stepper, #tabs, .cell"))
  .filter((e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline")
  .map((e) => `${e.localName}.${e.className}: ${e.textContent.slice(0, 40)}`)"""

OVERLAPPING = """() => {
  const some = "main button, main select, main input, main h2, main p";
  const inside = ".cell, .holder, .stepper, .words, .arithmetic";
  const all = [...document.querySelectorAll(some)]
    .filter((e) => e.checkVisibility() && !e.closest(inside));
  const boxes = all.map((e) => [e, e.getBoundingClientRect()]).filter(([, b]) => b.width);
  const found = [];
  boxes.forEach(([e, a], n) => boxes.slice(n + 1).forEach(([f, b]) => {
    if (e.contains(f) || f.contains(e)) return;
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 1 && y > 1) found.push(`${e.textContent} / ${f.textContent}`.slice(0, 90));
  }));
  return found;
}"""


@pytest.mark.parametrize("width", [380, 768, 1280, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_clipped_or_overlaps(show, usual, width, scheme):
    page = show(usual.html, width=width, scheme=scheme, height=900)
    for panel in PANELS:
        page.click(f"#tab-{panel}")
        page.wait_for_timeout(60)
        assert overflow(page) <= 0, panel
        assert page.evaluate(CLIPPED) == [], panel
        assert page.evaluate(OVERLAPPING) == [], panel


CONTRAST = """() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    const box = document.createElement("i");
    box.style.color = colour;
    document.body.append(box);
    probe.fillStyle = getComputedStyle(box).color;
    box.remove();
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map((v) => {
      v /= 255;
      return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {};
  for (const front of ["ink", "quiet", ...Array.from({ length: 7 }, (_, n) => `head-${n}`)]) {
    for (const back of ["paper", "card"]) {
      const [a, b] = [front, back].map((name) => light(`var(--${name})`)).sort((x, y) => y - x);
      found[`${front} on ${back}`] = (a + 0.05) / (b + 0.05);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_stand_out_from_their_ground(show, usual, scheme):
    contrasts = show(usual.html, scheme=scheme).evaluate(CONTRAST)
    assert {pair: value for pair, value in contrasts.items() if value < 4.5} == {}
    assert len(contrasts) == 18


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_scale_of_weights_is_ordered_by_lightness_alone(show, usual, scheme):
    page = show(usual.html, "#head/0.0", scheme=scheme)
    page.click("[data-choice=linear]")
    dots = page.locator("canvas.key").evaluate(
        "c => [...c.getContext('2d').getImageData(0, 0, 256, 1).data]"
    )
    light = [
        0.2126 * dots[n] ** 2.2 + 0.7152 * dots[n + 1] ** 2.2 + 0.0722 * dots[n + 2] ** 2.2
        for n in range(0, len(dots), 4)
    ]
    assert light == sorted(light, reverse=scheme == "light")


def test_the_theme_can_be_switched(show, usual):
    page = show(usual.html)
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(paper) == "rgb(251, 250, 247)"
    page.get_by_role("button", name="Switch to dark colours").click()
    assert page.evaluate(paper) == "rgb(17, 20, 26)"
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate(paper) == "rgb(251, 250, 247)"


def test_less_motion_is_no_motion(show, usual):
    time = "getComputedStyle(document.querySelector('.piece')).transitionDuration"
    assert show(usual.html, reduced_motion="reduce").evaluate(time) == "0s"
    assert show(usual.html, reduced_motion="no-preference").evaluate(time) != "0s"


def test_everything_that_can_be_used_has_a_name_and_shows_the_focus(show, usual):
    page = show(usual.html)
    for panel in PANELS:
        page.click(f"#tab-{panel}")
        for role in ("button", "combobox", "slider", "checkbox", "tab", "application", "table"):
            for element in page.get_by_role(role).all()[:40]:
                assert element.aria_snapshot().count('"') >= 2 or role == "table", (panel, role)
    page.click("#tab-overview")
    page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate("document.activeElement.textContent") == "Thumbnails"
    assert page.evaluate(outline) == "solid"
    page.focus(".cell[tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Layer")
    page.keyboard.press("Enter")
    assert page.locator("#panel-head").is_visible()


def test_words_are_reached_by_the_keyboard(show, usual):
    page = show(usual.html, "#text/0.0")
    page.focus("#panel-text .piece[tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.token") == "3"
    page.keyboard.press("Enter")
    assert page.locator("#panel-text .piece.chosen").get_attribute("data-token") == "3"
    assert page.locator("#panel-text .piece[aria-pressed=true]").count() == 1
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.token") == "11"
    assert page.evaluate("location.hash") == "#text/0.0"


def test_print_leaves_the_controls_out_and_is_light(show, usual):
    page = show(usual.html, "#head/0.0", scheme="dark")
    page.emulate_media(media="print")
    for part in ("#tabs", "#keys", ".theme", ".bar-of-controls"):
        assert not page.locator(f"{part} >> nth=0").is_visible()
    assert page.locator("canvas.heat").is_visible()
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 34, 48)"
    assert page.pdf()[:4] == b"%PDF"


def test_without_scripts_it_says_what_is_missing(show, usual):
    page = show(usual.html, java_script_enabled=False, guarded=False)
    assert "draws its numbers with a script" in page.locator("main").inner_text()


def test_it_runs_in_the_frame_of_a_notebook(show, walkthrough, usual):
    for html in (walkthrough.steps._repr_html_(), pages.frame(usual.html)):
        page = show(f"<!doctype html><body>{html}</body>")
        frame = page.frame_locator("iframe")
        frame.locator("#tab-head").click()
        frame.locator("canvas.heat[data-shown]").wait_for()
        frame.locator(".theme").click()
        assert frame.locator("[role=tabpanel]:visible").count() == 1
