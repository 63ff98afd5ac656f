"""The lines of the package that each test runs, and which costly tests `make test` can leave out.

With TRAINKIT_TEST_LINES=FOLDER every process of the tests adds a file of the library `coverage`
(`pip install coverage`) to FOLDER, which says of each line which tests ran it. With the CPU seconds
that `cpu.py` recorded in another run,

    python tests/support/lines.py FOLDER cpu.jsonl SECONDS > tests/costly.txt

prints the tests that are left to `make test-slow`, so that the others take SECONDS. Of the tests
that are not cheap, those are kept that run the most lines which few others run.
"""

import ast
import json
import os
import sys
from collections import Counter, defaultdict
from functools import cache
from heapq import heapify, heappop, heappush
from pathlib import Path

import pytest

FOLDER = "TRAINKIT_TEST_LINES"
PACKAGE = Path(__file__).resolve().parents[2] / "trainkit"
# These are always kept:
CHEAP = 0.3  # a test that takes no more CPU seconds,
LESSON = 2.0  # a lesson that takes no more,
CASE = 0.7  # the cheapest case of a test, if it takes no more,
FEW = 40  # a test that runs fewer lines, since it is about something else,
TOUR = "tests/test_lessons.py::test_lesson_runs[00_tour]"  # and what everybody runs first
ENOUGH = 3  # Tests that run a line, after which another one adds nothing


def recorder(test=None):
    "Begins to note the lines that this process runs."
    import coverage

    # Each process writes a file of its own, so that nothing is locked
    made = coverage.Coverage(
        data_file=os.path.join(os.environ[FOLDER], "lines"),
        data_suffix=True,
        source=[str(PACKAGE)],
        config_file=False,
        context=test,
        messages=False,
    )
    made.start()
    return made


def finish(made):
    made.stop()
    made.save()


class LineMeter:
    "A pytest plugin: what comes between two tests belongs to none."

    def __init__(self):
        self.recorder = recorder()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.recorder.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.recorder.switch_context("")

    def pytest_sessionfinish(self):
        finish(self.recorder)


@cache
def in_functions(file):
    "The numbers of the lines of a file that do more than an import of it does."
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds)]
    parts = [part for body in bodies for part in (body if isinstance(body, list) else [body])]
    return {line for part in parts for line in range(part.lineno, part.end_lineno + 1)}


def lines_of_tests(folder):
    "Test -> its lines in functions, each as (file, number)."
    import coverage

    lines = defaultdict(set)
    for path in Path(folder).iterdir():
        data = coverage.CoverageData(basename=str(path))
        data.read()
        for file in data.measured_files():
            inside = in_functions(file)
            for line, tests in data.contexts_by_lineno(file).items():
                for test in filter(None, tests) if line in inside else ():
                    lines[test].add((file, line))
    return lines


def always(lines, cost):
    "The tests that are kept whatever they add."
    kept = {
        test
        for test, seconds in cost.items()
        if seconds <= (LESSON if "test_lesson_runs" in test else CHEAP)
        or len(lines.get(test, ())) < FEW
        or test == TOUR
    }
    families = defaultdict(list)
    for test in cost:
        families[test.partition("[")[0]].append(test)
    cheapest = (min(tests, key=cost.get) for tests in families.values())
    return kept | {test for test in cheapest if cost[test] <= CASE}


def choose(lines, cost, budget):
    """The tests to keep: some always, then those with the most rarely run lines a second.

    The first test of a line counts fully, the second half, the third a quarter.
    """
    kept = always(lines, cost)
    runs = Counter(line for test in kept for line in lines.get(test, ()))
    seconds = sum(cost[test] for test in kept)

    def gain(test):
        few = (0.5 ** runs[line] for line in lines.get(test, ()) if runs[line] < ENOUGH)
        return sum(few) / cost[test]

    left = [(-gain(test), test) for test in cost.keys() - kept]
    heapify(left)
    while left:
        old, test = heappop(left)
        now = gain(test)
        if now < -old:  # Others have run its lines since; what is left of it may still be the most
            if now:
                heappush(left, (-now, test))
        elif seconds + cost[test] <= budget:
            kept.add(test)
            runs.update(lines[test])
            seconds += cost[test]
    return kept


def costs(path):
    "Test -> CPU seconds, with the processes that it starts."
    seconds = Counter()
    with open(path, encoding="utf-8") as file:
        for line in map(json.loads, file):
            if "::" in line["test"]:
                seconds[line["test"]] += line["user"] + line["system"]
    return seconds


if __name__ == "__main__":
    folder, path, budget = sys.argv[1:]
    cost = costs(path)
    lines = lines_of_tests(folder)
    kept = choose(lines, cost, float(budget))
    out = sorted(cost.keys() - kept)
    print(*out, sep="\n")
    ran, still = (
        set().union(*map(lines.get, tests & lines.keys())) for tests in (cost.keys(), kept)
    )
    seconds = [sum(cost[test] for test in tests) for tests in (out, kept)]
    print(
        f"{len(out)} tests of {seconds[0]:.0f} CPU seconds are left out; {seconds[1]:.0f} remain, "
        f"which run {len(still):,} of {len(ran):,} lines",
        file=sys.stderr,
    )
