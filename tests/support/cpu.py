"""The CPU seconds of each test.

They are those of its own process, of the processes it waited for, and of those forked from the
tests' server.

With TRAINKIT_TEST_CPU=FILE every process adds lines of JSON to FILE;
`python tests/support/cpu.py FILE` prints the sums. A process that is killed, or that ends with
`os._exit`, leaves no line.
"""

import json
import os
import resource
import sys
from collections import defaultdict
from contextlib import suppress

import pytest

FILE = "TRAINKIT_TEST_CPU"


def spent(who=resource.RUSAGE_SELF):
    "User and system seconds so far."
    usage = resource.getrusage(who)
    return usage.ru_utime, usage.ru_stime


def record(path, test, kind, user, system):
    "One line; short lines that are appended don't mix."
    line = json.dumps(dict(test=test, kind=kind, user=round(user, 3), system=round(system, 3)))
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def current_test():
    "The test that runs here, as in `tests/test_charts.py::test_png`."
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def record_all(path, test, kind):
    "What this process and those it waited for have used since they began."
    record(path, test, kind, *spent())
    record(path, test, f"{kind}: children", *spent(resource.RUSAGE_CHILDREN))


class CpuMeter:
    """A pytest plugin: a line for setup, call and teardown together.

    Another line is for all that comes before the first test.
    """

    def __init__(self, path):
        self.path = path

    def pytest_collection_finish(self):
        record_all(self.path, "(start and collection)", "pytest")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        kinds = {"test": resource.RUSAGE_SELF, "test: children": resource.RUSAGE_CHILDREN}
        before = {kind: spent(who) for kind, who in kinds.items()}
        try:
            return (yield)
        finally:
            for kind, who in kinds.items():
                used = [b - a for a, b in zip(before[kind], spent(who), strict=True)]
                record(self.path, item.nodeid, kind, *used)

    def pytest_sessionfinish(self):
        "The tests' server outlives its tests, so Linux is asked about it."
        from support.processes import SERVER

        if SERVER._forkserver_pid:
            with suppress(OSError), open(f"/proc/{SERVER._forkserver_pid}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:13]
                used = [int(t) / os.sysconf("SC_CLK_TCK") for t in ticks]
                record(self.path, "(server)", "server: imports and forks", *used)


def report(path, top=40):
    "The sums by kind of process, by file, and the dearest tests."
    kinds, files, tests = (defaultdict(float) for _ in range(3))
    system = 0.0
    with open(path, encoding="utf-8") as file:
        for line in map(json.loads, file):
            seconds = line["user"] + line["system"]
            system += line["system"]
            kinds[line["kind"]] += seconds
            files[line["test"].split("::")[0]] += seconds
            tests[line["test"]] += seconds
    print(f"{sum(kinds.values()):8.1f} CPU seconds, {system:.1f} of them in the kernel")
    for sums in (kinds, files, tests):
        print()
        for name, seconds in sorted(sums.items(), key=lambda item: -item[1])[:top]:
            print(f"{seconds:8.1f} {name}")


if __name__ == "__main__":
    report(*sys.argv[1:2], *map(int, sys.argv[2:]))
