"""The documentation as a web site, by Sphinx: `make site`, then open site/index.html.

`lay_out` copies what is to be read into one folder, in the order of the repository, so that links
between files stay links between pages: the lessons with their saved outputs (nothing is run), the
guides, the reference of tools/api.py, benchmarks, changelog. `build` hands the folder to Sphinx.
"""

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

import api
import course

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/trainkit-llm/trainkit/blob/main"
PAGES = {  # File -> page; the lessons and the reference come on top
    "README.md": "index.md",
    "nbs/README.md": "nbs/index.md",
    "nbs/glossary.md": "nbs/glossary.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "docs/guide.md": "docs/guide.md",
    "docs/comparison.md": "docs/comparison.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
TOCTREE = "\n```{{toctree}}\n:hidden:\n{options}\n{entries}\n```\n"
FRONT = """
::::{grid} 1 2 3 3
:gutter: 2

:::{grid-item-card} Course
:link: nbs/index
:link-type: doc
Notebooks that build each part of a language model, check it, and end with exercises.
:::
:::{grid-item-card} How-to guides
:link: docs/howto/index
:link-type: doc
One task a page: the commands, what you should see, and what to do when it fails.
:::
:::{grid-item-card} API reference
:link: api/index
:link-type: doc
Every public name, with its signature, its parameters, and the lesson that explains it.
:::
::::
"""


def toctree(entries, caption=""):
    options = f":caption: {caption}\n" if caption else ""
    return TOCTREE.format(options=options, entries="\n".join(entries))


def with_links(text, path, staged):
    """Links of the repository as links of the site.

    A README is the index of its folder; what is not among the `staged` files is shown where the
    source is; pictures from elsewhere (badges) become words.
    """
    text = re.sub(r"\[!\[([^]]*)\]\(https?:[^)]*\)\]", r"[\1]", text)

    def of(match):
        link, place = match[1], match[2] or ""
        there = os.path.normpath(os.path.join(os.path.dirname(path), link))
        is_page = there.endswith((".md", ".ipynb")) and there in staged
        if not is_page and not there.endswith((".png", ".svg")):
            return f"]({REPOSITORY}/{there}{place})"
        return f"]({re.sub(r'README.md$', 'index.md', link)}{place})"

    return re.sub(r"\]\((?!https?:|#|mailto:|data:)([^)#\s]+)(#[^)\s]+)?(?=\))\)", of, text)


def is_folded(cell):
    "Whether Jupyter shows the cell folded, or it begins with imports and defines nothing."
    text = course.source(cell)
    return cell["cell_type"] == "code" and (
        cell["metadata"].get("jupyter", {}).get("source_hidden", False)
        or cell.get("id", "").startswith(("imports-", "needs-"))
        or re.match(r"(?:import|from) ", text) is not None
        and not cell.get("outputs")
        and not re.search(r"^(?:def|class|with|test_|for) ?", text, re.M)
    )


def code_cell(cell):
    "A code cell for the site: without directives, folded or marked as exported."
    text = course.source(cell)
    note = re.match(r"(?:#\| ?(.*)\n)+", text + "\n")
    is_exported = note and note[1].startswith("export")
    text = text[note.end() :] if note else text
    is_import = re.search(r"^(import|from) ", text, re.M)
    prompt = "Imports" if is_import else "Setup and checks"
    outputs = [out for out in cell.get("outputs", []) if out.get("name") != "stderr"]
    metadata = {"tags": ["exported"] if is_exported else []}
    if is_folded(cell):
        metadata = {
            "tags": ["hide-input"],
            "mystnb": {"code_prompt_show": prompt, "code_prompt_hide": prompt},
        }
    return {**cell, "metadata": metadata, "outputs": outputs, "source": text.strip("\n")}


def lesson(path, reference, staged):
    """A lesson's notebook as the site shows it, as JSON.

    Folded cells that follow one another without an output are one; the first time that a page
    mentions a public name, it leads to the reference.
    """
    book, name, seen = course.read(path), course.name_of(path), set()
    cells = []
    for cell in book["cells"]:
        text, key = course.source(cell), cell.get("id", "")
        if key == "install" or not text.strip():
            continue
        if cell["cell_type"] == "code":
            new = code_cell(cell)
            last = cells[-1] if cells else {}
            if is_folded(cell) and "hide-input" in last.get("metadata", {}).get("tags", []):
                if not last["outputs"] and new["source"]:
                    new["source"] = f"{last['source']}\n\n{new['source']}".strip("\n")
                    new["metadata"] = last["metadata"]
                    cells.pop()
            if new["source"] or new["outputs"]:
                cells.append(new)
            continue
        if key == "badges":
            text = f"{{.source}}\n`nbs/{name}.ipynb` · " + text.replace(") [", ") · [")
        elif not course.written_here(cell, course.LINKS, course.MAP):
            text = reference.linked(text, seen)
        cells.append({**cell, "source": with_links(text, f"nbs/{name}.ipynb", staged)})
    return json.dumps({**book, "cells": cells}, ensure_ascii=False)


def lay_out(folder, only=None):
    "Everything that Sphinx reads, in `folder`; `only`: these lessons. Returns the lessons' names."
    shutil.rmtree(folder, ignore_errors=True)
    paths = {course.name_of(p): p for p in course.lessons()}
    paths = {name: path for name, path in paths.items() if only is None or name in only}
    texts = {there: (ROOT / here).read_text(encoding="utf-8") for here, there in PAGES.items()}
    sources = {there: here for here, there in PAGES.items()}
    main = course.road()

    def entry(name):
        title = course.title(course.read(paths[name]))
        return f"{'★ ' if name in main else ''}{title} <{name.rpartition('/')[2]}>"

    chapters = []
    for chapter, names in course.chapters().items():
        if names := [name for name in names if name in paths]:
            there = f"nbs/{chapter}/index.md"
            sources[there] = f"nbs/{chapter}/README.md"
            texts[there] = (ROOT / sources[there]).read_text(encoding="utf-8")
            texts[there] += toctree(map(entry, names))
            chapters.append(f"{chapter}/index")
    texts["nbs/index.md"] += toctree([*(map(entry, ["00_tour"])), *chapters, "glossary"])
    guides = sorted((ROOT / "docs" / "howto").glob("*.md"))
    for path in guides:
        there = path.relative_to(ROOT).as_posix()
        here, there = there, there.replace("README.md", "index.md")
        sources[there], texts[there] = here, path.read_text(encoding="utf-8")
    texts["docs/howto/index.md"] += toctree(
        ["../guide", *(p.stem for p in guides if p.stem != "README")]
    )
    texts["index.md"] = re.sub(r"(?m)^\[!\[.*\n", lambda _: FRONT, texts["index.md"], count=1)
    texts["index.md"] += toctree(
        [
            "Course <nbs/index>",
            "How-to guides <docs/howto/index>",
            "API <api/index>",
            "Benchmarks <benchmarks/index>",
            "Comparison <docs/comparison>",
            "Changelog <CHANGELOG>",
            "Contributing <CONTRIBUTING>",
        ]
    )
    staged = {*sources.values(), *(f"nbs/{name}.ipynb" for name in paths)}
    for there, text in texts.items():
        path = folder / there
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_links(text, sources[there], staged), encoding="utf-8")
    reference = api.Reference(paths)
    if only is not None:
        packages = {f"{api.PACKAGE}.{name[3:].partition('/')[0]}" for name in paths}
        reference.pages = {n: p for n, p in reference.pages.items() if n in packages}
    for name, path in paths.items():
        text = lesson(path, reference, staged)
        (folder / "nbs" / f"{name}.ipynb").write_text(text, encoding="utf-8")
    shutil.copytree(course.LESSONS / "images", folder / "nbs" / "images")
    for there, text in reference.written().items():
        path = folder / "api" / there
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(paths)


def build(folder, only=None, options=()):
    "The site in `folder`; returns its lessons. Work in progress lies in `build` next to it."
    from sphinx.cmd.build import main

    folder = Path(folder).resolve()
    work = folder.parent / "build" / "docs"
    names = lay_out(work / "source", only)
    shutil.rmtree(work / "html", ignore_errors=True)
    arguments = ["-c", ROOT / "docs", "-d", work / "doctrees", work / "source", work / "html"]
    if main(["-q", "-j", "2", *options, *map(str, arguments)]):
        sys.exit("Sphinx could not build the site")
    for left_over in (".buildinfo", "objects.inv"):
        (work / "html" / left_over).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(work / "html", folder)
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", default=ROOT / "site", type=Path)
    parser.add_argument("--only", nargs="*", help="these lessons, as 05_lora/01_lora")
    given = parser.parse_args()
    print(f"{len(build(given.folder, given.only))} lessons: open {given.folder}/index.html")
