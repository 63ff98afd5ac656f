"Bars in a terminal: what is printed meanwhile."

import io
import sys

import pytest

from trainkit import progress
from trainkit.progress import Clock, Progress, Terminal, counting, detect_display, stage_bar


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_errors_are_printed_above_a_bar_of_the_same_screen(monkeypatch):
    "Elsewhere they remain where they are, and so does what goes to a file."
    errors, output, other = Screen(), io.StringIO(), Screen()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(sys, "stdout", output)
    for file, redirected in ((None, True), (other, False)):
        terminal = Terminal(file)
        monkeypatch.setattr(terminal, "render", lambda: "the bar")
        terminal.open(object())
        assert (sys.stderr is not errors) is redirected
        assert sys.stdout is output
        print("a warning", file=sys.stderr)
        terminal.stop()
        assert sys.stderr is errors
    assert "the bar" in errors.getvalue() and "the bar" in other.getvalue()
    assert errors.getvalue().count("a warning") == 2 and not output.getvalue()


@pytest.mark.parametrize(
    "test, terminal, kind, display",
    [
        (True, True, "xterm", "silent"),
        (False, True, "xterm", "terminal"),
        (False, True, "dumb", "lines"),
        (False, True, None, "terminal"),
        (False, False, "xterm", "lines"),
    ],
)
def test_where_a_bar_is_shown(test, terminal, kind, display, monkeypatch):
    for name, value in (("IN_TEST", "1" if test else None), ("TERM", kind)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Screen() if terminal else io.StringIO())
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert detect_display() == display


def test_positions_are_noted_sixty_times_a_window():
    times = iter([0.0, 0.99, 1.0, 1.5])
    clock = Clock(now=lambda: next(times), window=60.0)
    for done in (1, 2, 3):
        clock.at(done)
    assert [*clock.marks] == [(0.0, 0), (1.0, 2)]


@pytest.mark.parametrize(
    "after, titles", [(0.0, ["Reading rows", "Cleaning rows", "Checking"]), (150.0, [])]
)
def test_a_stage_that_counts_is_seen_in_a_log(after, titles, monkeypatch):
    "The bar of a command stands for all its stages; one that is over soon shows nothing."
    seconds = 0.0
    log = io.StringIO()

    class Timed(Progress):
        def __init__(self, *words, where="lines", **options):
            super().__init__(*words, where=where, file=log, now=lambda: seconds, **options)

    monkeypatch.setattr(progress, "Progress", Timed)
    with stage_bar("Checking", after=after):
        for title in ("Reading rows", "Cleaning rows"):
            for _ in counting(range(512), title, "row"):
                seconds += 0.1
    lines = [line[20:] for line in log.getvalue().splitlines()]
    assert [*dict.fromkeys(line.partition("  ")[0] for line in lines)] == titles


def test_a_terminal_shows_the_stage_that_counts(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(progress, "detect_display", lambda: "terminal")
    monkeypatch.setitem(progress.SCREENS, "terminal", Terminal(screen))
    with stage_bar("Checking"):
        for _ in counting(range(512), "Reading rows", "row"):
            shown = progress.SCREENS["terminal"].render().plain
    assert "512/512 row" in shown and shown.startswith("Reading rows"), shown


def test_rows_are_counted_where_they_are_read_and_cleaned(tmp_path):
    from trainkit.data.dataset import clean_examples, load_examples

    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 600)
    heard = []
    with progress.listen(lambda bar: heard.append((bar.title, bar.clock.done, bar.total))):
        clean_examples([*load_examples(tmp_path / "rows.jsonl")])
    assert ("Reading rows", 512, None) in heard and ("Cleaning rows", 512, 600) in heard


@pytest.mark.parametrize("shown", [False, True])
def test_a_run_without_progress_learns_its_tokenizer_in_silence(shown, tmp_path, capsys):
    from trainkit.recipes.config import method_config
    from trainkit.recipes.preparation import prepare_text

    (tmp_path / "text.txt").write_text("one two three four five six seven " * 40)
    knobs = [
        f"data.path={tmp_path / 'text.txt'}",
        "data.max_length=8",
        "data.eval_fraction=0",
        "tokenizer.vocab_size=260",
        "model.d_model=8",
        "model.n_heads=1",
        "model.n_layers=1",
        "model.d_ff=8",
        f"train.progress={str(shown).lower()}",
    ]
    prepare_text(method_config({}, knobs))
    assert ("Counting words" in capsys.readouterr().err) is shown
