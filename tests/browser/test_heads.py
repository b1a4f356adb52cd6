"""Three heads, Overview, Head and Text in a browser, against the arrays that Python wrote."""

import math

import pytest
import torch

BENDS = {
    "linear": lambda w: w,
    "root": lambda w: w.sqrt(),
    "log": lambda w: (1 + w.clamp(min=1e-30).log2() / 10).clamp(min=0),
}
# The colour index of a weight may differ by one where float32 rounds otherwise in JavaScript.
NEAR = 3

CELLS = """(canvas) => {
  const dots = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const box = canvas.getBoundingClientRect();
  const margin = Math.min(120, Math.max(58, box.width * 0.16));
  const side = Math.min(box.width, box.height) - margin - 2;
  const found = [];
  for (let i = 0; i < SIZE; i++) for (let j = 0; j < SIZE; j++) {
    const x = Math.round(margin + (j + 0.5) * side / SIZE);
    const y = Math.round(margin + (i + 0.5) * side / SIZE);
    const at = 4 * (y * canvas.width + x);
    found.push(...dots.data.slice(at, at + 3));
  }
  return found;
}"""


def painted(page, L):
    """The colours (L * L, 3) in the middles of the cells of the map."""
    found = page.locator("canvas.heat").evaluate(CELLS.replace("SIZE", str(L)))
    return torch.tensor(found).view(-1, 3)


def assert_painted(page, expected):
    page.wait_for_function("document.querySelector('canvas.heat')?.dataset.shown")
    L = math.isqrt(len(expected))
    torch.testing.assert_close(painted(page, L), expected, atol=NEAR, rtol=0)


def test_thumbnails_have_the_colours_of_their_weights(show, usual, colours):
    page = show(usual.html, "#overview")
    page.wait_for_selector("#panel-overview[data-painted]")
    found = page.evaluate(
        """() => [...document.querySelectorAll(".cell canvas")].map((canvas) =>
          [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data])"""
    )
    small = usual.report.capture.small()
    assert len(found) == len(small) == 8
    for dots, weights in zip(found, small, strict=True):
        dots = torch.tensor(dots).view(-1, 4)[:, :3]
        expected = colours(weights.double().pow(1 / 3))
        torch.testing.assert_close(dots, expected, atol=NEAR, rtol=0)
    # And they are what the model had, up to the rounding of 63 levels.
    torch.testing.assert_close(torch.stack(small[:3]), usual.given[0], atol=2e-3, rtol=0.06)


def test_overview_shows_each_statistic(show, usual):
    page = show(usual.html, "#overview")
    statistics = usual.report.capture.data()["statistics"]
    assert set(statistics) == {
        *("entropy", "sink", "previous", "self", "distance", "max_logit"),
    }
    for name, values in statistics.items():
        page.click(f"#panel-overview [data-choice={name}]")
        shown = page.locator(".cell .figure").all_inner_texts()
        for text, value in zip(shown, values, strict=True):
            near = {"distance": 0.051, "max_logit": 0.51}.get(name, 0.0051)
            assert abs(float(text.replace("<", "")) - value) <= near + 0.005 * text.startswith("<")
            assert text


def test_overview_sorts_by_value(show, usual):
    page = show(usual.html, "#overview")
    page.click("[data-choice=previous]")
    page.click("[data-choice=value]")
    values = usual.report.capture.data()["statistics"]["previous"]
    names = [f"{layer}.{head}" for layer, n in enumerate((3, 3, 2)) for head in range(n)]
    expected = [names[n] for n in sorted(range(8), key=lambda n: -values[n])]
    assert page.locator(".grid .cell").evaluate_all("a => a.map(b => b.dataset.head)") == expected
    page.click("[data-choice=layer]")
    assert page.locator(".grid .cell").evaluate_all("a => a.map(b => b.dataset.head)") == names


def test_overview_shows_roles_and_opens_heads(show, usual):
    page = show(usual.html, "#overview")
    page.click("[data-choice=role]")
    assert page.locator(".cell[data-head='1.2'] .figure").inner_text() == "pron"
    assert page.locator(".cell[data-head='0.0'] .figure").inner_text() == ""
    assert page.locator(".legend li").count() == 3
    page.click(".cell[data-head='2.1']")
    assert page.evaluate("location.hash") == "#head/2.1"
    assert page.locator("#panel-head").is_visible()


