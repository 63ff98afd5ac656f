"Parts of widgets that need no screen: curves of bounded length, claimed cells, changed knobs."

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from trainkit.config import load_config
from trainkit.recipes.config import RunConfig, method_config
from trainkit.widgets import form, labeler, run_browser
from trainkit.widgets.chat_compare import token_kl
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


def test_an_explorer_closes_the_views_of_an_earlier_run_of_its_cell(monkeypatch):
    import IPython

    from trainkit.widgets.training_explorers import ScheduleExplorer

    shell = SimpleNamespace(kernel=object(), execution_count=1)
    shell.get_parent = lambda: {"metadata": {"cellId": "c"}}
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    views = []
    for run in (1, 1, 2):
        shell.execution_count = run
        explorer = ScheduleExplorer()
        explorer.show()
        views.append(explorer.view)
    assert [view.closed for view in views] == [True, True, False]
    assert [*views[0].views.values()] == [views[2]]
    views[2].close()
    assert not views[0].views


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


def shown(**knobs):
    "A run by its config and its last numbers."
    values = {("config", k.replace("_", ".", 1)): v for k, v in knobs.items() if k != "name"}
    series = {"step": ((1, 2), (1.0, 2.0)), "loss": ((1, 2), (3.0, knobs.get("loss", 2.0)))}
    return SimpleNamespace(
        name=knobs["name"], config=str(knobs), status="not finished", values=values,
        keys=lambda: [*series, "epoch", *(["eval_loss"] if knobs.get("optim_lr") else [])],
        series=lambda key: series[key],
    )  # fmt: skip


@pytest.mark.parametrize(
    "words, names",
    [
        ("", "abc"),
        ("optim.lr>1e-3", "a"),
        ("optim.lr >= 1e-3", "ab"),
        ("lr<0.002", "b"),
        ("lr<=0.002", "ab"),
        ("lr=0.002", "a"),
        ("lr!=0.002", "b"),
        ("kind=Adam", "ab"),
        ("kind!=adam", "c"),
        ("kind>adam", ""),
        ("lr=fast", ""),
        ("lr!=fast", "ab"),
        ("train.on=true", "c"),
        ("train.on>0", ""),
        ("kind=adam lr>0.001", "a"),
        ("MUON", "c"),
        ("finished", "abc"),
        ("nished", ""),
    ],
)
def test_the_runs_that_a_filter_leaves(words, names, monkeypatch):
    "Numbers are compared as numbers, texts only for being the same, in any case."
    monkeypatch.setattr(
        run_browser, "_facts", lambda run: {k: v for (_, k), v in run.values.items()}
    )
    runs = [
        shown(name="a", optim_lr=0.002, optim_kind="adam"),
        shown(name="b", optim_lr=0.001, optim_kind="Adam"),
        shown(name="c", train_on=True, optim_kind="muon"),
    ]
    assert "".join(run.name for run in run_browser.find_runs(runs, words)) == names


def test_a_filter_by_what_no_run_has_is_an_error(monkeypatch):
    monkeypatch.setattr(
        run_browser, "_facts", lambda run: {k: v for (_, k), v in run.values.items()}
    )
    with pytest.raises(ValueError, match="'rate' is no knob and no number of these runs"):
        run_browser.find_runs([shown(name="a", optim_lr=1.0)], "rate>3")
    assert run_browser.find_runs([], "rate>3") == []
    with pytest.raises(ValueError, match="'r' is no knob"):
        run_browser.find_runs([shown(name="a", optim_lr=1.0)], "r>3")


