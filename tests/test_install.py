"The wheel: what it holds, and that it works away from the clone."

import json
import os
import subprocess
import sys
import zipfile

import pytest
from support.processes import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder, source = (tmp_path_factory.mktemp(n) for n in ("wheel", "source"))
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "trainkit",
        "nbs",
    ):  # a copy, so that no build folder is left in the clone
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(source),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("trainkit_llm-*.whl"))


def test_wheel_holds_lessons_and_profiles(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        f"trainkit/lessons/{p.relative_to(ROOT / 'nbs')}"
        for kind in ("ipynb", "md", "svg", "png")
        for p in (ROOT / "nbs").rglob(f"*.{kind}")
    } <= names
    assert {
        p.relative_to(ROOT).as_posix()
        for kind in ("py", "pyi")
        for p in (ROOT / "trainkit").rglob(f"*.{kind}")
    } <= names
    assert {"trainkit/settings.ini", "trainkit/py.typed", "trainkit/charts.mplstyle"} <= names
    assert {"trainkit/widgets/studio.ipynb", "trainkit/widgets/studio.html.j2"} <= names


def test_wheel_works_elsewhere(wheel, tmp_path):
    "Unpacked into an empty folder: import, profiles, doctor, lessons."
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "TRAINKIT_PROFILE": "quick"}
    code = (
        "import json, trainkit\n"
        "from trainkit.config import from_profile\n"
        "from trainkit.recipes.config import RunConfig\n"
        "from trainkit import BPETokenizer\n"
        "print(json.dumps([trainkit.__file__, from_profile(RunConfig).model.d_model, "
        "BPETokenizer.__module__]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    where, width, module = json.loads(done.stdout.splitlines()[-1])
    assert str(tmp_path) in where and width == 192 and module == "trainkit.tokenizer.bpe_tokenizer"
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", "lab", "course", "--copy-only"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "course").rglob("*.ipynb"))) == len(
        list((ROOT / "nbs").rglob("*.ipynb"))
    )


def test_tiktoken_is_named_where_it_is_missing(monkeypatch):
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizer = BPETokenizer.train(["one, two, one, two"], vocab_size=260)
    with pytest.raises(ImportError, match="pip install tiktoken"):
        tokenizer.to_tiktoken()
    with pytest.raises(FileNotFoundError, match=r"tiktoken\.get_encoding\('cl100k_base'\)"):
        BPETokenizer.from_tiktoken("cl100k_base")
