"Charts: any data gives labelled Axes, shown once by a notebook, and an SVG that is well-formed."

import io
import math
import os
import subprocess
import sys
import threading
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from support.processes import ROOT

from trainkit.charts import (
    INK,
    bars,
    caption,
    curves,
    draw_svg,
    flow,
    heatmap,
    thin,
    to_svg,
)
from trainkit.display import grid

anything = st.floats(allow_nan=True, allow_infinity=True)
texts = st.text(st.characters(codec=None), max_size=20)


def well_formed(ax) -> ElementTree.Element:
    tree = ElementTree.fromstring(str(to_svg(ax)))
    assert tree.attrib["aria-label"] and tree.attrib["role"] == "img"
    return tree


def finite(*values) -> bool:
    return all(math.isfinite(v) for v in values)


@pytest.mark.filterwarnings("ignore:Glyph")
@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(texts, st.lists(anything, max_size=30), max_size=8),
    texts,
    st.booleans(),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_curves_take_anything(series, title, log_y, smooth):
    ax = curves(series, title, log_y=log_y, smooth=smooth)
    assert finite(*ax.get_xlim(), *ax.get_ylim())
    if ax.get_legend():  # There is something to draw: a line for each series
        named = [line for line in ax.get_lines() if line.get_alpha() is None]
        assert len(named) == len(series) == len(ax.get_legend().get_texts())
    well_formed(ax)


@pytest.mark.filterwarnings("ignore:Glyph")
@settings(max_examples=25, deadline=None)
@given(st.dictionaries(texts, st.one_of(st.none(), anything), max_size=8), texts)
def test_bars_take_anything(values, title):
    ax = bars(values, title)
    low, high = ax.get_xlim()
    assert len(ax.patches) == len(values)
    for bar in ax.patches:
        assert low <= bar.get_x() <= bar.get_x() + bar.get_width() <= high or bar.get_width() < 0
    well_formed(ax)


@pytest.mark.filterwarnings("ignore:Glyph")
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda w: st.lists(st.lists(anything, min_size=w, max_size=w), max_size=8)
    ),
    texts,
)
def test_heatmap_takes_anything(matrix, title):
    ax = heatmap(matrix, title=title)
    for image in ax.images:
        assert image.get_array().shape == (len(matrix), len(matrix[0]))
    well_formed(ax)


@settings(max_examples=200, deadline=None)
@given(st.lists(anything, max_size=3000), st.integers(4, 600))
def test_thin_keeps_ends_and_extremes(values, limit):
    points = list(enumerate(values))
    thinned = thin(points, limit)
    assert len(thinned) <= max(limit, 4)
    assert [x for x, _ in thinned] == sorted({x for x, _ in thinned})
    if points:
        assert thinned[0][0] == 0 and thinned[-1][0] == len(points) - 1
        real = [y for y in values if math.isfinite(y)]
        if real:
            assert max(real) == max(y for _, y in thinned if math.isfinite(y))


def test_every_point_that_is_drawn_is_one_of_the_data():
    values = [3 * math.exp(-i / 900) for i in range(20_000)]
    (line,) = curves({"loss": values}, "Loss").get_lines()
    xs, ys = line.get_xdata(), line.get_ydata()
    assert len(xs) <= 512 and xs[0] == 0 and xs[-1] == 19_999
    assert all(values[int(x)] == y for x, y in zip(xs, ys, strict=True))


def test_axes_that_are_given_are_drawn_into_and_returned():
    figure = Figure()
    for ax, draw in zip(
        figure.subplots(2, 2).flat,
        (
            lambda ax: curves({"a": [1, 2]}, "A", ax=ax),
            lambda ax: bars({"a": 1}, "B", ax=ax),
            lambda ax: heatmap([[1, -1]], title="C", ax=ax),
            lambda ax: flow([["a", "b"]], title="D", ax=ax),
        ),
        strict=True,
    ):
        assert not ax.has_data() and draw(ax) is ax and (ax.has_data() or ax.patches)
    label = to_svg(ax).label
    assert [part.split(":")[0] for part in label.split("; ")] == ["A", "B", "C", "D"]


def test_two_charts_in_one_axes_are_both_described():
    ax = curves({"b": [2, 1]}, ax=curves({"a": [1, 2]}))
    assert caption(ax) == "a from 1 at step 0 to 2 at step 1; b from 2 at step 0 to 1 at step 1"


def test_the_same_numbers_are_the_same_svg():
    first, second = (draw_svg(curves, {"a": [1, 2, 3]}, "Loss") for _ in range(2))
    assert first == second and "date" not in first.lower() and "matplotlib" not in first.lower()
    assert INK not in first and "currentColor" in first


def test_text_is_text_and_not_a_formula():
    picture = draw_svg(bars, {"costs $5, or $6": 1.0}, "$x$ & <b>")
    words = "".join(ElementTree.fromstring(str(picture)).itertext())
    assert "costs $5, or $6" in words and "$x$ & <b>" in words


def test_two_pictures_in_a_page_share_no_id_that_differs():
    pictures = [draw_svg(curves, {"a": range(n)}, f"Picture {n}") for n in (3, 50)]
    ids = [
        {node.attrib["id"]: ElementTree.tostring(node) for node in ElementTree.fromstring(p).iter()
         if "id" in node.attrib}
        for p in pictures
    ]  # fmt: skip
    assert all(ids[0][name] == ids[1][name] for name in ids[0].keys() & ids[1].keys())


