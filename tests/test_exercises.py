"""Every lesson ends with three exercises, and every chapter with a checkpoint.

test_lessons runs their checks and solutions.
"""

import ast
import json
import re
import sys

import pytest
import yaml
from support.processes import ROOT
from support.exercise_grading import run_lesson, wrong

from trainkit.course import Exercise, grade, read_exercises, solved

sys.path.insert(0, str(ROOT / "tools"))
import course  # noqa: E402

LESSONS = sorted((ROOT / "nbs").rglob("*.ipynb"))


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_lesson_has_three_exercises(path):
    "Three cells with a check that has a hint, each followed by a folded solution that is code."
    exercises = read_exercises(path)
    several = [1, 2, 3, 4] if course.checkpoint(course.read(path)) else [1, 2, 3]
    assert [e.number for e in exercises] == several
    for e in exercises:
        assert e.solution, f"exercise {e.number} has no folded block of Python"
        compile(solved(e), path.stem, "exec")
        calls = [
            n.value
            for n in ast.parse(e.stub).body
            if isinstance(n, ast.Expr)
            and isinstance(n.value, ast.Call)
            and getattr(n.value.func, "id", "") == "check"
        ]
        assert len(calls) == 1 and len(calls[0].args) >= 2, (
            f"exercise {e.number}: one check, with a hint"
        )
        hint = calls[0].args[1]
        assert not isinstance(hint, ast.Compare), "the second argument is the hint"
        if isinstance(hint, ast.Constant):
            assert len(str(hint.value).split()) >= 3, (
                f"exercise {e.number}: a hint says what to look at"
            )
    text = json.dumps(cells_of(path)[-16:])
    assert {*re.findall(r"\*\*([1-4])\.\*\*", text)} >= {*map(str, several)}, "they are numbered"


CHAPTERS = [folder for folder in course.CHAPTERS if int(folder[:2]) <= 12]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_has_a_checkpoint(chapter):
    "One exercise that needs the whole chapter, the fourth of its last lesson on the main road."
    names = course.chapters()[chapter]
    books = {name: course.read(ROOT / f"nbs/{name}.ipynb") for name in names}
    having = [name for name in names if course.checkpoint(books[name])]
    assert having == [max(name for name in course.road() if name in names)]
    page = books[having[0]]["cells"]
    own = [cell for cell in page if cell["id"].startswith("checkpoint-")]
    parts = [f"checkpoint-{part}" for part in ("text", "data", "code", "solution")]
    assert [cell["id"] for cell in own] == parts, "text, folded data and grader, answer, solution"
    assert page[page.index(own[0]) : page.index(own[-1]) + 1] == own, "next to each other"
    text, _, stub, solution = ["".join(cell["source"]) for cell in own]
    assert re.search(r"It draws on \[.*\.ipynb\).*this lesson", text) or text.count(".ipynb)") > 1
    assert re.search(r"takes about (15|20|25|30) minutes", text) and "**4.**" in text
    assert own[1]["metadata"]["jupyter"]["source_hidden"], "the grader may give away the answer"
    last = read_exercises(ROOT / f"nbs/{having[0]}.ipynb")[-1]
    assert (last.number, last.stub) == (4, stub) and last.solution in solution
    about = f"**Checkpoint:** [{course.checkpoint(books[having[0]])[0]}]"
    for page in (ROOT / "nbs" / chapter / "README.md", ROOT / "nbs/README.md"):
        assert about in page.read_text(encoding="utf-8"), "run `make index`"


def write(folder, *cells):
    path = folder / "lesson.ipynb"
    code = dict(metadata={}, outputs=[], execution_count=None)
    cells = [
        {
            "cell_type": kind,
            "id": f"c{i}",
            "metadata": {},
            "source": [text],
            **(code if kind == "code" else {}),
        }
        for i, (kind, text) in enumerate(cells)
    ]
    path.write_text(
        json.dumps(
            dict(
                cells=cells,
                metadata=dict(kernelspec=dict(language="python", name="python3", display_name="x")),
                nbformat=4,
                nbformat_minor=5,
            )
        )
    )
    return path


def lesson(folder, stub, solution):
    return write(
        folder,
        ("markdown", "# A\n\n> b"),
        ("code", "from trainkit.course import check\nknown = 3\nseen = []"),
        ("markdown", "## Try it\n**1.** Count."),
        ("code", f"{stub}\ncheck(n == known, 'count again')"),
        (
            "markdown",
            f"<details><summary>Solution</summary>\n\n```python\n{solution}\n```\n</details>",
        ),
        ("code", "#| hide\nassert n != 3 and seen == [1]"),
    )


def test_a_lesson_is_run_and_its_exercises_graded(tmp_path):
    "The untouched cell fails, the solution passes, and the lesson's own names stay as they were."
    ok, verdicts = run_lesson(lesson(tmp_path, "n = 0", "seen.append(1)\nn = 3"), [])
    assert ok and verdicts == [["not yet: count again", "right"]] and not list(wrong(verdicts))


@pytest.mark.parametrize(
    "stub, solution, message",
    [
        ("n = 3", "n = 3", "the untouched cell passes"),
        ("n = 0", "n = 4", "its solution is not yet: count again"),
        ("n = 0", "n = missing", "cannot be graded: NameError: name 'missing'"),
        ("n = 0", "m = 3", "its solution is not yet"),
    ],
)
def test_a_broken_exercise_is_found(tmp_path, stub, solution, message):
    assert message in " ".join(wrong(run_lesson(lesson(tmp_path, stub, solution), [])[1]))


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_lesson_that_was_solved_still_runs(path):
    "Under the exercises there is no cell that would fail once they are right."
    stubs = [e.stub for e in read_exercises(path)]
    code = [c for c in cells_of(path) if c["cell_type"] == "code"]
    code = ["".join(c["source"]) for c in code if c["id"] != "checkpoint-data"]
    for source in code[code.index(stubs[0]) :]:
        assert source in stubs or not re.search(r"\bassert |test_|check", source), source


def test_a_solution_takes_the_place_of_its_stub():
    one = Exercise(
        1, "def f(x): return 0\n\nx = 2\ncheck(f(x) == 4, 'twice')", "def f(x):\n    return 2*x"
    )
    assert solved(one) == "def f(x):\n    return 2*x\n\nx = 2\ncheck(f(x) == 4, 'twice')"
    assert [bool(v) for v in grade(one, {})] == [False, True]
    assert read_exercises(ROOT / "nbs/90_toolbox/11_exercises.ipynb")[0].solution.startswith(
        "hint ="
    )


ADVICE = yaml.safe_load((ROOT / "tests/fixtures/guidance.yaml").read_text(encoding="utf-8"))


def compact(code):
    "The code without what its layout decides: spaces, lines, trailing commas, kind of quotes."
    return re.sub(r"[\s,]+", "", code.replace("'", '"'))


@pytest.mark.parametrize(
    "group, least", dict(practice=15, speed=8, memory=9, why=6, trouble=10).items()
)
def test_advice_is_a_cell_that_runs(group, least):
    "Best practices, speed, memory, reasons and troubles are cells of lessons, run by tests."
    assert len({item["advice"] for item in ADVICE[group]}) == len(ADVICE[group]) >= least
    for item in ADVICE[group]:
        cells = json.loads((ROOT / f"nbs/{item['lesson']}.ipynb").read_text(encoding="utf-8"))[
            "cells"
        ]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        assert any(
            compact(item["cell"]) in compact(text) and not text.startswith(("#| export", "#| gpu"))
            for text in code
        ), item