@pytest.mark.parametrize("kind", ["all", "looks ahead", "top", "maps", "qk"])
def test_a_head_has_the_colours_of_its_weights(show, make, colours, kind):
    options = {
        "all": {},
        "looks ahead": {"causal": False},
        "top": {"exact": False},
        "maps": {"exact": False, "full": "maps"},
        "qk": {"exact": False, "full": "qk"},
    }[kind]
    words = [f"w{n}" for n in range(23)]
    made = make(words, **options)
    page = show(made.html, "#head/2.1", height=1100)
    weights = made.report.capture.map(2, 1)
    for scale, bent in BENDS.items():
        page.click(f"#panel-head [data-choice={scale}]")
        assert_painted(page, colours(bent(weights)))
    # What was packed is what the model had, up to what the form of packing gives away.
    away = {"all": 1e-4, "looks ahead": 1e-4, "top": 0.02, "maps": 0.06, "qk": 0.05}[kind]
    kept = weights > 0 if kind == "top" else weights >= 0
    given = made.given[2][1]
    torch.testing.assert_close(weights[kept], given[kept], atol=away, rtol=0)
    if kind == "top":
        strongest = given >= given.topk(8).values[:, -1:]
        assert torch.equal(kept, strongest & (given > 2**-12.02))
        assert "8 strongest" in page.locator("#panel-head .note").inner_text()


def test_a_dark_head_has_the_dark_colours(show, usual, colours):
    page = show(usual.html, "#head/0.0", scheme="dark", height=1100)
    weights = usual.report.capture.map(0, 0)
    assert_painted(page, colours(weights.sqrt(), "dark"))
    page.click(".theme")
    assert_painted(page, colours(weights.sqrt(), "light"))


def test_hiding_the_sink_scales_rows_up_and_says_so(show, usual, colours):
    page = show(usual.html, "#head/0.0", height=1100)
    page.check("input[type=checkbox]")
    weights = usual.report.capture.map(0, 0)
    left = weights[:, 1:]
    left = left / left.sum(1, keepdim=True).clamp(min=1e-12) * weights.sum(1, keepdim=True)
    page.wait_for_function("document.querySelector('canvas.heat').dataset.shown")
    L = len(weights)
    found = painted(page, L).view(L, L, 3)[:, 1:].reshape(-1, 3)
    torch.testing.assert_close(found, colours(left.sqrt()), atol=NEAR, rtol=0)
    note = page.locator("#panel-head .note").inner_text()
    assert "Left out: the first token" in note and "scaled" in note


def test_the_readout_tells_each_weight(show, usual):
    page = show(usual.html, "#head/1.1", height=1100)
    page.wait_for_function("document.querySelector('canvas.heat').dataset.shown")
    weights = usual.report.capture.map(1, 1)
    page.focus("canvas.heat")
    page.keyboard.press("ArrowRight")  # the first key comes to the first cell
    L = len(weights)
    for i in range(L):
        for j in range(L):
            text = page.locator(".readout .figure").inner_text()
            if j > i:
                assert text == "not to be seen"
            else:
                assert float(text) == pytest.approx(float(weights[i, j]), rel=6e-4)
            if j < L - 1:
                page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        for _ in range(L - 1):
            page.keyboard.press("ArrowLeft")


def test_the_map_zooms_pans_and_comes_back(show, usual, colours):
    page = show(usual.html, "#head/1.1", height=1100)
    page.wait_for_function("document.querySelector('canvas.heat').dataset.shown")
    weights = usual.report.capture.map(1, 1)
    whole = colours(weights.sqrt())
    for _ in range(4):
        page.click("[aria-label='Zoom in']")
    L = len(weights)
    assert (painted(page, L) - whole).abs().max() > NEAR
    box = page.locator("canvas.heat").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.4)
    before = page.locator(".readout").inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.8, steps=5)
    page.mouse.up()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.4)
    assert page.locator(".readout").inner_text() != before
    page.click("[aria-label='Show all']")
    page.mouse.move(1, 1)
    page.evaluate("document.activeElement.blur()")
    assert_painted(page, whole)


def tinted(page, side=0):
    """Which words are tinted, with the strength that the tint shows."""
    found = page.locator(".side").nth(side).locator(".piece[data-tinted]")
    pairs = found.evaluate_all(
        "a => a.map(b => [Number(b.dataset.token), parseFloat(b.style.getPropertyValue('--tint'))])"
    )
    return {token: (tint / 100) ** 2 for token, tint in pairs}


def largest(row, share):
    """Keys of a row, the largest weights first, until they have the share of it."""
    order = row.argsort(descending=True, stable=True).tolist()
    kept, total = [], 0.0
    while total < share - 1e-4 and order and row[order[0]] > 0:
        kept.append(order.pop(0))
        total += float(row[kept[-1]])
    return kept


