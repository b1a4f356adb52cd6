"""The walkthrough in a browser: every number of every step, and what lights up for it."""

import math

import pytest


def steps_of(page):
    return page.locator(".stepper button")


def shown(value):
    """A number as the page writes it."""
    if value == -math.inf:
        return "−∞"
    text = f"{abs(value):.2f}"
    return f"−{text}" if value < 0 and float(text) else text


def test_it_opens_at_the_steps_with_the_worked_example(show, walkthrough):
    page = show(walkthrough.html)
    assert page.locator("#panel-steps").is_visible()
    titles = [text.split("\n")[-1] for text in steps_of(page).all_inner_texts()]
    assert titles == [step.title for step in walkthrough.steps]
    assert page.get_by_role("tab").all_inner_texts() == ["Overview", "Head", "Text", "Steps"]


def test_each_step_shows_its_numbers_its_shape_and_its_code(show, walkthrough):
    page = show(walkthrough.html)
    for n, step in enumerate(walkthrough.steps):
        steps_of(page).nth(n).click()
        assert page.locator(".step-stage").get_attribute("data-step") == step.name
        assert page.locator(".step-stage code").inner_text().strip() == step.code
        assert step.explanation in page.locator(".step-stage header").inner_text()
        if not step.shape:
            assert page.locator(".scalar").inner_text() == f"{float(step.values):.1e}".replace(
                "e-0", "e-"
            ).replace("e+00", "e+0")
            continue
        size = " × ".join(f"{n} {axis}" for n, axis in zip(step.shape, step.axes, strict=True))
        assert size in page.locator(".what").inner_text()
        matrices = step.values.tolist() if step.per_head else [step.values.tolist()]
        tables = page.locator(".matrix.result")
        assert tables.count() == len(matrices)
        for table, matrix in zip(tables.all(), matrices, strict=True):
            found = table.locator("td[data-cell]").all_inner_texts()
            assert found == [shown(value) for row in matrix for value in row]


def lit(page, block, table):
    cells = page.locator(".block").nth(block).locator(".matrix").nth(table).locator("td.lit")
    return set(cells.evaluate_all("a => a.map(b => b.dataset.cell)"))


def test_a_number_lights_what_made_it(show, walkthrough):
    page = show(walkthrough.html, height=1400)
    names = [step.name for step in walkthrough.steps]

    def point(name, block, cell):
        steps_of(page).nth(names.index(name)).click()
        result = page.locator(".block").nth(block).locator(".result")
        result.locator(f"td[data-cell='{cell}']").hover()
        return page.locator(".arithmetic").inner_text()

    row = {f"3 {c}" for c in range(6)}
    text = point("queries", 0, "3 4")
    assert lit(page, 0, 0) == row and lit(page, 0, 1) == {f"{i} 4" for i in range(6)}
    x, made = (walkthrough.steps[names.index(n)].values for n in ("x", "queries"))
    w = walkthrough.steps.parameters["W_query"]
    terms = [(shown(float(a)), shown(float(b))) for a, b in zip(x[3], w[:, 4], strict=True)]
    for a, b in terms:
        for number in (a, b):
            assert (f"({number})" if number.startswith("−") else number) in text
    assert text.endswith(f"= {shown(float(made[3, 4]))}") and text.startswith("the, feature 5:")
    assert float(x[3] @ w[:, 4]) == pytest.approx(float(made[3, 4]), abs=1e-5)

    point("q", 1, "2 1")
    assert lit(page, 1, 0) == {"2 4"} and lit(page, 0, 0) == set()
    point("scores", 0, "4 2")
    assert lit(page, 0, 0) == {"4 0", "4 1", "4 2"} and lit(page, 0, 1) == {"0 2", "1 2", "2 2"}
    point("masked", 0, "1 2")
    assert lit(page, 0, 0) == {"1 2"}
    text = point("weights", 1, "2 0")
    assert lit(page, 1, 0) == {"2 0"} and lit(page, 1, 1) == {f"2 {j}" for j in range(5)}
    weights = walkthrough.steps[names.index("weights")].values
    assert text.endswith(f"= {shown(float(weights[1, 2, 0]))}")
    assert "exactly 0" in point("weights", 1, "2 4")
    point("context", 1, "4 1")
    assert lit(page, 1, 0) == {f"4 {j}" for j in range(5)}
    assert lit(page, 1, 1) == {f"{j} 1" for j in range(5)}
    assert "head 2" in point("recombined", 0, "3 5")
    assert (lit(page, 0, 0), lit(page, 0, 1)) == (set(), {"3 2"})
    point("output", 0, "0 0")
    assert lit(page, 0, 1) == {f"{i} 0" for i in range(6)}
    page.mouse.move(1, 1)
    assert page.locator("td.lit").count() == 0


