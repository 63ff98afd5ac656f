"""The pictures of widgets, number by number, compared with tests/snapshots/pictures.txt.

Their inputs are exact numbers, so each machine draws the same. SNAPSHOTS=write renews the file.
"""

import math
from itertools import product

import numpy as np
import pytest
from pytest import approx
import torch
from support.snapshots import compare

from trainkit.display import grid
from trainkit.widgets import drawing, explorer, model_explorers, session
from trainkit.widgets import text_explorers, training_explorers, weight_explorers

NAN, INF = math.nan, math.inf
SERIES = {"train": [4, 3, 2.25, 2.5, 1], "eval": ([0, 2, 4], [4.5, 3, 1.5])}
WEIGHTS = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0.0625, 0.4375, 0.5]])
BOOK = torch.linspace(-1, 1, 9)
SCALED = torch.tensor([-1, -0.75, -0.5, -0.5, 0, 0, 0, 0.25, 0.625, 1])

PICTURES = {
    "curves": lambda: drawing.live_curves(SERIES, "Loss", y_label="nats"),
    "curves from zero": lambda: drawing.live_curves(SERIES, zero=True, width=300, height=150),
    "curves, smooth": lambda: drawing.live_curves({"a": [0, 4, 0, 4, 8, 0, 4]}, smooth=0.5),
    "curves, log": lambda: drawing.live_curves({"rate": [1e-3, 0, 1, 10, 250]}, "R", log_y=True),
    "curves with a gap": lambda: drawing.live_curves({"a": [1, NAN, 2, 3, INF, -2]}, x_label="t"),
    "a point": lambda: drawing.live_curves({"a": [-0.5]}),
    "a level": lambda: drawing.live_curves({"a": [3, 3, 3]}, "Level"),
    "zeros": lambda: drawing.live_curves({"a": [0, 0]}, zero=True),
    "nothing": lambda: drawing.live_curves({}, "Nothing"),
    "eight curves": lambda: drawing.live_curves({f"series {i}": [i, 2 * i] for i in range(8)}),
    "far away": lambda: drawing.live_curves({"a": ([1_000_000, 1_000_050], [1e6, 1.5e6])}),
    "curves of 40 points, smooth": lambda: drawing.live_curves(
        {"a": [i % 4 for i in range(40)]}, smooth=0.1
    ),
    "points between gaps": lambda: drawing.live_curves({"a": [1, NAN, 2, NAN, 3, 4, NAN]}),
    "a factor of ten": lambda: drawing.live_curves({"a": [1, 4, 10]}, log_y=True),
    "large numbers": lambda: drawing.live_curves({"a": [1e12, 4e12]}, zero=True),
    "a level, log": lambda: drawing.live_curves({"a": [5, 5]}, log_y=True),
    "32 points, smooth": lambda: drawing.live_curves({"a": [1, 3] * 16}, smooth=0.25),
    "33 points, smooth": lambda: drawing.live_curves({"a": [*[1, 3] * 16, 1]}, smooth=0.25),
    "bars of zeros": lambda: drawing.live_bars({"a": 0, "b": 0}),
    "a bar of zero": lambda: drawing.live_bars({"a": 0, "b": 1}),
    "larger numbers": lambda: drawing.live_curves({"a": [1e13, 4e13]}),
    "bars": lambda: drawing.live_bars(
        {"a": 4.5, "a name that is far too long": -2.25, "none": None, "c": 1}, "Bars", "bits"
    ),
    "bars above zero": lambda: drawing.live_bars({"a": 8, "b": 2, "c": 0.01}, highlight="b"),
    "bars of long names": lambda: drawing.live_bars({"n" * 28: 1, "a name" * 9: 2}, width=480),
    "narrow bars": lambda: drawing.live_bars({"a": -8, "b": -2}, width=240),
    "no bars": lambda: drawing.live_bars({}, "None"),
    "map": lambda: drawing.live_heatmap(
        [[0, 1, -2], [0.5, NAN, 4]], ["a row", "a longer row's name"], ["x", "yy", "zzz"], "Map"
    ),
    "map of 24 columns": lambda: drawing.live_heatmap(
        [[i * j for j in range(24)] for i in range(2)], columns=[f"c{i}" for i in range(24)]
    ),
    "map with a limit": lambda: drawing.live_heatmap([[1, 2], [3, 4]], limit=8, width=200),
    "map beyond its limit": lambda: drawing.live_heatmap(
        [[4, -4], [1, -1]], ["fourteen chars", "fifteen letters"], limit=2
    ),
    "map of small numbers": lambda: drawing.live_heatmap([[1e-6, -1e-6, 0, 1]]),
    "empty map": lambda: drawing.live_heatmap([], title="Empty"),
    "rows": lambda: text_explorers.draw_rows(np.array([8, 3, 4, 1]), [[0], [1, 2], [3]], 8, 1),
    "narrow rows": lambda: text_explorers.draw_rows(np.array([5]), [[0]], 5, width=100),
    "sight": lambda: text_explorers.draw_sight([3, 4, 1], 10),
    "heads": lambda: model_explorers._thumbnails(torch.stack([WEIGHTS] * 9), 1),
    "chances": lambda: model_explorers.draw_chances(
        [" the", "a word of twenty let", "x"], [0.5, 0.25, 0], [0.75, 0, 0], ["", "top_k", ""]
    ),
    "histogram": lambda: weight_explorers.histogram(SCALED, BOOK, "Weights"),
    "histogram of 32 codes": lambda: weight_explorers.histogram(
        SCALED / 2, torch.linspace(-1, 1, 32)
    ),
    "threads": lambda: weight_explorers.threads(SCALED * 2, SCALED.round() * 2, "A block"),
    "waterfall": lambda: training_explorers.waterfall({"weights": 3e9, "a cache": 1e9}, 8e9, "M"),
    "waterfall beyond the room": lambda: training_explorers.waterfall({"weights": 6e9}, 4e9),
    "waterfall in much room": lambda: training_explorers.waterfall({"w": 1e9, "g": 2e9}, 80e9),
    "strip": lambda: training_explorers.strip(
        [("rises", 10), ("holds", 89), ("falls", 1)], training_explorers.PHASE_COLOURS, "Rates"
    ),
    "table of GPUs": lambda: training_explorers.gpu_table({"full": 16 * 10**9, "lora": 10**8}),
}


