"Facts about the whole package: it equals its notebooks, imports point down, it stays light."

import ast
import configparser
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from support.processes import ROOT, in_child
from support.snapshots import compare

PACKAGE = ROOT / "trainkit"
NOTEBOOKS = sorted(
    p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
CHECKED_BY_HAND = {"__init__", "__main__", "_modidx", "_lazy", "_remarks"}

# Who may import whom: a package imports from those in its line, and from what those may import.
# Modules outside packages (config, files, ...) import from no package; the command line from all.
LAYERS = {
    "tokenizer": "",
    "data": "tokenizer",
    "model": "",
    "train": "model",
    "lora": "model",
    "quant": "model",
    "memory": "train lora quant",
    "engine": "tokenizer lora quant",
    "align": "data train lora eval",
    "eval": "data train",
    "interop": "align quant",
    "audit": "interop memory",
    "recipes": "memory eval interop engine audit",
    "widgets": "recipes",
    "cli": "widgets",
}


def module_name(path: Path) -> str:
    "`trainkit/lora/merge.py` -> `lora.merge`."
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def pages() -> dict[str, list[Path]]:
    "Module -> the notebooks that export to it, in order; the first has its `default_exp`."
    by_module: dict[str, list[Path]] = {}
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        own = notebook["metadata"].get("nbdev", {}).get("default_exp")
        cells = [
            "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
        ]
        named = {
            m[1] or own
            for text in cells
            if (m := re.match(r"#\| *exporti?(?:[ \t]+(\S+))?[ \t]*(?:\n|$)", text))
        }
        for module in sorted(named):
            assert module == own or module in by_module, (
                f"{path.name} adds to {module} before the notebook that begins it"
            )
            assert module != own or module not in by_module, (
                f"{path.name} begins {module}, which another notebook has begun"
            )
            by_module.setdefault(module, []).append(path)
    return by_module


def _for_types(node: ast.stmt) -> bool:
    "Whether it is a block of imports for type checks, which may also point up."
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imported(module: str) -> set[str]:
    "Modules of ours that a module imports to run, at its top or inside a function."
    package, modules = module.split(".")[:-1], set()
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            if not node.level and (node.module or "").split(".")[0] != "trainkit":
                continue
            target = [*start, *(node.module or "").removeprefix("trainkit").strip(".").split(".")]
            target = ".".join(filter(None, target))
            modules |= (
                {target}
                if target in pages()
                else {f"{target}.{a.name}".strip(".") for a in node.names}
            )
        elif isinstance(node, ast.Import):
            modules |= {
                a.name.removeprefix("trainkit.")
                for a in node.names
                if a.name.startswith("trainkit.")
            }
    return modules - {"__version__"}


def test_modules_are_what_the_notebooks_say(tmp_path):
    code = (
        'import sys, warnings; warnings.simplefilter("ignore")\n'
        "from nbdev.export import nb_export\n"
        "for p in sys.argv[2:]: nb_export(p, sys.argv[1])"
    )
    (tmp_path / "trainkit").mkdir()
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "trainkit"), *map(str, NOTEBOOKS)],
        check=True,
        cwd=ROOT,
    )
    here = re.compile(r'[^\s"\']*nbs/')
    for module in pages():
        new, old = (
            (d / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            for d in (tmp_path / "trainkit", PACKAGE)
        )
        assert here.sub("nbs/", new) == here.sub("nbs/", old), (
            f"trainkit/{module}.py is stale: run `make export`"
        )
    by_hand = {p.stem for p in PACKAGE.rglob("*.py") if module_name(p) not in pages()}
    assert by_hand <= CHECKED_BY_HAND, f"{by_hand - CHECKED_BY_HAND} come from no notebook"


def test_models_of_transformers_are_opened_one_at_a_time():
    "`from_pretrained` patches transformers and torch while it runs, so it is not thread-safe."
    for module in pages():
        text = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        if not re.search("from_pretrained|from_config", text):
            continue
        tree = ast.parse(text)
        calls = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config")
        ]
        locked = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.With)
            and any("making_model" in ast.dump(item.context_expr) for item in node.items)
            for line in range(node.lineno, node.end_lineno + 1)
        }
        bare = [line for line in calls if module == "files" or line not in locked]
        assert len(bare) == (module == "files"), (
            f"{module}: open_with and making_model of trainkit.files are for this"
        )