def test_a_picture_is_small():
    series = {name: [3 * math.exp(-i / 9000) for i in range(512)] for name in ("train", "eval")}
    assert len(draw_svg(curves, series, "Loss")) < 20_000
    file = io.BytesIO()
    curves(series, "Loss").figure.savefig(file, format="png")
    assert len(file.getvalue()) < 25_000


def test_the_settings_of_matplotlib_stay():
    import matplotlib

    before = dict(matplotlib.rcParams)
    threads = [threading.Thread(target=lambda: draw_svg(bars, {"a": 1.0})) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(matplotlib.rcParams) == before


def test_one_style_sheet():
    "The colours of the palette, and an ink that is legible on white and on black."
    from matplotlib import rc_params_from_file

    from trainkit.display import PALETTE

    style = rc_params_from_file(ROOT / "trainkit/charts.mplstyle", use_default_template=False)
    colours = style["axes.prop_cycle"].by_key()["color"]
    assert tuple(f"#{c}".replace("##", "#") for c in colours) == PALETTE
    assert "#" + style["text.color"].strip("#") == INK
    light = [int(INK[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [((c + 0.055) / 1.055) ** 2.4 for c in light]
    shine = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert 1.05 / (shine + 0.05) >= 4.5 and (shine + 0.05) / 0.05 >= 4.5


def test_a_script_opens_no_window():
    code = (
        "import sys; from trainkit import charts; assert 'matplotlib' not in sys.modules; "
        "charts.curves({'a': [1, 2]}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


CELLS = {  # Code, and how many pictures the notebook shows below it
    "from trainkit.charts import *": 0,
    "curves({'a': [1, 2]})": 1,
    "ax = bars({'a': 1})": 1,
    "ax": 0,
    "heatmap([[1, 2]]), flow([['a', 'b']]);": 2,
    "picture = draw_svg(curves, {'a': [1, 2]})": 0,
    "ax = curves({'a': [2, 1]}, ax=curves({'b': [1, 2]}))": 1,
    "import threading; t = threading.Thread(target=bars, args=({'a': 1},)); t.start(); t.join()": 0,
    "import matplotlib.pyplot as plt; assert plt.get_fignums() == []": 0,
}
NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
for code in sys.stdin.read().splitlines():
    with capture_output() as captured:
        shell.run_cell(code).raise_error()
    print(sum("image/png" in output.data for output in captured.outputs))
"""


def test_a_notebook_shows_each_picture_once():
    "The backend of a kernel is named in its environment, and loaded by the first figure."
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        input="\n".join(CELLS),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
    )
    assert done.returncode == 0, done.stderr
    assert dict(zip(CELLS, map(int, done.stdout.split()), strict=True)) == CELLS


CHARTS = {
    "loss": lambda: curves(
        {"train": [10 / (1 + i) for i in range(500)], "eval": ([0, 100, 400], [9, 3, 1])},
        "Loss",
        y_label="nats a token",
    ),
    "large": lambda: curves({"tokens a second": [812_345 + i for i in range(100)]}, "Speed"),
    "tiny": lambda: curves({"rate": [1e-5 * i for i in range(100)]}, "Rate"),
    "log": lambda: curves({"rate": [10**-i for i in range(9)]}, "Rate", log_y=True),
    "many": lambda: curves({f"a series called {i}": [i, i + 1] for i in range(9)}, "Many"),
    "one": lambda: curves({"a": [-123456.789]}, "One"),
    "steps": lambda: curves({"a": (range(1_000_000, 1_000_100), range(100))}, "Far on"),
    "bars": lambda: bars(
        {
            "unigram": 4.3,
            "a name that is far too long for the room it has here": -2.25,
            "none": None,
            "best": 1e9,
        },
        "Bars with a title that does not fit into one line above the chart that it belongs to",
        unit="bits",
    ),
    "map": lambda: heatmap(
        [[i * j for j in range(12)] for i in range(12)],
        [f" word{i}" for i in range(12)],
        [f" a-longer-word{i}" for i in range(12)],
        "Map",
    ),
    "wide map": lambda: heatmap(
        [[i - j for j in range(64)] for i in range(16)], columns=[f" column{i}" for i in range(64)]
    ),
    "flow": lambda: flow([["a", "b"], [None, "c"]], [("a", "b"), ("b", "c", "now and then")]),
}


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 420])
def test_words_stay_inside_the_frame(browser, width):
    page = browser.new_page(viewport=dict(width=width, height=900))
    page.set_content(
        '<meta name="viewport" content="width=device-width"><body>'
        + grid(*(draw_svg(make) for make in CHARTS.values()))
    )
    outside = page.evaluate("""[...document.querySelectorAll('svg text')].map(t => {
        const a = t.getBoundingClientRect(), b = t.closest('svg').getBoundingClientRect()
        const sideways = Math.max(b.left - a.left, a.right - b.right)
        return [t.textContent, Math.max(sideways, b.top - a.top, a.bottom - b.bottom)]
    }).filter(([_, distance]) => distance > 2.5)""")
    assert outside == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_image_brings_colours_along(browser, scheme):
    "In a file, without a page's `currentColor`, text is readable on light and dark pages."
    page = browser.new_page(viewport=dict(width=520, height=300), color_scheme=scheme)
    page.set_content(
        "<style>:root{color-scheme:light dark}body{margin:0}</style>"
        + draw_svg(curves, {"a": [1, 2, 3]}, "Title").image()
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


@pytest.mark.parametrize("n", range(1, 37, 5))
def test_a_name_that_has_room_is_whole(n):
    (name,) = bars({"x" * n: 1.0}).get_yticklabels()
    assert name.get_text() == "x" * n
