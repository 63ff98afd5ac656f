"The lines of the package stay short and plain, and few of its types unknown; see tools/shape.py."

import sys

import pytest
from support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import shape


@pytest.fixture(scope="module")
def package():
    return shape.shape_of(shape.PACKAGE)


@pytest.mark.parametrize(
    "name",
    [
        "characters a line",
        "syntax nodes a line",
        "% of lines over 100 columns",
        "Any",
        "trainer: Any",
        "long cells",
    ],
)
def test_the_shape_keeps_its_limits(package, name):
    value = package.figures[name]
    assert value <= shape.LIMITS[name], f"{value:.4g} {package.worst(name)}"


def test_lines_and_types_are_counted():
    source = "\n".join(
        [
            "from typing import Any",
            "",
            "# A comment is no line",
            "__all__ = [" + ", ".join(f"'name_{i}'" for i in range(20)) + "]",
            f"text = '{'a' * 100}'",
            "def step(trainer: Any, other: dict[str, Any]): ...",
        ]
    )
    lines = shape.measure_file(source)
    assert (lines.lines, lines.long) == (4, 1)
    assert shape.measure_file("a = 1\nb = 2").nodes == 9
    assert shape.unknown_types_of(source) == {"Any": 2, "trainer: Any": 1}


def test_long_cells_are_those_that_could_be_cut():
    body = "    x = 1\n" * 60
    two, one = f"def f():\n{body}def g():\n{body}", f"class A:\n{body}{body}"
    cells = [f"# %% ../../nbs/a.ipynb #{i}\n{cell}\n" for i, cell in enumerate((two, one, two))]
    assert shape.long_cells_of('"What it is."\n' + two + "\n" + "".join(cells)) == 2


def test_a_missed_limit_names_the_modules_that_miss_it_most(tmp_path):
    (tmp_path / "known.py").write_text("def f(x: int) -> int:\n    return x\n")
    (tmp_path / "unknown.py").write_text("def f(x: Any) -> Any:\n    return x\n")
    words = shape.shape_of(tmp_path).worst("Any", 1)
    assert words == "Any, at most 500; modules above it: unknown.py by 2"


def test_costly_tests_exist():
    "Their names follow the tests; what they cost is measured by support/cpu.py."
    names = (ROOT / "tests" / "costly.txt").read_text(encoding="utf-8").splitlines()
    assert names == sorted({*names}) and "" not in names
    for name in names:
        file, function = name.partition("[")[0].split("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), name
