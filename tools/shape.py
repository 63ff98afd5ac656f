"""The shape of the code: length and density of lines, unknown types, the road of a run.

    python tools/shape.py            # the figures and their limits; fails where one is missed,
                                     # and names the modules that miss it most
    python tools/shape.py PATH ...   # the lines of other packages, to compare with

Lines are those of the package that are neither blank nor only a comment. `__all__` lists, which
nbdev writes, count for no line over 100 columns. A syntax node is a node of Python's `ast`. A long
cell exports several functions or classes in more than 90 lines, with no text between them.
tools/road.py counts the road. tests/test_shape.py holds the limits of the lines and the types.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trainkit"
COLUMNS = 100
CELL = 90  # Lines of an exported cell with several definitions
LIMITS = {
    "characters a line": 50,
    "syntax nodes a line": 8.5,
    "% of lines over 100 columns": 1,
    "Any": 500,
    "trainer: Any": 0,
    "long cells": 2,
    "modules on the road": 24,
    "returns on the road": 57,
    "climbs on the road": 3,
}


class Lines(NamedTuple):
    "Totals over the files of a package."

    lines: int
    characters: int
    nodes: int
    long: int

    def figures(self) -> dict[str, float]:
        return {
            "characters a line": self.characters / self.lines,
            "syntax nodes a line": self.nodes / self.lines,
            "% of lines over 100 columns": 100 * self.long / self.lines,
        }


def add_up(files: Iterable[Lines]) -> Lines:
    return Lines(*map(sum, zip(*files, strict=True)))


def files_of(package: Path) -> list[Path]:
    "Its Python files, without generated ones."
    return [p for p in sorted(package.rglob("*.py")) if p.name != "_modidx.py"]


def exported_names(tree: ast.Module) -> set[int]:
    "The lines of `__all__`."
    return {
        line
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def measure_file(source: str) -> Lines:
    "Count the lines of a file."
    tree = ast.parse(source)
    names = exported_names(tree)
    lines = characters = long = 0
    for number, line in enumerate(source.splitlines(), 1):
        width = len(line.rstrip())
        if not width or line.lstrip().startswith("#"):
            continue
        lines += 1
        characters += width
        long += width > COLUMNS and number not in names
    return Lines(lines, characters, sum(1 for _ in ast.walk(tree)), long)


def unknown_types_of(source: str) -> dict[str, int]:
    "How often `Any` stands in a file, and how often as the type of a trainer; imports apart."
    lines = [line for line in source.splitlines() if not re.match(r"\s*(from|import) ", line)]
    return {
        "Any": sum(len(re.findall(r"\bAny\b", line)) for line in lines),
        "trainer: Any": sum("trainer: Any" in line for line in lines),
    }


def long_cells_of(source: str) -> int:
    "How many cells of notebooks a file contains that should be cut at their definitions."
    long = 0
    for cell in re.split(r"^# %% .*\n", source, flags=re.M)[1:]:
        definitions = re.findall(r"^(?:async )?(?:def|class) ", cell, re.M)
        long += len(definitions) > 1 and len(cell.strip().splitlines()) > CELL
    return long


class Shape(NamedTuple):
    "The figures of a package that are read from its text, and those of its modules."

    figures: dict[str, float]
    modules: dict[str, dict[str, float]]  # Path -> how far above a limit it alone is

    def worst(self, name: str, count: int = 5) -> str:
        "The modules that would have to change most for a figure."
        order = sorted(self.modules, key=lambda path: -self.modules[path][name])
        parts = [f"{path} by {self.modules[path][name]:.0f}" for path in order[:count]]
        return f"{name}, at most {LIMITS[name]}; modules above it: " + ", ".join(parts)


def shape_of(package: Path) -> Shape:
    "Read each file once. Sums per line count by what exceeds the limit times the lines."
    files = []
    types: Counter[str] = Counter()
    modules = {}
    for path in files_of(package):
        source = path.read_text(encoding="utf-8")
        lines = measure_file(source)
        unknown = unknown_types_of(source) | {"long cells": long_cells_of(source)}
        files.append(lines)
        types.update(unknown)
        above = {
            "characters a line": lines.characters - LIMITS["characters a line"] * lines.lines,
            "syntax nodes a line": lines.nodes - LIMITS["syntax nodes a line"] * lines.lines,
            "% of lines over 100 columns": lines.long,
        }
        modules[str(path.relative_to(package))] = above | unknown
    return Shape(add_up(files).figures() | types, modules)


def road() -> dict[str, int]:
    "The figures of tools/road.py, from a process of its own."
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "road.py"], capture_output=True, text=True, check=True
    )
    pairs = [line.split() for line in done.stdout.splitlines()]
    return {f"{name} on the road": int(count) for name, count in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="other packages")
    others = parser.parse_args().paths
    for path in others:
        files = [measure_file(file.read_text(encoding="utf-8")) for file in files_of(path)]
        figures = add_up(files).figures()
        print(f"{path}: " + ", ".join(f"{value:.1f} {name}" for name, value in figures.items()))
    if others:
        return 0
    shape = shape_of(PACKAGE)
    figures = {**shape.figures, **road()}
    for name, value in figures.items():
        verdict = "" if value <= LIMITS[name] else "  missed"
        print(f"{name:28} {value:8.4g}  at most {LIMITS[name]}{verdict}")
    for name, value in shape.figures.items():
        if value > LIMITS[name]:
            print(shape.worst(name))
    return int(any(value > LIMITS[name] for name, value in figures.items()))


if __name__ == "__main__":
    raise SystemExit(main())