def test_heads_keep_their_colours(show, walkthrough):
    page = show(walkthrough.html)
    names = [step.name for step in walkthrough.steps]
    steps_of(page).nth(names.index("scores")).click()
    edges = page.locator(".block").evaluate_all(
        "a => a.map(b => getComputedStyle(b).borderLeftColor)"
    )
    assert edges == ["rgb(37, 99, 235)", "rgb(15, 118, 110)"]  # blue, teal


def test_the_keys_step_through(show, walkthrough):
    page = show(walkthrough.html)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("[aria-current=step]").inner_text().split("\n")[-1] == "Keys"
    page.keyboard.press("ArrowLeft")
    assert page.locator(".step-stage").get_attribute("data-step") == "queries"
    page.get_by_role("button", name="Next").click()
    assert page.locator(".step-stage").get_attribute("data-step") == "keys"
    cell = page.locator(".result td[data-cell='0 0']")
    cell.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.cell") == "1 1"
    assert page.locator(".arithmetic").inner_text().startswith("dog, feature 2:")


def test_real_heads_are_shown_in_numbers_beside_the_example(show, usual):
    page = show(usual.html, "#steps", height=1400)
    assert page.locator(".step-stage").get_attribute("data-step") == "q"
    assert page.locator(".chips .chip").all_inner_texts() == ["head 1.2", "head 2.1", "head 0.1"]
    steps_of(page).nth(5).click()
    page.get_by_role("button", name="head 2.1").click()
    found = page.locator(".result td[data-cell]").all_inner_texts()
    assert found == [shown(value) for row in usual.given[2][1].tolist() for value in row]
    page.click("[data-choice='1']")
    assert steps_of(page).count() == 15


def test_a_wrapper_keeps_its_matrices_apart(show):
    import torch

    from clearhead import MultiHeadAttentionWrapper
    from clearhead.inspection.trace import trace

    steps = trace(MultiHeadAttentionWrapper(5, 3, 2, out_proj=False), torch.randn(4, 5))
    page = show(steps.to_html(), height=1400)
    steps_of(page).nth(1).click()
    block = page.locator(".block").nth(1)
    block.locator(".result td[data-cell='2 1']").hover()
    assert lit(page, 1, 1) == {f"{i} 1" for i in range(5)}
    found = block.locator(".matrix").nth(1).locator("td[data-cell]").all_inner_texts()
    expected = steps.parameters["W_query"][1].tolist()
    assert found == [shown(value) for row in expected for value in row]


def test_a_call_inside_a_model_says_its_own_arithmetic(show):
    import torch

    import clearhead

    q, k, v = torch.randn(3, 2, 2, 5, 3)
    rules = {"window": (2, 1), "sinks": torch.randn(2), "scale": 0.7}
    steps = clearhead.trace(lambda: clearhead.attention(q, k, v, **rules), heads=[1])
    page = show(steps.to_html(), height=1400)
    names = [step.name for step in steps]
    assert names == ["q", "k", "v", "scores", "scaled", "masked", "weights", "context"]
    values = {step.name: step.values for step in steps}

    def point(name, cell):
        steps_of(page).nth(names.index(name)).click()
        page.locator(f".block .result td[data-cell='{cell}']").hover()
        return page.locator(".arithmetic").inner_text()

    before, after = (shown(float(values[name][0, 3, 2])) for name in ("scores", "scaled"))
    assert point("scaled", "3 2") == f"4, 3: {before} becomes {after}"
    assert point("masked", "3 2") == f"4, 3: {after}, taken over unchanged"
    text = point("weights", "3 2")
    assert "√" not in text and text.count("e^") == 4 + 2 and "+ e^sink)" in text
    assert lit(page, 0, 0) == {f"3 {c}" for c in range(5)}
    assert "softmax(Sₕ), row by row" in page.locator(".step-stage").inner_text()
    assert page.get_by_text("head 1", exact=True).count() >= 1
