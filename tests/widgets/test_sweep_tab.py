"The tab Sweep of the panel: a sweep is started, stopped, continued and taken over by clicks."

import math
import threading

import pytest

from trainkit.config import load_config
from trainkit.recipes import sweep as module
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel
from test_studio import count, until

pytest.importorskip("ipywidgets")
RATE = "optim.learning_rate"


@pytest.fixture
def panel(tmp_path, monkeypatch):
    "A panel whose sweeps train nothing: a rate of 0.01 is best."
    go = threading.Semaphore(0)

    def take_step(sweep, trial, rung, over):
        sweep.total = 90
        while not go.acquire(timeout=0.01):
            if over():
                return 0
        trial.step = sweep.settings.steps(90)[rung]
        trial.metrics.append(abs(math.log10(trial.values[RATE]) + 2))
        return 0

    monkeypatch.setattr(module, "_take_step", take_step)
    config = load_config(RunConfig, dict(runs_dir=str(tmp_path), name="mine"))
    panel = TrainerPanel(config, job=count, key="sweep", presets={})
    panel.go = go
    yield panel
    panel.close()


def test_a_sweep_is_stopped_continued_and_taken(panel, tmp_path):
    tab = panel.sweep
    assert tab.stop_button.disabled and tab.take_button.disabled and not tab.results.value
    tab.spaces.value, tab.runs.value = "learning_rate=1e-3..1e-1", 3
    tab.start_button.click()
    panel.refresh(force=True)
    assert "A sweep is running" in panel.obstacle.value
    assert panel.start_button.disabled and tab.start_button.disabled
    assert not panel.guarded(tab.start) and "stop it first" in panel.alert.value
    for _ in range(2):
        panel.go.release()
    until(
        lambda: sum(len(t.metrics) for t in tab.sweep.trials) == 2 and not tab.take_button.disabled
    )
    tab.stop_button.click()
    until(lambda: not panel.start_button.disabled)
    assert "Start sweep continues it" in tab.state.value and not tab.sweep.done
    for _ in range(10):
        panel.go.release()
    tab.start_button.click()
    until(lambda: not panel.rehearsing and not panel.start_button.disabled)
    assert tab.sweep.done and "complete" in tab.state.value
    assert (tmp_path / "mine-sweep" / "report.html").is_file()
    assert "<table" in tab.results.value and "<svg" in tab.results.value
    tab.take_button.click()
    best = tab.sweep.best.values[RATE]
    assert panel.form.read().optim.learning_rate == best
    assert panel.form.field(RATE).widget.value == f"{best:.12g}"


@pytest.mark.parametrize(
    "words, message",
    [
        ("learning_rat=1e-3..1", "Did you mean"),
        ("learning_rate=1..1e-3", "from the smaller to the larger"),
        ("", "nothing is searched"),
        ("learning_rate='1", "No closing quotation"),
    ],
)
def test_what_cannot_be_searched_is_said(panel, words, message, tmp_path):
    panel.sweep.spaces.value = words
    panel.sweep.start_button.click()
    assert message in panel.alert.value and not panel.rehearsing
    assert not any(tmp_path.iterdir())


def test_a_sweep_that_fails_says_why(panel, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(module, "_take_step", fail)
    panel.sweep.start_button.click()
    until(lambda: "failed" in panel.sweep.state.value)
    assert "the disk is full" in panel.sweep.state.value
    assert not panel.sweep.start_button.disabled
