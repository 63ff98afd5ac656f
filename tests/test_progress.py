"Bars in a terminal: what is printed meanwhile."

import io
import sys

from trainkit.progress import Terminal


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