def test_a_chosen_word_tints_what_it_looks_at(show, usual):
    page = show(usual.html, "#text/1.0")
    weights = usual.report.capture.map(1, 0)
    page.click(".side .piece[data-token='6']")
    for share in (50, 90):
        page.locator("input[type=range]").fill(str(share))
        expected = largest(weights[6], share / 100)
        found = tinted(page)
        assert set(found) == set(expected)
        for j in expected:
            assert found[j] == pytest.approx(float(weights[6, j]), abs=2e-3)
        links = page.locator(".side path").evaluate_all("a => a.map(b => b.dataset.link)")
        assert set(links) == {f"6 {j}" for j in expected if j != 6}
    page.click(".side .piece[data-token='6']")
    assert page.locator(".side path").count() == 0


def test_a_chosen_word_tints_what_looks_at_it(show, usual):
    page = show(usual.html, "#text/1.0")
    weights = usual.report.capture.map(1, 0)
    page.click(".side .piece[data-token='2']")
    page.click("[data-choice=in]")
    page.locator("input[type=range]").fill("100")
    found = tinted(page)
    expected = {i: float(weights[i, 2]) for i in range(12) if weights[i, 2] > 0}
    assert set(found) == set(expected)
    for i, weight in expected.items():
        assert found[i] == pytest.approx(weight, abs=2e-3)


def test_two_heads_stand_side_by_side_and_heads_are_averaged(show, usual):
    page = show(usual.html, "#text/1.0")
    page.click(".side .piece[data-token='9']")
    page.locator("input[type=range]").fill("100")
    page.get_by_label("Compare with").select_option("2.1")
    page.wait_for_selector(".side[data-heads='2.1']")
    other = usual.report.capture.map(2, 1)
    found = tinted(page, 1)
    for j in range(10):
        assert found[j] == pytest.approx(float(other[9, j]), abs=2e-3)
    page.get_by_label("Average with").select_option("0.2")
    page.wait_for_selector(".side[data-heads='1.0 0.2']")
    mean = (usual.report.capture.map(1, 0) + usual.report.capture.map(0, 2)) / 2
    page.wait_for_function("document.querySelector('.side').textContent.includes('Mean of heads')")
    found = tinted(page, 0)
    for j in range(10):
        assert found[j] == pytest.approx(float(mean[9, j]), abs=2e-3)
    page.click("[aria-label='Remove head 2.1']")
    page.wait_for_function("document.querySelector('.sides').dataset.sides === '1'")
    assert page.locator(".side:visible").count() == 1


def test_three_heads_are_the_best_of_their_roles(show, usual):
    page = show(usual.html)
    assert page.locator("#panel-three").is_visible()
    cards = page.locator(".card").all_inner_texts()
    assert [card.split("\n")[-1] for card in cards] == ["head 1.2", "head 2.1", "head 0.1"]
    for n, (layer, head) in enumerate([(1, 2), (2, 1), (0, 1)]):
        page.locator(".card").nth(n).click()
        weights = usual.report.capture.map(layer, head)
        page.hover(".piece[data-token='10']")
        page.wait_for_function("document.querySelector('.piece.chosen')?.dataset.token === '10'")
        links = page.locator("#panel-three path").evaluate_all("a => a.map(b => b.dataset.link)")
        expected = {f"10 {j}" for j in range(1, 11) if weights[10, j] >= 0.01}
        assert set(links) == expected
        assert "“ship” looks at" in page.locator("#panel-three .said").inner_text().replace(
            "\u2068", ""
        ).replace("\u2069", "")
        page.mouse.move(1, 1)
    text = page.locator(".proof").inner_text()
    assert "Where it fails" in text and "best simple rule" in text and ".10" in text


def test_roles_tell_what_was_measured_and_open_heads(show, usual):
    page = show(usual.html, "#roles")
    rows = page.locator(".roles tbody tr")
    assert rows.count() == 4
    cells = list(rows.nth(0).locator("th, td").all_inner_texts())
    assert cells == [
        *("pronoun to noun", "1.2", ".97", ".50", "128", ".95", "pronouns right 0.97 -> 0.70"),
    ]
    width = rows.nth(0).locator(".bar").evaluate("b => b.style.width")
    assert width == "97%"
    rows.nth(2).click()
    assert page.evaluate("location.hash") == "#head/0.1"


def test_without_roles_the_heads_that_stand_out_come_first(show, make):
    made = make(roles=())
    page = show(made.html)
    assert page.locator(".card").count() == 3
    assert "This text alone" in page.locator(".proof").inner_text()
    assert page.get_by_role("tab", name="Roles").count() == 0
