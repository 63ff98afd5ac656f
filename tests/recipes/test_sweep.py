"Sweeps: what is searched, who gets more steps, exact promotion, resumption, the page."

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.sketches import drawn
from support.snapshots import compare

from trainkit.config import ConfigError
from trainkit.display import Picture
from trainkit.recipes import method_config
from trainkit.recipes import sweep as module
from trainkit.recipes.runner import run
from trainkit.recipes.sweep import Space, Sweep, SweepConfig, Trial, knob_importance, load_sweep
from trainkit.recipes.sweep import next_job, parse_spaces, run_sweep, sample_points, start_sweep
from trainkit.recipes.sweep import sweep_sections
from trainkit.train import reports
from trainkit.train.runs import list_runs, read_run

WORDS = dict(
    name="small",
    data=dict(path="stdlib", max_chars=20_000, max_length=32),
    tokenizer=dict(vocab_size=270),
    model=dict(d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=32, dropout=0.1),
    optim=dict(optim="adamw_torch", lr_scheduler_type="cosine", warmup_ratio=0.1),
    train=dict(
        max_steps=9,
        per_device_train_batch_size=4,
        logging_steps=1,
        progress=False,
        eval_strategy="no",
        save_strategy="no",
    ),
    prompts=["def "],
    watch_memory=False,
)
SPACE = ["learning_rate=1e-3..1e-1"]
PLAN = SweepConfig(runs=3)


def quiet(line):
    pass


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    "A sweep of three runs that nothing has disturbed."
    here = tmp_path_factory.mktemp("sweep")
    os.environ["TRAINKIT_PROFILE"] = before = os.environ.get("TRAINKIT_PROFILE", "quick")
    config = method_config(WORDS | dict(runs_dir=str(here)))
    with drawn():
        sweep = run_sweep(config, SPACE, PLAN, say=quiet)
    assert before == os.environ["TRAINKIT_PROFILE"]
    return config, sweep


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_promoted_run_equals_one_that_was_never_stopped(swept, tmp_path):
    "Weights, losses of every step, and the last checkpoint, to the last bit."
    config, sweep = swept
    best = sweep.best
    assert best.step == 9 and len(best.metrics) == 2 and best.ended == "finished"
    train = replace(sweep.best_config().train, output_dir=str(tmp_path / "alone"))
    alone = run(replace(sweep.best_config(), train=train), verbose=False)
    mine, other = sweep.folder / best.name, alone.folder
    assert equal(weights(mine / "model"), weights(other / "model"))
    losses = [read_run(folder).series("loss") for folder in (mine, other)]
    assert losses[0] == losses[1] and len(losses[0][0]) == 9
    assert sweep.value(best) == alone.metrics["eval_loss"]
    assert sweep.steps == 3 * 3 + 6 == PLAN.planned(9)


def test_trials_are_ordinary_runs(swept):
    _, sweep = swept
    runs = {run.name: run.status for run in list_runs(sweep.folder)}
    assert sorted(runs) == [t.name for t in sweep.trials]
    assert sorted(runs.values()) == ["at a rung", "at a rung", "finished"]
    files = {path.name for path in sweep.folder.iterdir()}
    assert {"sweep.json", "base.yaml", "best.yaml", "report.html"} <= files
    best = method_config(sweep.folder / "best.yaml")
    assert best.optim.learning_rate == sweep.best.values["optim.learning_rate"]
    assert best.train.output_dir == "" and best.name == "small"


class Killed(BaseException):
    "As sudden as `kill -9`: nobody catches it."


@pytest.fixture
def undrawn(monkeypatch):
    "Runs without pictures, which take longer than their training."
    empty = Picture("<svg></svg>")
    monkeypatch.setattr(reports, "_draw_series", lambda text: empty)
    monkeypatch.setattr(module, "draw_svg", lambda *words, **how: empty)


@pytest.mark.parametrize("at", [(0, 2), (3, 7)])  # Job, step
def test_a_killed_sweep_continues_to_the_same_end(swept, tmp_path, monkeypatch, undrawn, at):
    _, sweep = swept
    config = method_config(WORDS | dict(runs_dir=str(tmp_path)))
    jobs = []
    step = module._Rung.on_step
    take = module._take_step

    def on_step(self, trainer, record):
        if (len(jobs) - 1, record["step"]) == at:
            raise Killed
        step(self, trainer, record)

    def counted(*words):
        jobs.append(words)
        return take(*words)

    monkeypatch.setattr(module._Rung, "on_step", on_step)
    monkeypatch.setattr(module, "_take_step", counted)
    with pytest.raises(Killed):
        run_sweep(config, SPACE, PLAN, say=quiet)
    begun = load_sweep(tmp_path / "small-sweep")
    assert not begun.done and sum(len(t.metrics) for t in begun.trials) == at[0]
    monkeypatch.setattr(module._Rung, "on_step", step)
    again = run_sweep(config, SPACE, PLAN, say=quiet)
    assert [t.metrics for t in again.trials] == [t.metrics for t in sweep.trials]
    models = [s.folder / s.best.name / "model" for s in (sweep, again)]
    assert equal(*map(weights, models))