def test_imports_point_down():
    "Packages import only from those below them, and no module imports itself by way of others."

    def below(package: str) -> set[str]:
        return {p for word in LAYERS[package].split() for p in {word, *below(word)}}

    graph = {module: imported(module) for module in pages()}
    for module, others in graph.items():
        assert others <= set(pages()), (
            f"{module} imports {others - set(pages())}, which no notebook writes"
        )
        package = module.split(".")[0]
        packages = {other.split(".")[0] for other in others if "." in other} - {package}
        may = below(package) if package in LAYERS else set()
        assert packages <= may, f"{module} may not import from {packages - may}"

    def circle(module: str, above: tuple = ()) -> None:
        assert module not in above, f"{' imports '.join([*above, module])}: a circle"
        if module not in clear:
            for other in graph[module]:
                circle(other, (*above, module))
            clear.add(module)

    clear: set[str] = set()
    for module in graph:
        circle(module)


def test_no_public_name_stands_in_two_modules():
    "Commands of the shell apart: they are called by their command's name."
    homes: dict[str, set[str]] = {}
    for module in pages():
        tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        names = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        names += [
            t.id
            for n in tree.body
            if isinstance(n, ast.Assign)
            for t in n.targets
            if isinstance(t, ast.Name)
        ]
        for name in names:
            if not name.startswith("_") and name != "T" and module not in COMMANDS:
                homes.setdefault(name, set()).add(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}
    packages = {path.name: path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    for name, path in packages.items():
        public, modules = (
            set(stub_names(path / "__init__.pyi")),
            {p.stem for p in path.glob("*.py")},
        )
        assert not public & modules, (
            f"{name} exports {public & modules}, which are the names of modules"
        )


COMMANDS = {
    "cli",
    "recipes.commands",
    "recipes.data_commands",
    "recipes.memory_commands",
}  # modules of typer commands


def stub_names(path: Path) -> list[str]:
    "What a package's `__init__.pyi` says it exports, modules apart."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        a.name for n in tree.body if isinstance(n, ast.ImportFrom) and n.module for a in n.names
    ]


@pytest.mark.parametrize(
    "package", ["trainkit", *(f"trainkit.{name}" for name in LAYERS if name != "cli")]
)
def test_public_names_are_there(package):
    "Each name of a stub can be imported and completed, and is what its module holds."
    import importlib

    kit = importlib.import_module(package)
    stub = Path(kit.__file__).with_suffix(".pyi")  # type: ignore
    assert (names := stub_names(stub)) and set(names) <= set(dir(kit))
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                thing = getattr(kit, alias.name)
                module = importlib.import_module(f"{package}.{node.module or alias.name}")
                assert thing is (getattr(module, alias.name) if node.module else module), alias.name
                assert alias.asname == alias.name, "a type checker takes `x as x` for public"
    if package == "trainkit":
        assert 35 <= len(names) <= 50
    with pytest.raises(AttributeError):
        kit.no_such_name  # noqa: B018


@pytest.mark.parametrize("module", sorted(pages()))
def test_modules_stand_alone(module):
    "A module uses no unexported name, no development tool, and no heavy library at its top."
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    top = {
        n.module.split(".")[0]
        if isinstance(n, ast.ImportFrom) and n.module
        else a.name.split(".")[0]
        for n in tree.body
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for a in n.names
    }
    heavy = {
        "peft",
        "trl",
        "bitsandbytes",
        "ipywidgets",
        "wandb",
        "trackio",
        "matplotlib",
        "numba",
        "datasets",
        "tiktoken",
    }
    if module not in ("interop.hf", "interop.trl"):
        heavy.add("transformers")
    assert not top & heavy, f"{module} imports {top & heavy} at its top"
    everywhere = {
        (n.module or "") if isinstance(n, ast.ImportFrom) else a.name
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for a in n.names
    }
    assert not {m.split(".")[0] for m in everywhere} & {"fastcore", "nbdev", "execnb"}
    assert ast.get_docstring(tree), f"{module} does not say what it is for"