@pytest.mark.parametrize("count, smooth", [(1, 0.02), (3, 0.02), (4, 0.0), (6, 0.0), (7, 0.0)])
def test_six_runs_are_drawn_over_each_other(count, smooth, monkeypatch):
    drawn = []
    monkeypatch.setattr(run_browser, "live_curves", lambda *a, **k: drawn.append((*a, k)))
    runs = [shown(name=str(i), optim_lr=1.0) for i in range(count)]
    run_browser.overlay(runs)
    series, title, knobs = drawn[0]
    assert [*series] == [str(i) for i in range(min(count, 6))] and knobs["smooth"] == smooth
    assert title == ("loss, the first 6 of 7 runs" if count == 7 else "loss")
    assert run_browser.metrics_of([*runs, shown(name="c")]) == ["loss", "eval_loss", "step"]


def test_verdicts_are_kept_undone_and_counted(tmp_path):
    "A tie, a skip, and two ways to judge one pair make no row; a torn line is no verdict."
    pairs = [dict(prompt=f"p{i}", answers=[f"{i}a", f"{i}b"]) for i in range(4)]
    labels = labeler.PreferenceLabels(tmp_path / "x.jsonl", pairs, repeat=0.5)
    assert len(labels.plan) == 6 and labels.now.place == 0
    assert not labels.undo() and labels.agreement() is None and labels.left_share() is None
    judged = {}
    for number, left in labels.plan:
        assert (labels.now.left, labels.now.right) == (
            f"{number}{'ab'[left]}",
            f"{number}{'ba'[left]}",
        )
        want = {0: 0, 1: 1}.get(number)  # The same winner, and what it is called here
        verdict = "tie" if number == 2 else "skip" if number == 3 else ""
        verdict = verdict or ("left" if want == left else "right")
        judged.setdefault(number, []).append(verdict)
        labels.judge(verdict)
    assert labels.now is None and labels.judge("left") is None
    assert sorted((r["chosen"], r["rejected"]) for r in labels.rows()) == [
        ("0a", "0b"),
        ("1b", "1a"),
    ]
    sides = [v for number in (0, 1) for v in judged[number]]
    share = labels.left_share()
    assert (share.value, share.n) == (sides.count("left") / len(sides), len(sides))
    assert "no sign that you favour a side" in labeler.labels_html(labels)
    again = sum(len(judged[number]) - 1 for number in (0, 1, 2))
    assert labels.agreement().value == 1.0 and labels.agreement().n == again
    with labels.journal.open("ab") as file:
        file.write(b'{"event": "verd')
    copy = labeler.PreferenceLabels(tmp_path / "x.jsonl", pairs, repeat=0.5)
    assert len(copy.verdicts) == 6 and copy.undo() and len(copy.verdicts) == 5
    copy.judge("tie")
    assert len(labeler.PreferenceLabels(tmp_path / "x.jsonl", pairs, repeat=0.5).verdicts) == 6
    with pytest.raises(RuntimeError, match="somebody else labels these pairs"):
        labels.undo()
    with pytest.raises(ValueError, match="verdict = 'leftt' must be one of left, right, tie, skip"):
        copy.judge("leftt")


def test_the_divergence_of_two_vocabularies_is_that_of_their_common_tokens():
    "Rows that only pad a table of embeddings count in neither."
    p = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]).log()
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    want = [0.0, 0.25 * math.log(0.5) + 0.75 * math.log(1.5)]
    assert token_kl(p, q).tolist() == pytest.approx(want, abs=1e-6)
    other = torch.full((2, 7), 0.5).log()
    assert token_kl(p[:, :2], other).tolist() == pytest.approx(want, abs=1e-6)
    assert token_kl(p[1:], other[1:]).tolist() == pytest.approx(want[1:], abs=1e-6)


def test_who_favours_a_side_is_told(tmp_path):
    "Thirty pairs, of which the left answer wins all, and their sides were drawn."
    labeler = pytest.importorskip("trainkit.widgets.labeler")
    pairs = [dict(prompt=f"{i}?", answers=["yes", "no"]) for i in range(30)]
    labels = labeler.PreferenceLabels(tmp_path / "x.jsonl", pairs)
    while labels.now is not None:
        labels.judge("left")
    assert "100 % of the pairs: you seem to favour a side" in labeler.labels_html(labels)
