"""The page of a real model on a text of some 460 tokens: its size, and how long one waits for it.

    python benchmarks/page.py            # needs clearhead[models,dev], the model and Chromium

Printed and, with --json FILE, kept: the size of the default page and of one with full maps, the
time to make each after the model has run, and in headless Chromium the first paint of the overview
and the time to switch heads, the median and the slowest of --heads switches between heads that were
not shown before. Exits with 1 where a bound is broken.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from clearhead import hf
from clearhead.inspection.report import Report

TEXT = """The old lighthouse keeper climbed the stairs every evening before the sun went down. His
daughter carried the oil, and together they watched the ships pass on their way to the harbour,
where lamps were lit one after another along the quay. In winter the wind came from the north and
shook the windows, and the keeper told her stories about the captains he had known. She listened,
and she remembered every name. One of them, a tall woman called Marta, had sailed around the world
twice before she was thirty. She had brought back a small brass compass, and when she grew old she
gave it to the keeper because he had once saved her crew from the rocks. The girl asked whether the
compass still worked. The keeper laughed, and he put it into her hand. The needle turned slowly,
trembled, and stopped. It pointed to the north, as it always had. "It knows only one thing," he
said, "but it knows that well." She kept the compass in her pocket from that day on. Years later the
girl became a captain herself. When the storm broke her mast near the same rocks, she took the
compass out, and she steered by it until the light of the old tower rose over the waves. The keeper
was waiting on the quay. He had not slept. When he saw his daughter, he said nothing, but he took
the compass from her hand, looked at it, and gave it back. The scientists who study memory say that
a story is easier to keep than a list. A list has no reason to continue; a story has people who want
something. The keeper had never read what the scientists wrote, but he knew it. He had kept the
names of forty ships in his head, and each of them was tied to a captain, a cargo, a night. The
girl, who had learned them all, taught them to her own children, and the children, who liked the
brass compass better than the names, learned them anyway. The old tower still stands, and the light
still turns. On clear nights it can be seen from the far side of the bay, where nobody alive
remembers who lit it first, and where the fishermen still count its turns on their way home."""

# What is measured: (unit, the most it may be).
BOUNDS = {
    "default page": ("MB", 3.0),
    "page with full maps": ("MB", 12.0),
    "making the default page": ("s", 10.0),
    "making the page with full maps": ("s", 10.0),
    "first paint of the overview": ("ms", 1000.0),
    "switching heads, median": ("ms", 50.0),
    "switching heads of full maps, median": ("ms", 50.0),
}


def made(model, tokenizer, full):
    """The page as text, and the seconds that it took beside the model's own."""
    tokens = hf.tokenize(model, tokenizer, TEXT)
    config = model.config.get_text_config()
    shape = config.num_hidden_layers, config.num_attention_heads
    report = Report(TEXT, tokens.offsets, tokens.special, tokens.texts, shape, full)
    layers = []
    hf.attentions(
        model,
        tokens,
        lambda layer, weights: layers[-1].append(weights.clone()),
        lambda layer, *inputs: layers.append([inputs]),
    )
    start = time.perf_counter()
    for layer, (inputs, weights) in enumerate(layers):
        report.take(layer, *inputs)
        report.add(layer, weights)
    text = report.html("SmolLM2-135M-Instruct", f"{len(tokens.texts)} tokens")
    return text, time.perf_counter() - start, len(tokens.texts)


def first_paint(browser, address):
    """Milliseconds from asking for the file to the first frame with the painted overview."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}#overview")
    page.wait_for_selector("#panel-overview[data-painted]")
    painted = page.evaluate("performance.getEntriesByName('overview painted')[0].startTime")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.close()
    return max(painted, paint)


def switches(browser, address, count):
    """Milliseconds from the key to the drawn map, for each of `count` heads not shown before."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}#head/0.0")
    page.wait_for_selector("canvas.heat[data-shown='0.0']")
    times = []
    for n in range(1, count + 1):
        layer, head = divmod(n, 9)
        before = page.evaluate("performance.now()")
        page.evaluate(f"location.hash = '#head/{layer}.{head}'")
        page.wait_for_selector(f"canvas.heat[data-shown='{layer}.{head}']")
        entry = page.evaluate(
            "(() => { const e = performance.getEntriesByName('head shown').at(-1); "
            "return [e.startTime, e.duration]; })()"
        )
        assert entry[0] >= before, "this is the time of another head"
        times.append(entry[1])
    page.close()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=60, help="how many heads to switch to")
    parser.add_argument("--json", help="keep the figures in this file")
    options = parser.parse_args()
    chromium = os.environ.get("CLEARHEAD_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no chromium; `apt-get install chromium` brings it")

    figures = {}
    model, tokenizer = hf.load()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        addresses = {}
        for full, name in ((None, "default page"), ("maps", "page with full maps")):
            text, seconds, tokens = made(model, tokenizer, full)
            file = Path(folder) / f"{full}.html"
            file.write_bytes(text.encode())
            figures[name] = len(text.encode()) / 1e6
            figures[f"making the {name}"] = seconds
            addresses[full] = file.as_uri()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        paints = [first_paint(browser, addresses[None]) for _ in range(5)]
        figures["first paint of the overview"] = statistics.median(paints)
        for full, name in ((None, ""), ("maps", " of full maps")):
            times = switches(browser, addresses[full], options.heads)
            figures[f"switching heads{name}, median"] = statistics.median(times)
            figures[f"switching heads{name}, slowest"] = max(times)
        version = browser.version
        browser.close()

    print(f"SmolLM2-135M, 30 x 9 heads, {tokens} tokens; Chromium {version}, headless")
    broken = False
    for name, value in figures.items():
        unit, most = BOUNDS.get(name, ("ms", None))
        over = most is not None and value > most
        broken |= over
        bound = "" if most is None else f"  at most {most:g} {unit}{'  BROKEN' if over else ''}"
        print(f"{name:40} {value:8.1f} {unit:2}{bound}")
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "chromium": version}
        kept = {"tokens": tokens, "machine": machine, "figures": figures}
        Path(options.json).write_text(json.dumps(kept, indent=1))
    sys.exit(broken)


if __name__ == "__main__":
    main()
