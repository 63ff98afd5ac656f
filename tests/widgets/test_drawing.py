"Live charts: any data gives a small, labelled, well-formed picture with every word in its frame."

import math
import random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.display import grid, table, token_boxes
from trainkit.widgets.drawing import live_bars, live_curves, live_heatmap, tick_labels, ticks

anything = st.floats(allow_nan=True, allow_infinity=True)
texts = st.text(st.characters(codec=None), max_size=20)


def well_formed(picture) -> ElementTree.Element:
    tree = ElementTree.fromstring(str(picture))
    assert tree.attrib["aria-label"]
    assert tree.attrib["role"] in ("img", "group", "region")
    return tree


def coordinates(picture) -> list[float]:
    "All numbers of all paths and circles."
    tree, numbers = well_formed(picture), []
    for node in tree.iter():
        if node.tag.endswith("path"):
            numbers += [
                float(n)
                for n in "".join(
                    c if c in "-.0123456789" else " " for c in node.attrib["d"]
                ).split()
            ]
        if node.tag.endswith("circle"):
            numbers += [float(node.attrib["cx"]), float(node.attrib["cy"])]
    return numbers


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(texts, st.lists(anything, max_size=30), max_size=8),
    texts,
    st.booleans(),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_curves_take_anything(series, title, log_y, smooth):
    picture = live_curves(series, title, log_y=log_y, smooth=smooth)
    assert all(math.isfinite(n) and -1 <= n <= 481 for n in coordinates(picture))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(texts, st.one_of(st.none(), anything), max_size=8), texts)
def test_bars_take_anything(values, title):
    tree = well_formed(live_bars(values, title))
    for node in tree.iter("{http://www.w3.org/2000/svg}rect"):
        x, width = float(node.attrib["x"]), float(node.attrib["width"])
        assert -1 <= x and x + width <= 481 and width > 0


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda w: st.lists(st.lists(anything, min_size=w, max_size=w), max_size=8)
    ),
    texts,
)
def test_heatmap_takes_anything(matrix, title):
    well_formed(live_heatmap(matrix, title=title))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(texts, st.binary(max_size=8)), max_size=30), texts)
def test_tokens_and_tables_take_anything(pieces, title):
    tree = well_formed(token_boxes(pieces, title=title))
    assert sum(1 for _ in tree.iter("span")) == len(pieces)
    well_formed(table([{str(p): p} for p in pieces], title))


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_and_told_apart(low, size):
    high = low + size
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 11
    assert all(low - 1e-6 * size <= m <= high + 1e-6 * size for m in marks)
    assert len(set(tick_labels(marks))) == len(marks)


def test_a_refresh_is_small():
    draw = random.Random(0)
    series = {
        name: [3 * math.exp(-i / 9000) + draw.gauss(0, 0.2) for i in range(512)]
        for name in ("train", "eval")
    }
    assert len(live_curves(series, "Loss")) < 18_000  # two full series


CHARTS = {
    "loss": lambda: live_curves(
        {"train": [10 / (1 + i) for i in range(500)], "eval": ([0, 100, 400], [9, 3, 1])},
        "Loss",
        y_label="nats a token",
    ),
    "large": lambda: live_curves({"tokens a second": [812_345 + i for i in range(100)]}, "Speed"),
    "tiny": lambda: live_curves({"rate": [1e-5 * i for i in range(100)]}, "Rate"),
    "log": lambda: live_curves({"rate": [10**-i for i in range(9)]}, "Rate", log_y=True),
    "many": lambda: live_curves({f"a series called {i}": [i, i + 1] for i in range(9)}, "Many"),
    "one": lambda: live_curves({"a": [-123456.789]}, "One"),
    "steps": lambda: live_curves({"a": (range(1_000_000, 1_000_100), range(100))}, "Far on"),
    "bars": lambda: live_bars(
        {
            "unigram": 4.3,
            "a name that is far too long for the room it has here": -2.25,
            "none": None,
            "best": 1e9,
        },
        "Bars",
        unit="bits",
    ),
    "map": lambda: live_heatmap(
        [[i * j for j in range(12)] for i in range(12)],
        [f" word{i}" for i in range(12)],
        [f" a-longer-word{i}" for i in range(12)],
        "Map",
    ),
    "wide map": lambda: live_heatmap(
        [[i - j for j in range(64)] for i in range(16)], columns=[f" column{i}" for i in range(64)]
    ),
}


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 420])
def test_words_stay_inside_the_frame(browser, width):
    page = browser.new_page(viewport=dict(width=width, height=900))
    page.set_content(
        '<meta name="viewport" content="width=device-width"><body>'
        + grid(*(make() for make in CHARTS.values()))
    )
    outside = page.evaluate("""[...document.querySelectorAll('svg text')].map(t => {
        const a = t.getBoundingClientRect(), b = t.closest('svg').getBoundingClientRect()
        const sideways = Math.max(b.left - a.left, a.right - b.right)
        return [t.textContent, Math.max(sideways, b.top - a.top, a.bottom - b.bottom)]
    }).filter(([_, distance]) => distance > 1.5)""")
    assert outside == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_image_brings_colours_along(browser, scheme):
    "In a file, without a page's `currentColor`, text is readable on light and dark pages."
    page = browser.new_page(viewport=dict(width=520, height=300), color_scheme=scheme)
    page.set_content(
        "<style>:root{color-scheme:light dark}body{margin:0}</style>"
        + live_curves({"a": [1, 2, 3]}, "Title").image()
    )
    shade = page.evaluate("""async () => {
        const img = document.querySelector('img'); await img.decode()
        const c = document.createElement('canvas'); c.width = 480; c.height = 260
        const g = c.getContext('2d'); g.drawImage(img, 0, 0, 480, 260)
        const d = g.getImageData(0, 0, 60, 18).data, ink = []
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) ink.push(d[i])
        return ink.reduce((a, b) => a + b, 0) / ink.length
    }""")
    assert shade > 180 if scheme == "dark" else shade < 80


@pytest.mark.parametrize("n", range(1, 40))
def test_a_name_that_has_room_is_whole(n):
    assert "x" * n in live_bars({"x" * n: 1.0}, width=900) and "…" not in live_bars(
        {"x" * n: 1.0}, width=900
    )
