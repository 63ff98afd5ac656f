"Run lessons with their exercises: each check sees the cell as it is and the folded solution."

import os
import signal
import warnings
from dataclasses import replace

from support.answers import ANSWERS
from support.processes import ROOT


def run_lesson(path, flags):
    """Run a notebook as the tests do: did it run, and each exercise's two verdicts or its error.

    After the two verdicts: each answer in `support.answers` that is judged wrongly. Call it in a
    process of its own.
    """
    os.chdir(ROOT)
    os.environ.update(TRAINKIT_PROFILE="quick", COLUMNS="100")
    warnings.simplefilter("ignore")
    from nbdev import test

    from trainkit.course import Verdict, grade, read_exercises

    exercises, asked, verdicts = {e.stub: e for e in read_exercises(path)}, [], []
    others = ANSWERS.get(f"{path.parent.name}/{path.stem}", [])

    def judge(exercise, names, answer):
        try:
            both = [str(verdict) for verdict in grade(exercise, names, answer)]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        mine = [other[1:] for other in others if other[0] == exercise.number]
        return both + [text for other in mine if (text := misjudged(exercise, names, *other))]

    def misjudged(exercise, names, is_right, other):
        try:
            verdict = grade(replace(exercise, solution=other), names, Verdict())[1]
        except Exception as error:  # In the check: no learner would take it for `right`
            verdict = Verdict(f"{type(error).__name__}: {error}")
        return "" if bool(verdict) == is_right else f"{other!r} is {verdict}"

    class Shell(test.CaptureShell):
        def cell(self, cell, **kwargs):
            super().cell(cell, **kwargs)
            if cell.source in exercises and not self.exc:
                asked.append(
                    (
                        exercises[cell.source],
                        self.user_ns,
                        self.result if isinstance(self.result, Verdict) else None,
                    )
                )
                if len(asked) == len(exercises):
                    verdicts.extend(judge(*one) for one in asked)  # What follows clears up

    before, test.CaptureShell = test.CaptureShell, Shell
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        ok, _ = test.test_nb(path, skip_flags=["gpu", "slow"], force_flags=flags, basepath=ROOT)
    finally:
        test.CaptureShell = before
        signal.signal(signal.SIGINT, interrupt)  # nbdev's ends the process, and would stay
    return ok, verdicts


def wrong(verdicts):
    "The exercises whose stub passes or whose solution does not, in words."
    for number, verdict in enumerate(verdicts, 1):
        if isinstance(verdict, str):
            yield f"exercise {number} cannot be graded: {verdict}"
        elif verdict[0] == "right":
            yield f"exercise {number}: the untouched cell passes"
        elif verdict[1] != "right":
            yield f"exercise {number}: its solution is {verdict[1]}"
        else:
            yield from (f"exercise {number}: {text}" for text in verdict[2:])
