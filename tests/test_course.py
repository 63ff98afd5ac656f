"The index of the course and its links."

import inspect
import json
import re
import sys
from contextlib import suppress

import pytest
from support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import course  # noqa: E402


def test_the_index_and_the_links_are_up_to_date():
    assert not [path.relative_to(ROOT).as_posix() for path in course.stale()], "run `make index`"


def test_pictures_are_small_and_say_what_they_show():
    "One for each lesson of the main road and for each chapter, and none for others."
    pictures = sorted((course.LESSONS / "images").glob("*.svg"))
    of_lessons = {course.picture_name(name) for name in course.road()}
    of_chapters = {f"chapter_{folder}" for folder in course.DIAGRAMS}
    assert {p.stem for p in pictures} == of_lessons | of_chapters
    for path in pictures:
        text = path.read_text(encoding="utf-8")
        assert len(text.encode()) < (2000 if path.stem in of_lessons else 5000) and re.search(
            r"<title>\w[^<]{10,}</title>", text
        ), path.name


def test_a_diagram_names_lessons_that_there_are():
    "Each chapter but the toolbox has one, and each of its lessons stands in it once at most."
    assert {*course.CHAPTERS} - {*course.DIAGRAMS} == {"90_toolbox"}
    for folder, names in course.chapters().items():
        numbers = []
        for _, lessons in (stage for row in course.DIAGRAMS.get(folder, []) for stage in row):
            for part in filter(None, lessons.split(", ")):
                first, _, last = part.partition("–")
                numbers += range(int(first), int(last or first) + 1)
        there = {int(name.split("/")[1].split("_")[0]) for name in names}
        assert len(numbers) == len({*numbers}) and {*numbers} <= there, folder
        assert folder not in course.DIAGRAMS or {*numbers} == there, (folder, there - {*numbers})


def test_every_lesson_is_reached():
    "Links from the tour reach the main road, chapters the rest, and every link has a page."
    near, names = course.neighbours(), {course.name_of(p) for p in course.lessons()}
    walk, here = [], "00_tour"
    while here:
        walk, here = [*walk, here], near[here][1]
    assert walk == course.road() and len(walk) == len(course.ROAD)
    assert {n for chapter in course.chapters().values() for n in chapter} == names - {"00_tour"}
    assert set(course.chapters()) == set(course.CHAPTERS)
    pages = {
        path: "\n".join(
            course.source(c) for c in course.read(path)["cells"] if c["cell_type"] == "markdown"
        )
        for path in course.lessons()
    }
    pages |= {
        path: path.read_text(encoding="utf-8")
        for path in (
            *course.LESSONS.rglob("*.md"),
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/**/*.md"),
            *ROOT.glob("benchmarks/*.md"),
        )
    }
    for path, text in pages.items():
        for link, place in re.findall(
            r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#([^)\s]+))?",
            re.sub(r"(?s)```.*?```|`[^`]*`", "", text),
        ):
            there = (path.parent / link).resolve()
            assert there.exists(), f"{path.relative_to(ROOT)} leads to {link}, which is not there"
            assert there != path or place or path.stem == "00_tour", (
                f"{path.relative_to(ROOT)} leads to itself"
            )
            headings = [
                line.lstrip("#").strip().replace(" ", "-")
                for line in pages.get(there, "").splitlines()
                if line.startswith("#")
            ]
            assert not place or place in headings, (
                f"{path.relative_to(ROOT)} leads to {link}#{place}, which is no heading there"
            )


def test_the_index_says_of_every_lesson_what_it_enables():
    "Each lesson is listed once per page with its sentence, reading time and CPU time."
    index = (course.LESSONS / "README.md").read_text(encoding="utf-8")
    for path in course.lessons():
        name, book = course.name_of(path), course.read(path)
        assert f"| {course.sentence(book)} | {course.minutes(book)} min |" in index, name
        if path.parent != course.LESSONS:
            assert f"]({path.name})" in (path.parent / "README.md").read_text(encoding="utf-8"), (
                name
            )
    measured = course.read(course.SECONDS)
    assert {course.plain_name(course.name_of(p)) for p in course.lessons()} == set(measured), (
        "python tools/course.py --measure"
    )


