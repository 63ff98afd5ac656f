"""Words that plain English does without: where they occur, and how often they still may.

`python tests/support/idioms.py` lists each place; with --shrink it lowers the numbers of
tests/support/idioms.json to what is there now. It never raises one.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_suffix(".json")
IDIOMS = {  # name -> (pattern, what to write)
    "is no number": (r"\b(?:is|are|was|were) no numbers?\b", "is NaN, is not a number"),
    "numbers that are none": (r"\bnumbers? that (?:is|are) none\b", "NaN"),
    "whoever": (r"\bwho(?:so)?ever\b", "anyone who"),
    "by heart": (r"\bby heart\b", "memorized"),
    "beside": (r"\bbeside\b", "next to, compared with"),
    "few bits": (r"\bfew bits\b", "4-bit, quantized"),
    "foretold": (r"\bfore(?:told|tells?)\b", "predicted"),
    "go on": (r"\bgo(?:es|ing|ne)? on\b|\bwent on\b", "resume, continue"),
    "there is none": (r"\bthere (?:is|are) none\b", "missing, no ..."),
    "is said, are told": (r"\b(?:is|are) (?:said|told)\b", "name who reports what"),
    "what became of": (r"\b(?:becomes?|became|comes|came) of\b", "the result of, what happens to"),
    "anew": (r"\banew\b", "again, from the beginning"),
    "one's own": (r"\bone's own\b", "your own"),
    "amid, lest, in vain": (r"\b(?:amid|lest|in vain|naught|where(?:of|in))\b", "a modern word"),
}


def strings(code: str) -> Iterator[str]:
    "Docstrings, messages and other strings of several words in a module."
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def prose(notebook: str) -> Iterator[str]:
    "The markdown cells of a lesson."
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "markdown":
            yield "".join(cell["source"])


def texts() -> Iterator[tuple[str, Path, str]]:
    "(group, file, text) of everything that a person reads."
    groups = {
        "package": sorted((ROOT / "trainkit").rglob("*.py")),
        "tests and tools": [
            path
            for name in ("tests", "tools", "benchmarks")
            for path in ROOT.glob(f"{name}/**/*.py")
        ],
        "lessons": sorted((ROOT / "nbs").rglob("*.ipynb")),
        "pages": [
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/**/*.md"),
            ROOT / "benchmarks" / "README.md",
        ],
    }
    skipped = {
        Path(__file__),
        ROOT / "tests" / "test_style.py",
        ROOT / "CHANGELOG.md",
        ROOT / "trainkit" / "_modidx.py",
    }
    for group, paths in groups.items():
        for path in paths:
            if path in skipped or {"fixtures", ".ipynb_checkpoints"} & set(path.parts):
                continue
            text = path.read_text(encoding="utf-8")
            split = {".py": strings, ".ipynb": prose}.get(path.suffix, lambda page: [page])
            for part in split(text):
                yield group, path, part


def places() -> Iterator[tuple[str, str, str, str]]:
    "(group, idiom, file, the words around it) of each occurrence."
    patterns = {idiom: re.compile(pattern, re.I) for idiom, (pattern, _) in IDIOMS.items()}
    for group, path, text in texts():
        for idiom, pattern in patterns.items():
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 40) : match.end() + 40]
                yield group, idiom, path.relative_to(ROOT).as_posix(), " ".join(around.split())


def counts(occurrences: Iterable[tuple[str, str, str, str]]) -> dict[str, dict[str, int]]:
    "group -> idiom -> occurrences."
    number = Counter((group, idiom) for group, idiom, _, _ in occurrences)
    out: dict[str, dict[str, int]] = {}
    for (group, idiom), n in sorted(number.items()):
        out.setdefault(group, {})[idiom] = n
    return out


def allowed() -> dict[str, dict[str, int]]:
    return json.loads(ALLOWED.read_text(encoding="utf-8"))


def shrink() -> None:
    "Lower the allowed numbers to those that are there."
    current = counts(places())
    lowered = {
        group: {
            idiom: min(limit, current[group][idiom])
            for idiom, limit in limits.items()
            if idiom in current.get(group, {})
        }
        for group, limits in allowed().items()
    }
    ALLOWED.write_text(json.dumps(lowered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--shrink" in sys.argv:
        shrink()
    else:
        for _, idiom, path, words in places():
            print(f"{path}: {idiom}: … {words} …")