def test_pictures():
    lines = [f"{name}\n{make()}".replace("><", ">\n<") for name, make in PICTURES.items()]
    compare("\n\n".join(lines) + "\n", "pictures.txt")


def test_pictures_stand_next_to_each_other():
    assert grid(*(make() for make in PICTURES.values())).count("<svg") >= len(PICTURES) - 1


LIMITS = (0, 1e-4, 0.3, 1, 7, 10, 99.5, 100, 2048)


def test_marks_of_axes():
    "For each pair of limits, of few and of many marks, even and by powers of ten."
    lines = []
    for low, high, count, log in product((-40, *LIMITS), LIMITS, (2, 5, 9), (False, True)):
        if low < high and not (log and low <= 0):
            marks = drawing.ticks(low, high, count, log)
            labels = " ".join(drawing.tick_labels(marks))
            lines.append(f"{low} {high} {count}{' log' * log}: {labels}\n")
    compare("".join(lines), "marks.txt")


@pytest.mark.parametrize(
    "low, high, middle", [(1, 100, 10), (1, 99, 50), (0, 1000, 500), (-10, 1000, 495), (2, 200, 20)]
)
def test_a_slider_is_logarithmic_from_a_factor_of_a_hundred(low, high, middle):
    assert explorer.notch_value(0, low, high) == low
    assert explorer.notch_value(explorer.NOTCHES, low, high) == high
    assert explorer.notch_value(explorer.NOTCHES // 2, low, high) == middle


def test_padding_and_made_up_lengths():
    lengths = np.array([1, 2, 3, 8])
    assert text_explorers.padding_share(lengths, [np.array([0, 1]), np.array([2, 3])]) == approx(
        0.3
    )
    assert text_explorers.padding_share(lengths, [np.array([3])]) == 0
    made_up = text_explorers.lengths_of(None)
    assert len(made_up) == 400 and 4 <= made_up.min() and made_up.max() <= 2000
    assert 50 < np.median(made_up) < 60  # e⁴ is 54.6
    assert len(text_explorers.lengths_of(None, 7, 1)) == 7
    assert [*text_explorers.lengths_of([3, {"input_ids": [1, 2]}])] == [3, 2]
    for wrong in ([], [0, 3]):
        with pytest.raises(ValueError, match="at least one document"):
            text_explorers.lengths_of(wrong)


@pytest.mark.parametrize(
    "rates, parts",
    [
        ([0, 1, 2, 2, 2, 1], [("rises", 0, 2), ("holds", 2, 4), ("falls", 4, 6)]),
        ([1], [("holds", 0, 1)]),
        ([2, 1], [("falls", 0, 2)]),
        ([1, 1, 2], [("holds", 0, 1), ("rises", 1, 3)]),
    ],
)
def test_phases_of_a_schedule(rates, parts):
    assert training_explorers.phases(rates) == parts


@pytest.mark.parametrize(
    "points, kept",
    [
        ([], []),
        ([(0, 1)], [(0, 1)]),
        ([(0, 2), (1, 3), (2, 1), (3, 2)], [(1, 3), (2, 1)]),
        ([(0, 1), (1, INF), (2, 5), (3, NAN)], [(1, INF), (2, 5)]),
    ],
)
def test_extremes(points, kept):
    assert session.extremes(points) == kept


@pytest.mark.parametrize("n", [7, 8, 15, 16, 100, 1000])
def test_a_curve_of_eight_points(n):
    "Steps increase up to the last group of points, and there are never more than the limit."
    curve = session.Curve(limit=8)
    for x in range(n):
        curve.add(x, (x * 7919) % 101)
        xs, ys = curve.read()
        assert len(xs) <= 8 and x - xs[-1] < 2 * curve.stride and [*xs] == sorted({*xs})
        assert ys == tuple((x * 7919) % 101 for x in xs)
    assert len(xs) >= min(n, 4) and xs[0] <= n / 4
    curve.cut(n // 2)
    assert max(curve.read()[0]) <= n // 2
