"Every lesson runs from a fresh kernel, in any order, offline; its slow cells on request."

import json
import re
import sys

import nbformat
import pytest
from support.processes import ROOT, in_child
from support.exercise_grading import run_lesson, wrong

LESSONS = sorted((ROOT / "nbs").rglob("*.ipynb"))


def name(path):
    "Chapter and lesson, as in `05_lora/01_lora`."
    return path.relative_to(ROOT / "nbs").with_suffix("").as_posix()


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


def lesson(path, flags):
    ok, verdicts = run_lesson(path, flags)
    for problem in wrong(verdicts):
        print(problem)
    return not ok or any(wrong(verdicts))


def sketched_lesson(path, flags):
    "Without the drawing of the curves of its runs; its own figures are drawn."
    from support.sketches import sketch_curves

    sketch_curves()
    return lesson(path, flags)


def run(path, tmp_path, *flags):
    done = in_child(lesson if flags else sketched_lesson, path, flags, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def late_imports():
    "What a lesson's process has imported before the lesson begins, and the server had not."
    from support.prewarm import LOADED

    print(*sorted({module.split(".")[0] for module in set(sys.modules) - LOADED}))


def test_a_lesson_begins_at_once(tmp_path):
    "`nbformat` took longer than most lessons; `support.prewarm` names what all of them share."
    done = in_child(late_imports, folder=tmp_path)
    assert {*done.stdout.split()} <= {"multiprocessing", "support", "test_lessons"}, done


# More than eight seconds: with the slow tests, until they are shorter. What the final project
# exports has its tests in recipes/test_final_project.py
HEAVY = {"06_savings", "05_final_project"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in HEAVY), id=name(p)) for p in LESSONS],
)
def test_lesson_runs(path, tmp_path):
    run(path, tmp_path)


SLOW = [p for p in LESSONS if any(source(c).startswith("#| slow") for c in cells(p))]


LONG = {"28_instruction_tuning", "02_free_gpu", "16_agents"}  # More than four minutes each


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.long] * (p.stem in LONG), id=name(p)) for p in SLOW]
)
def test_slow_cells_run(path, tmp_path):
    run(path, tmp_path, "slow")


def lesson_on_gpu(path):
    from support.fake_cuda import pretend_gpu

    pretend_gpu()
    return lesson(path, ())


# What the pretence cannot do: compile; leave nothing of a failed attempt in memory
BEYOND = {"12_static_shapes", "06_mixed_precision", "08_trainer", "16_faults"}


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in LESSONS if p.stem not in BEYOND], ids=name)
def test_lesson_runs_where_there_is_a_gpu(path, tmp_path):
    "Its models lie there after a training; see fake_cuda.py."
    if path.stem == "02_free_gpu":  # Would take the real model
        (tmp_path / path.name).write_text(
            path.read_text(encoding="utf-8").replace(
                r"size = \"gpu\" if torch.cuda.is_available() else \"tiny\"", r"size = \"tiny\""
            ),
            encoding="utf-8",
        )
        path = tmp_path / path.name
    done = in_child(lesson_on_gpu, path, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_lesson_is_fit_to_be_read(path):
    "Title, exercises, saved outputs that are small and clean, nothing that belongs to one machine."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)  # An editor may refuse to open what is not valid
    title = source(notebook["cells"][0])
    assert re.match(r"# \S.*\n\n> ?\S", title), (
        "a lesson begins with `# Title` and `> one sentence`"
    )
    outputs = [c["outputs"] for c in notebook["cells"] if c.get("outputs")]
    assert len(json.dumps(outputs)) < 150 * 1024, "outputs are part of the lesson, but small"
    assert path.stat().st_size < 200 * 1024, "a page that nobody can read in one sitting"
    assert "widgets" not in notebook["metadata"]
    assert any(source(c).startswith("## Try it") for c in notebook["cells"]), (
        "a lesson ends with exercises"
    )
    text = json.dumps([c.get("outputs", []) for c in notebook["cells"]])
    for stain in (
        "widget-view+json",
        "/home/",
        "/root/",
        "/Users/",
        "site-packages",
        "Traceback",
        '"name": "stderr"',
        "\\u001b[",
    ):
        assert stain not in text, f"an output holds {stain!r}"
    for cell in notebook["cells"]:
        assert not re.search(r"^\s*from trainkit\S* import \*", source(cell), re.M)
        if cell["cell_type"] == "code" and source(cell).startswith("#| export"):
            assert "%" != source(cell)[10:].strip()[:1]