def test_a_notebook_with_an_old_link_is_seen(tmp_path, monkeypatch):
    "A new title makes the links to it stale, and writing them again is enough."
    for name in ("00_tour", "90_toolbox/01_files", "90_toolbox/02_config_fields"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.ipynb").write_bytes((course.LESSONS / f"{name}.ipynb").read_bytes())
    monkeypatch.setattr(course, "LESSONS", tmp_path)

    def write():
        for path, text in course.stale().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    write()
    assert not course.stale()
    book = json.loads((tmp_path / "90_toolbox/02_config_fields.ipynb").read_text(encoding="utf-8"))
    book["cells"][0]["source"] = ["# Buttons\n", "\n", "> One sentence"]
    (tmp_path / "90_toolbox/02_config_fields.ipynb").write_text(
        json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    stale = {p.relative_to(tmp_path).as_posix() for p in course.stale()}
    assert stale == {
        "90_toolbox/01_files.ipynb",
        "README.md",
        "90_toolbox/README.md",
    }  # the neighbour, and the indexes
    write()
    assert (
        "[Buttons](02_config_fields.ipynb) →"
        in (tmp_path / "90_toolbox/01_files.ipynb").read_text(encoding="utf-8")
        and not course.stale()
    )


def test_what_the_readme_says_of_others_is_so():
    "What TRL lacks, where it is installed; and each figure of the README stands in the benchmarks."
    import importlib.metadata
    import importlib.util
    from pathlib import Path

    table = (
        (ROOT / "docs" / "comparison.md")
        .read_text(encoding="utf-8")
        .partition("## What is measured")[2]
    )
    there = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    figures = re.findall(r"(?<![\w.])\d[\d,]*\.\d+|\d,\d{3}", table)
    assert len(figures) > 12 and not [f for f in figures if f not in there]
    if (spec := importlib.util.find_spec("trl")) is None or importlib.metadata.version(
        "trl"
    ) != "1.16.0":
        return
    code = "\n".join(
        p.read_text(encoding="utf-8")
        for p in Path(next(iter(spec.submodule_search_locations))).rglob("*.py")
    )
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)Trainer`", page))
    assert not re.search(r"ipywidgets|BpeTrainer|train_new_from_iterator|gguf", code, re.I)
    assert len(named) > 5 and all(f"class {name}Trainer(" in code for name in named)


def test_lab_hands_options_on_to_jupyterlab(tmp_path, monkeypatch):
    "`trainkit lab --no-browser`: the option is not taken for the name of a folder."
    from trainkit import cli, course

    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "")
    monkeypatch.setattr(course.os, "execv", lambda program, words: started.append(words[5:]))
    for words in ([], ["--no-browser", "--port", "9000"], ["mine"], ["mine", "--no-browser"]):
        monkeypatch.setattr(sys, "argv", ["trainkit", "lab", *words])
        with suppress(SystemExit):
            cli.main()
    lessons, mine = ([name, f"{name}/README.md"] for name in ("trainkit-lessons", "mine"))
    assert started == [
        lessons,
        [*lessons, "--no-browser", "--port", "9000"],
        mine,
        [*mine, "--no-browser"],
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "trainkit-lessons"]


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("pip", [True, False])
def test_missing_data_is_installed_where_there_is_a_pip(pip, code, monkeypatch, capsys):
    "One call of pip without dependencies, its exit status passed on; advice where pip is missing."
    from trainkit import cli, course

    calls = []
    monkeypatch.setattr(course, "missing_data", lambda: ["one==1", "two==2"])
    monkeypatch.setattr(course, "find_spec", lambda name: object() if pip else None)
    monkeypatch.setattr(course.subprocess, "call", lambda words: calls.append(words) or code)
    monkeypatch.setattr(sys, "argv", ["trainkit", "course", "install"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    call = [sys.executable, "-m", "pip", "install", "--no-deps", "one==1", "two==2"]
    assert calls == [call] * pip
    assert end.value.code == (code if pip else 1)
    assert ("has no pip" in capsys.readouterr().err) != pip


def test_source_that_a_lesson_shows_is_todays():
    "Cells that print methods of `Trainer` keep their output, which a later change leaves behind."
    from trainkit import Trainer

    shown = 0
    for path in course.lessons():
        for cell in course.read(path)["cells"]:
            source = "".join(cell["source"])
            if source.startswith("print(inspect.getsource(Trainer"):
                methods = re.findall(r"getsource\(Trainer\.(\w+)\)", source)
                today = "".join(inspect.getsource(getattr(Trainer, name)) for name in methods)
                [output] = cell["outputs"]
                name = f"{course.name_of(path)}, {', '.join(methods)}"
                assert "".join(output["text"]) == today + "\n", f"{name}: run the cell again"
                shown += len(methods)
    assert shown > 5