def test_a_second_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def pressed(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_take_step", pressed)
    config = method_config(WORDS | dict(runs_dir=str(tmp_path)))
    lines = []
    with pytest.raises(KeyboardInterrupt):
        run_sweep(config, SPACE, PLAN, say=lines.append)
    assert lines == [f"Resume with: trainkit sweep --resume {tmp_path / 'small-sweep'}"]


def test_limits_stop_a_sweep_that_can_go_on(tmp_path, undrawn):
    config = method_config(WORDS | dict(runs_dir=str(tmp_path)))
    lines = []
    sweep = run_sweep(config, SPACE, replace(PLAN, budget_steps=5), say=lines.append)
    assert sweep.steps == 3 and not sweep.done
    assert "The budget of 5 steps is used up" in lines and "--resume" in lines[-1]
    sweep.settings = replace(PLAN, minutes=1e-9)
    lines.clear()
    assert run_sweep(sweep, say=lines.append).steps == 3 and "minutes are over" in lines[0]


@pytest.mark.slow
def test_a_sweep_survives_sigkill(swept, tmp_path):
    "The process is killed at random moments until the sweep is done."
    _, whole = swept
    words = json.dumps(WORDS | dict(runs_dir=str(tmp_path)))
    code = (
        "import json, sys\n"
        "from trainkit.recipes import method_config\n"
        "from trainkit.recipes.sweep import SweepConfig, run_sweep\n"
        f"config = method_config(json.loads({words!r}))\n"
        "print('ready', flush=True)\n"
        f"run_sweep(config, {SPACE!r}, SweepConfig(runs=3))\n"
    )
    for wait in (2.0, 4.0, 6.0, 600.0):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        with pytest.MonkeyPatch.context():
            end = time.monotonic() + wait
            while child.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    sweep = load_sweep(tmp_path / "small-sweep")
    assert sweep.done
    assert [t.metrics for t in sweep.trials] == [t.metrics for t in whole.trials]


def test_a_run_that_fails_is_out_and_the_others_go_on(tmp_path, monkeypatch):
    from trainkit.recipes import runner
    from trainkit.train.config import TrainingError

    def fail(config, **how):
        raise TrainingError("Step 3: the loss is nan", 3)

    monkeypatch.setattr(runner, "run", fail)
    config = method_config(WORDS | dict(runs_dir=str(tmp_path)))
    sweep = run_sweep(config, SPACE, PLAN, say=quiet)
    assert sweep.done and not sweep.has_result and not (sweep.folder / "best.yaml").exists()
    assert {t.ended for t in sweep.trials} == {"Step 3: the loss is nan"}
    with pytest.raises(ValueError, match="no run of .* has a result: Step 3"):
        assert sweep.best
    assert load_sweep(sweep.folder).trials[0].metrics == [math.inf]


def test_what_stops_before_anything_is_trained(tmp_path):
    config = method_config(WORDS | dict(runs_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="must be divisible|n_heads"):
        start_sweep(config, ["model.n_heads=2,3"], PLAN)
    assert not (tmp_path / "small-sweep").exists()
    with pytest.raises(ValueError, match="engine = 'trl'"):
        start_sweep(replace(config, engine="trl"), SPACE, PLAN)
    start_sweep(config, SPACE, PLAN)
    assert start_sweep(config, SPACE, replace(PLAN, minutes=3)).settings.minutes == 3
    with pytest.raises(FileExistsError, match="what is searched and how it is searched differ"):
        start_sweep(config, ["learning_rate=1e-3..1"], SweepConfig(runs=4))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        start_sweep(config, SPACE, PLAN, tmp_path / "other")
    (tmp_path / "small-sweep" / "sweep.json").write_text("{torn")
    with pytest.raises(ValueError, match="cannot be read"):
        load_sweep(tmp_path / "small-sweep")


def test_nothing_held_out_is_said(tmp_path):
    words = WORDS | dict(runs_dir=str(tmp_path), data=WORDS["data"] | dict(eval_fraction=0.0))
    with pytest.raises(ValueError, match="nothing is held out"):
        run_sweep(method_config(words), SPACE, PLAN, say=quiet)


@pytest.mark.parametrize(
    "text, words",
    [
        ("learning_rat=1e-4..1e-2", "Did you mean 'optim.learning_rate'"),
        ("optim.learning_rat=1..2", "Did you mean"),
        ("optim=muon,adamw_torch", "is a group of knobs: name one, such as optim.optim"),
        ("lr=1e-2..1e-4", "from the smaller to the larger number"),
        ("lr=1e-3..1e-3", "is not below"),
        ("lr=1e-4..fast", "'fast' is not a number"),
        ("lr=..1", "'' is not a number"),
        ("lr=-1..1", "≥ 0"),
        ("lr=1..inf", "finite"),
        ("lr=log:0..1", "begins above 0"),
        ("n_layers=2..4.5", "whole numbers"),
        ("dropout=0.1..1.5", "≤ 1"),
        ("n_layers=2,,4", "a value of the list is empty"),
        ("lr=1..2,4..5", "for numbers"),
        ("tie_embeddings=0..1", "for numbers"),
        ("lr", "is written knob=low..high"),
        ("lr=1e-3", "nothing is searched"),
    ],
)
def test_wrong_spaces_say_what_is_right(text, words):
    with pytest.raises(ConfigError) as error:
        parse_spaces([text])
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text, scale, low, high",
    [
        ("lr=1e-4..1e-2", "log", 1e-4, 1e-2),
        ("lr=lin:1e-4..1e-2", "linear", 1e-4, 1e-2),
        ("weight_decay=0.01..0.02", "log", 0.01, 0.02),
        ("weight_decay=0..0.1", "linear", 0, 0.1),
        ("model.dropout=0.01..0.5", "linear", 0.01, 0.5),
        ("n_layers=2..8", "linear", 2, 8),
        ("d_model=64..1024", "log", 64, 1024),
        ("d_model=log:64..128", "log", 64, 128),
    ],
)
def test_the_scale_follows_from_the_knob(text, scale, low, high):
    (space,), _, _ = parse_spaces([text])
    assert (space.scale, space.at(0), space.at(1)) == (scale, low, high)
    inside = [space.at(i / 20) for i in range(21)]
    assert inside == sorted(inside)
    back = [space.where(value) for value in inside]
    assert all(abs(u - i / 20) < 0.2 for i, u in enumerate(back))


def test_fixed_words_and_lists_of_lists():
    spaces, fixed, _ = parse_spaces(
        ["data.path=../mine.txt", "report_to=tensorboard,wandb", "prompts=[a],[b]", "lr=1e-3,1e-2"]
    )
    assert fixed == ["data.path=../mine.txt", "report_to=tensorboard,wandb"]
    assert [s.values for s in spaces] == [(("a",), ("b",)), (1e-3, 1e-2)]
    with pytest.raises(ConfigError, match="has a range already"):
        parse_spaces(["lr=1e-4..1e-2", "optim.learning_rate=1,2"])


def test_points_are_different_and_follow_from_the_seed():
    spaces, _, _ = parse_spaces(["lr=1e-4..1e-2", "n_layers=1..3", "optim.optim=muon,adamw_torch"])
    for search in ("sobol", "random"):
        points = sample_points(spaces, 32, search, seed=4)
        assert len({json.dumps(p) for p in points}) == 32
        assert points == sample_points(spaces, 32, search, seed=4)
        assert points != sample_points(spaces, 32, search, seed=5)
        assert points[:5] == sample_points(spaces, 5, search, seed=4)
    grid = sample_points(spaces, 24, "grid")
    assert len(grid) == 2 * 3 * 3 and {p["model.n_layers"] for p in grid} == {1, 2, 3}
    with pytest.raises(ConfigError, match="the grid has at least 8 points"):
        sample_points(spaces, 4, "grid")
    # A Sobol sequence has one point in each of 16 equal parts
    rates = sample_points(spaces[:1], 16, "sobol")
    parts = {int(16 * spaces[0].where(p["optim.learning_rate"])) for p in rates}
    assert len(parts) >= 15


def play(config, metric):
    trials = [Trial(i, {}) for i in range(config.runs)]
    order = []
    while job := next_job(trials, config):
        order.append((job[0].number, job[1]))
        job[0].metrics.append(metric(job[0].number, job[1]))
    return order


def test_halving_keeps_the_best_third_of_each_rung():
    order = play(SweepConfig(runs=27), lambda i, rung: (i * 7) % 27)
    sizes = [len([i for i, rung in order if rung == r]) for r in range(4)]
    assert sizes == [27, 9, 3, 1] == SweepConfig(runs=27).sizes
    second = {i for i, rung in order if rung == 1}
    assert second == {i for i in range(27) if (i * 7) % 27 < 9}
    assert SweepConfig(runs=27).planned(900) == 27 * 33 + 9 * 67 + 3 * 200 + 600
    assert SweepConfig(runs=8, eta=2, rungs=2).fractions == [0.5, 1.0]
    assert SweepConfig(runs=2).fractions == [1.0]


def test_runs_that_failed_are_never_promoted():
    order = play(SweepConfig(runs=9), lambda i, rung: math.inf if i < 7 else i)
    assert [i for i, rung in order if rung == 1] == [7, 8]
    assert play(SweepConfig(runs=3), lambda i, rung: math.inf) == [(0, 0), (1, 0), (2, 0)]


def test_asha_promotes_without_waiting():
    order = play(SweepConfig(runs=9, scheduler="asha"), lambda i, rung: (4 * i) % 9)
    assert order[:5] == [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0)]
    for n, (i, rung) in enumerate(order):  # As `get_job` of the paper: in the top third so far
        if rung:
            there = sorted((4 * j) % 9 for j, r in order[:n] if r == rung - 1)
            assert (4 * i) % 9 in there[: len(there) // 3]


def test_importance_finds_the_knob_that_matters():
    spaces, _, _ = parse_spaces(["lr=1e-4..1e-2", "dropout=0..0.3", "optim.optim=muon,adamw_torch"])
    points = sample_points(spaces, 24, "sobol", 1)
    bowl = [(math.log10(p["optim.learning_rate"]) + 3) ** 2 for p in points]
    shares = knob_importance(spaces, points, bowl)
    assert shares["optim.learning_rate"] > 0.8 > 0.3 > shares["model.dropout"]
    kinds = [float(p["optim.optim"] == "muon") for p in points]
    assert knob_importance(spaces, points, kinds)["optim.optim"] > 0.99
    broken = [math.inf if i % 2 else x for i, x in enumerate(bowl)]
    assert all(0 <= share <= 1 for share in knob_importance(spaces, points, broken).values())
    assert knob_importance(spaces[:1], points, bowl) == {}
    assert knob_importance(spaces, points[:5], bowl[:5]) == {}


def test_the_page_in_words(tmp_path, real_curves):
    "Headings, tables and captions of a page with two knobs and a run that failed."
    import re

    spaces = [
        Space("optim.learning_rate", "log", 1e-4, 1e-2),
        Space("model.n_layers", "list", values=(2, 4)),
    ]
    trials = [
        Trial(
            i,
            {"optim.learning_rate": 1e-4 * 2**i, "model.n_layers": 2 + 2 * (i % 2)},
            [5 - 0.3 * i],
            10,
            2.0,
        )
        for i in range(6)
    ]
    trials[4].metrics.append(3.25)
    trials[4].step, trials[4].ended = 30, "finished"
    trials[5].metrics, trials[5].ended = [math.inf], "Step 7: the loss is nan"
    sweep = Sweep(
        tmp_path / "s",
        "",
        spaces,
        SweepConfig(runs=6),
        "eval_loss",
        False,
        trials,
        30,
        ["config.yaml", "data.path=my text.txt"],
        61.0,
    )
    text = "".join(f"\n== {heading}\n{html}" for heading, html in sweep_sections(sweep))
    captions = re.findall('aria-label="([^"]*)"', text)
    text = re.sub("<svg.*?</svg>", "[picture]", text, flags=re.DOTALL)
    text = re.sub(r"\n\s*\n", "\n", re.sub("<[^>]+>", "\n", re.sub("<style.*?</style>", "", text)))
    text = text.replace(str(tmp_path), "runs")
    compare(text.strip() + "\n" + "\n".join(captions) + "\n", "sweep_page.txt")


@pytest.mark.parametrize(
    "metrics, step, state",
    [([], 0, "not begun"), ([], 2, "interrupted"), ([4.5], 6, "stopped at a rung")],
)
def test_the_table_says_where_a_trial_is(swept, metrics, step, state):
    "One that was interrupted before its first rung has begun."
    trial = replace(swept[1].trials[0], metrics=metrics, step=step, ended="")
    assert replace(swept[1], trials=[trial]).rows()[0]["ended"] == state