def test_docstrings_name_what_is_there():
    "A module of several lessons begins with its own line, and docstrings name what exists."
    texts = {
        module: (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for module in pages()
    }
    docs = {module: text.split('"""', 2)[1] for module, text in texts.items()}
    words = {
        word for text in texts.values() for word in re.findall(r"\w+", text.split('"""', 2)[2])
    }  # of the code, also what it calls in other libraries
    for module, doc in docs.items():
        sentences = [
            "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
            .split("\n>")[1]
            .strip()
            for path in pages()[module]
        ]
        assert len(sentences) == 1 or doc.splitlines()[0] not in sentences, (
            f"{module} begins with the sentence of a lesson, see CONTRIBUTING.md"
        )
        for name in re.findall(r"`([A-Za-z_]\w+)[`(]", doc):
            assert name in words, f"{module} has no {name}"
        for path in re.findall(r"`trainkit\.([\w.]+)`", doc):
            assert path in texts or path in LAYERS, (
                f"{module} names trainkit.{path}, which is not there"
            )


def test_ruff_finds_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "nbs", "trainkit", "tests", "benchmarks", "tools"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def fresh(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def test_import_needs_no_torch():
    "Neither the import nor a look at what is there loads anything heavy."
    heavy = "{'torch', 'numpy', 'transformers', 'accelerate', 'pydantic', 'yaml'}"
    assert (
        fresh(f"import sys, trainkit; dir(trainkit); print(sorted({heavy} & set(sys.modules)))")
        == "[]"
    )
    assert fresh(f"import sys, trainkit; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_a_class_of_another_system_is_answered_with_ours():
    import importlib

    import trainkit

    for name, answer in trainkit._ELSEWHERE.items():
        with pytest.raises(
            ImportError, match=f"{name} is a (class|name) of another system. Here trainkit"
        ):
            exec(f"from trainkit import {name}")
        for path in re.findall(r"(trainkit(?:\.\w+)?)\.(\w+)", answer):
            assert hasattr(importlib.import_module(path[0]), path[1]), answer
    assert not hasattr(trainkit, "Anything")


def test_help_needs_no_torch():
    code = (
        "import sys; sys.argv = ['trainkit', '--help']\nfrom trainkit.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert fresh(code).splitlines()[-1] == "False False"


TYPOS = {  # what is typed -> what the answer names
    "train trian.learning_rate=1": "trian.learning_rate",
    "train train.learning_rte=1": "learning_rte",
    "train --lerning-rate 3": "Did you mean 'learning_rate'",
    "train optim.learning_rate=fast": "optim.learning_rate = 'fast'",
    "train --lr fast": "optim.learning_rate (--lr) = 'fast'",
    "train --epochs many": "--epochs",
    "train --method stf": "method (--method) = 'stf': must be one of",
    "train --preset minimal": "preset (--strategy) = 'minimal'",
    "train dpo.loss_type=sigmod": "must be among sigmoid, hinge",
    "train optim.optim=adamv": "optim.optim = 'adamv'",
    "train train.max_steps=-7 sampling.top_p=3": "sampling.top_p = 3",
    "train typo.yaml": "trian (line 2): unknown key",
    "train value.yaml": "lora.r = 'many' (line 2)",
    "train value.yaml --dry-run": "lora.r = 'many' (line 2)",
    "train --method sft --dataset rows.jsonl": "--model FOLDER (init_from in a config)",
    "train --model x --method sft --dataset rows.csv": "'rows.csv': there is no such file",
    "train --model nowhere --method sft": "'nowhere' is not a folder here",
    "train train.maxsteps=3": "'max_steps'",
    "train trian.max_steps=3": "Did you mean 'train.max_steps'?",
    "launch trian.learning_rate=1": "Did you mean 'optim.learning_rate'?",
    "launch typo.yaml": "trian: unknown key",
    "train --method dpo": "--model FOLDER (init_from in a config)",
    "config show optim.lr_rate=1": "optim.lr_rate: unknown key",
    "train --help": "--strategy",
    "--help": "doctor",
}
TYPE = """
import contextlib, io, json, shlex, sys
from trainkit.cli import main

for line in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        sys.argv = ["trainkit", *shlex.split(line)]
        try:
            main()
        except SystemExit:
            pass
    print(json.dumps([out.getvalue(), [m for m in ("torch", "transformers") if m in sys.modules]]))
"""


def test_a_typo_is_answered_before_torch_is_loaded(tmp_path):
    "Loading torch takes seconds, and a wrong knob is known without it."
    (tmp_path / "typo.yaml").write_text("method: pretrain\ntrian:\n  learning_rate: 1\n")
    (tmp_path / "value.yaml").write_text("method: lora\nlora: {r: many}\ninit_from: x\n")
    env = {k: v for k, v in os.environ.items() if k != "TRAINKIT_PROFILE"} | {"COLUMNS": "200"}
    words = [sys.executable, "-c", TYPE, json.dumps([*TYPOS])]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (line, part), (text, loaded) in zip(TYPOS.items(), answers, strict=True):
        assert part in " ".join(text.split()), (line, text)
        assert not loaded, (line, loaded)


def test_profiles_are_the_same_in_the_package():
    assert (ROOT / "settings.ini").read_text() == (PACKAGE / "settings.ini").read_text(), (
        "run `make export`"
    )
    ini = configparser.ConfigParser()
    ini.read(ROOT / "settings.ini")
    assert {s.split(".")[0] for s in ini.sections()} == {"quick", "full"}


def test_readme_figures_are_in_the_benchmarks():
    "Each figure of the table of measurements is in benchmarks/README.md."
    readme, benchmarks = (
        path.read_text(encoding="utf-8")
        for path in (ROOT / "docs" / "comparison.md", ROOT / "benchmarks" / "README.md")
    )
    rows = re.findall(r"(?m)^\| .* \|$", readme.split("## What is measured")[1].split("\n## ")[0])[
        2:
    ]
    figures = {row: re.findall(r"\d[\d,]*(?:\.\d+)?", row.split("|")[-2]) for row in rows}
    cells = {
        cell.strip()
        for line in benchmarks.splitlines()
        if line.startswith("|")
        for cell in re.split(r"[|(]", line)
    }
    assert rows and all(figures[row] or "bit" in row for row in rows)
    missing = {
        row: [
            f
            for f in numbers
            if not any(re.fullmatch(rf"{re.escape(f)}0?", cell) for cell in cells)
        ]
        for row, numbers in figures.items()
    }
    assert not any(missing.values()), {row: numbers for row, numbers in missing.items() if numbers}
    panel = re.search(r"\| speed with a panel / without \| ([\d.]+) \|", benchmarks)[
        1
    ]  # in another table stands the same number
    assert f"| {panel} of the speed |" in readme


def run_code(code, folder):
    os.chdir(folder)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_readme_code_runs(page, tmp_path):
    "The Python of the README and of the guide runs as it is, in its order."
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    code = "\n".join(blocks).replace(
        "name='mine')",
        (
            "name='mine')\n"
            "config.train.max_steps = 2\n"
            "config.data.max_chars = 100_000\n"
            "config.tokenizer.vocab_size = 400"
        ),
    )
    done = in_child(run_code, code, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "import " in done.stdout
    if "run(config)" in code:
        assert (tmp_path / "runs" / "mine" / "model" / "model.safetensors").exists()


def test_readme_is_short():
    "A stranger reads it in a minute."
    assert len((ROOT / "README.md").read_bytes()) <= 8000


def test_readme_commands_exist():
    "Each `make` target and `trainkit` command that the README names is there."
    readme = "".join(
        (ROOT / page).read_text(encoding="utf-8")
        for page in ("README.md", "docs/guide.md", "CONTRIBUTING.md")
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert (
        set(re.findall(r"(?m)^make ([a-z-]+)", readme))
        | set(re.findall(r"`make ([a-z-]+)", readme))
        <= targets
    )
    from typer.main import get_command
    from trainkit.cli import app

    shell = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.S))
    commands = get_command(app).commands  # type: ignore
    for first, second in set(re.findall(r"(?m)^trainkit ([a-z-]+)(?: ([a-z]+)\b)?", shell)):
        command = commands.get(first)
        assert command, first
        assert not hasattr(command, "commands") or second in command.commands, f"{first} {second}"


def test_repository_is_named_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    url = project["urls"]["Repository"]
    assert project["name"] == "trainkit-llm"
    texts = [*NOTEBOOKS, *PACKAGE.rglob("*.py"), ROOT / "README.md", ROOT / "Makefile"]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'pip install (-\S+ )*["\']?trainkit\b(?!-llm)', text), (
            f"{path.name}: the bare name belongs to somebody else"
        )
        if path.suffix == ".py" and path.name != "_modidx.py":
            assert url not in text, f"{path.name} repeats the repository URL"


def test_expected_failures_are_really_run():
    "`expect_fail` of fastcore is a context manager: a lambda inside its brackets is not called."
    for path in (*NOTEBOOKS, *(ROOT / "tests").rglob("*.py")):
        assert f"expect_fail({'lambda'}" not in path.read_text(encoding="utf-8"), path.name


def test_no_machine_is_named():
    for path in [
        *NOTEBOOKS,
        *ROOT.glob("*.md"),
        *ROOT.glob("nbs/**/*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("benchmarks/*"),
    ]:
        if path.is_file():
            assert not re.search(
                r"(?<![\w.])/(work|farm|root|home)/", path.read_text(encoding="utf-8")
            ), path


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_profiles_make_a_whole_run_config(profile):
    "Every section of settings.ini fits its class, and a run can be planned from it."
    from trainkit.config import from_profile
    from trainkit.recipes.config import RunConfig

    config = from_profile(RunConfig, profile)
    assert config.train.max_steps > 0 and config.data.max_length <= config.model.max_seq_len


def test_a_run_refuses_what_was_written_to_no_knob(tmp_path):
    "Python allows any attribute; a learning rate in the wrong group must not be ignored."
    from trainkit.config import ConfigError, from_profile
    from trainkit.recipes.config import RunConfig
    from trainkit.recipes.runner import run

    def message_of(change):
        config = from_profile(RunConfig, "quick", runs_dir=str(tmp_path), name="mine")
        change(config)
        with pytest.raises(ConfigError) as error:
            run(config)
        return str(error.value)

    assert "train.learning_rate: is optim.learning_rate" in message_of(
        lambda c: setattr(c.train, "learning_rate", 0.1)
    )
    assert "data.max_lenght: unknown key. Did you mean 'max_length'?" in message_of(
        lambda c: setattr(c.data, "max_lenght", 64)
    )
    assert "train.report_to: is report_to, at the top" in message_of(
        lambda c: setattr(c.train, "report_to", ["wandb"])
    )
    assert "must be one of" in message_of(lambda c: setattr(c.optim, "optim", "adamw_bnb_8bit"))
    assert "train.max_steps" in message_of(lambda c: setattr(c.train, "max_steps", "ten"))
    assert "lr" in message_of(lambda c: setattr(c, "lr", 1e-3))
    assert not [*tmp_path.iterdir()]


def test_every_error_reaches_another_process_as_it_was_said(tmp_path):
    import builtins
    import copy
    import importlib
    import pickle
    from trainkit.config import Problem

    log = tmp_path / "stderr.log"
    log.write_text("CUDA is gone")
    words = {
        "ConfigError": ([Problem("cups", 0, "must be ≥ 1")], "Shop"),
        "TrainingError": ("loss is nan", 7, "checkpoint-6"),
        "ProcessFailed": (1, "it fell", "Traceback"),
        "WorkerFailed": (2, -9, log, 1),
        "NothingToLearn": (),
        "NotYet": ("there is no file", "write it"),
        "StepTooBig": ("too big",),
        "StopNow": (),
        "_Gone": ("ended",),
        "_Unknown": (),
        "_Complete": (),
        "QueueFull": ("64 requests wait",),
        "ConstraintError": ("too slow",),
        "APIError": (404, "no such model"),
        "ServerError": ("no such model", 404, "model_not_found"),
        "FieldError": ("input", "must be a text"),
        "UnsupportedModelError": ("none of ours",),
    }

    def raised(name):
        return isinstance(kind := vars(builtins).get(name), type) and issubclass(
            kind, BaseException
        )

    classes = [
        getattr(importlib.import_module(f"trainkit.{module_name(path)}"), node.name)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(base, ast.Name) and (raised(base.id) or base.id in words)
            for base in node.bases
        )
    ]
    assert {kind.__name__ for kind in classes} == set(words)
    errors = [kind(*words[kind.__name__]) for kind in classes]
    log.unlink()
    for error in errors:
        error.add_note("(at step 7)")
        for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
            assert other.__notes__ == ["(at step 7)"]


def functions(module, names):
    "Its public functions, and the methods of its public classes, by name."
    for name in names:
        found = vars(module).get(name)
        if inspect.isfunction(found):
            yield name, found
        elif inspect.isclass(found) and found.__module__ == module.__name__:
            for key, method in vars(found).items():
                method = getattr(method, "__func__", method)
                if inspect.isfunction(method):
                    yield f"{name}.{key}", method


def test_no_default_changes_unnoticed():
    "Every number and word that a public function takes where it is given none."
    lines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem in CHECKED_BY_HAND:
            continue
        module = importlib.import_module(f"trainkit.{module_name(path)}")
        for name, function in functions(module, getattr(module, "__all__", ())):
            if function.__code__.co_filename != str(path):
                continue  # Written by a dataclass, or from elsewhere
            defaults = [
                f"{parameter.name}={parameter.default!r}"
                for parameter in inspect.signature(function).parameters.values()
                if isinstance(parameter.default, (int, float, str))
            ]
            if defaults:
                lines.append(f"{module_name(path)}.{name}: {', '.join(defaults)}\n")
    compare("".join(lines), "defaults.txt")


def _environment_of(name):
    print(os.environ.get(name, "unset"))


def test_a_fresh_process_sees_the_environment_of_its_test(tmp_path, monkeypatch):
    "Also what was set or removed after the server of fresh processes had started."
    monkeypatch.delenv("TRAINKIT_LATE", raising=False)
    for value in ("one", "two", None):
        if value:
            monkeypatch.setenv("TRAINKIT_LATE", value)
        else:
            monkeypatch.delenv("TRAINKIT_LATE")
        ended = in_child(_environment_of, "TRAINKIT_LATE", folder=tmp_path)
        assert ended.stdout.strip() == (value or "unset"), ended.stderr


def _sources():
    "Every file and cell that imports the package, apart from the package."
    for folder in ("tests", "benchmarks", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path, path.read_text(encoding="utf-8")
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                yield path, re.sub(r"(?m)^\s*[%!].*$", "", source)


def _stored_names(path):
    "Everything that a module defines or imports, wherever it stands."
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def _missing_imports(source, stored):
    "`module: name` for each import from the package that would fail."
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("trainkit."):
            continue
        place = ROOT.joinpath(*node.module.split("."))
        files = [place.with_suffix(".py"), place / "__init__.pyi"]
        names = next((stored(file) for file in files if file.exists()), set())
        for alias in node.names:
            if alias.name not in names and not (place / f"{alias.name}.py").exists():
                yield f"{node.module}: {alias.name}"


def test_everything_that_is_imported_is_there():
    "Also in benchmarks, slow tests and slow cells, which are rarely run."
    stored = cache(_stored_names)
    missing = [
        (path.relative_to(ROOT).as_posix(), name)
        for path, source in _sources()
        if "from trainkit." in source
        for name in _missing_imports(source, stored)
    ]
    assert not missing
    wrong = "from trainkit.quant.calibration import METHODS"
    assert [*_missing_imports(wrong, stored)] == ["trainkit.quant.calibration: METHODS"]


def test_a_question_mark_shows_what_the_parameters_mean(monkeypatch):
    "`?` and Shift-Tab read docstrings; the comments at the parameters stand below it."
    import IPython.core.oinspect

    import trainkit.lora
    from trainkit._lazy import attach_stub

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    find, _, _ = attach_stub("trainkit.lora", trainkit.lora.__file__)
    add_lora, config = find("add_lora"), find("LoRAConfig")
    page = IPython.core.oinspect.getdoc(add_lora)
    assert page.startswith(add_lora.__doc__) and "\n    model: " in page and "\nReturns\n" in page
    assert "\n    r: Rank of the update\n" in IPython.core.oinspect.getdoc(config)

    class Own(config):
        "Another one."

    assert IPython.core.oinspect.getdoc(Own) == "Another one."


def test_help_in_a_plain_interpreter_shows_what_the_parameters_mean():
    lines = (
        "import trainkit, trainkit.train",
        "trainkit.Trainer is trainkit.train.Trainer",
        "print(trainkit.Trainer.__doc__, trainkit.Trainer.train.__doc__)",
        "print(trainkit.BPETokenizer.train.__doc__)",
    )
    page = subprocess.run(
        [sys.executable, "-iq"], input="\n".join(lines), capture_output=True, text=True, check=True
    ).stdout
    for words in ("    train_batches: A list", "    resume: True: from", "    vocab_size: "):
        assert page.count(f"\n{words}") == 1, words
