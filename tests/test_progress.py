"Bars in a terminal: what is printed meanwhile."

import io
import sys

import pytest

from trainkit.progress import Clock, Terminal, detect_display


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
