"Parts of widgets that need no screen: curves of bounded length, claimed cells, changed knobs."

from collections import Counter
from types import SimpleNamespace

import pytest

from trainkit.config import load_config
from trainkit.recipes.config import RunConfig, method_config
from trainkit.widgets import form, labeler
from trainkit.widgets.panel import config_changes
from trainkit.widgets.run_browser import _runs_table
from trainkit.widgets.session import Curve


def test_a_curve_keeps_half_of_its_points_when_it_is_full():
    "Groups of 2, 4, 8, … points, each with its highest and its lowest."
    curve, strides = Curve(16), {}
    for x in range(400):
        curve.add(x, (x * 7) % 13)
        assert len(curve.points) < 16 and len(curve.pending) < 2 * curve.stride
        strides.setdefault(curve.stride, x)
        assert [*curve.read()[0]] == sorted(curve.read()[0])
    assert [*strides] == [2**i for i in range(len(strides))] and len(strides) > 4
    assert strides[2] == 14
    curve.cut(100)
    assert max(curve.read()[0]) <= 100


@pytest.mark.parametrize("limit", [64, 512])
def test_no_part_of_a_long_curve_is_denser_than_another(limit):
    "The first steps are drawn as finely as the last ones, wherever a run ends."
    curve, length = Curve(limit), 40 * limit
    for x in range(length):
        curve.add(x, (x * 7) % 13)
        if x > 2 * limit and x % (3 * limit) == 0:
            parts = Counter(int(4 * step / (x + 1)) for step in curve.read()[0])
            assert max(parts.values()) <= 1.5 * min(parts.values()) + 3, (x, parts)


@pytest.mark.parametrize(
    "key, cell, closed",
    [
        ("", ("c", 2), ["old"]),  # An earlier run of the same cell
        ("", ("c", 1), []),  # The same run makes several
        ("", ("", 0), []),
        ("old", ("c", 2), ["old"]),
    ],
)
def test_the_widgets_that_a_cell_replaces(key, cell, closed, monkeypatch):
    monkeypatch.setattr(form, "_this_cell", lambda: cell)
    gone = []

    def widget(name, place):
        return SimpleNamespace(name=name, cell=place, key=name, close=lambda: gone.append(name))

    claimed = {"old": widget("old", ("c", 1)), "other": widget("other", ("d", 1))}
    mine = widget("mine", None)
    form.claim_cell(mine, claimed, key, "usual")
    assert gone == closed
    assert mine.cell == (cell if not key else ("", 0)) and claimed[mine.key] is mine
    assert mine.key == (key or ("usual" if not cell[0] else f"c {cell[1]} {id(mine)}"))


@pytest.mark.parametrize(
    "words",
    [
        {"method": "pretrain"},
        {"method": "lora", "lora": {"r": 4}, "train": {"seed": 5}},
        {"method": "dpo", "use_lora": True, "dpo": {"beta": 0.3}, "seed": 3},
    ],
)
def test_the_values_that_build_a_config_again(words):
    config = method_config(words)
    changes = config_changes(config)
    assert load_config(RunConfig, changes) == config
    assert changes["method"] == words["method"] and len(str(changes)) < 400
    for group, values in words.items():
        if isinstance(values, dict):
            assert values.items() <= changes[group].items()


def test_columns_of_runs_are_those_that_a_run_has():
    def run(name, **final):
        return SimpleNamespace(
            name=name, final=lambda: final, started="2026-01-02T10:11:12", status="finished"
        )

    runs = [run("a", step=3, loss=0.5), run("b", loss=0.25, eval_loss=2.0)]
    page = str(_runs_table(runs, runs[1:]))
    for name in ("run", "started", "step", "loss", "eval_loss", "status"):
        assert f">{name}<" in page, name
    assert "best_eval_loss" not in page and "tokens_per_second" not in page
    assert "●\xa0b" in page and "●\xa0a" not in page and "01\u201102\xa010:11<" in page
    assert "2 runs" in page


@pytest.mark.parametrize("repeat", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("n", range(1, 14))
def test_each_pair_is_judged_and_some_of_them_twice(n, repeat):
    "With the answers on the other sides, and not before half of the others were seen."
    plan = labeler._plan(n, 3, repeat)
    counts = Counter(pair for pair, _ in plan)
    assert sorted(counts) == list(range(n)) and max(counts.values()) <= 2
    assert len(plan) == n + (round(repeat * n) or int(repeat > 0 and n > 4))
    places = {pair: [at for at, (p, _) in enumerate(plan) if p == pair] for pair in counts}
    for pair, (first, *again) in places.items():
        for at in again:
            assert at >= (n + 1) // 2 and plan[at][1] != plan[first][1], pair
    assert {pair for pair, _ in plan[: (n + 1) // 2]} >= {p for p, c in counts.items() if c > 1}
