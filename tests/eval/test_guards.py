"What a process of the sandbox asks of the kernel, shown by a kernel that only takes notes."

import ctypes
import os
import resource
import struct
import sys

import pytest

from trainkit.eval import code_eval as sandbox

RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16, 7: 16}  # Of files, known to each Landlock
ALL = 2**16 - 1
OF_FILES = 1 | 2 | 4 | 2**14 | 2**15  # Execute, write, read, truncate, control


class Kernel:
    "It refuses what a real one of this age would refuse."

    def __init__(self, landlock=7, locks=True):
        self.landlock, self.locks = landlock, locks
        self.allowed, self.done = {}, []

    def prctl(self, option, *given):
        if (option, *given) == (38, 1, 0, 0, 0):  # No new privileges
            self.done += ["privileges"] if self.locks else []
            return 0 if self.locks else -1
        if option == 22:  # A filter of system calls
            kind, program, *rest = given
            assert kind == 2 and rest == [0, 0] and "privileges" in self.done
            steps, place = struct.unpack("HP", program)
            self.filter = ctypes.string_at(place, 8 * steps)
            return 0
        self.done.append({(1, 9, 0, 0, 0): "dies", (4, 0, 0, 0, 0): "hidden"}[option, *given])

    def syscall(self, number, *given):
        if number == {"x86_64": 126}.get(os.uname().machine, 91):
            assert given == (struct.pack("Ii", 0x20080522, 0), bytes(24))
            self.done.append("capabilities")
            return 0
        assert 444 <= number <= 446
        if given == (None, 0, 1):
            return self.landlock
        assert self.landlock > 0
        if number == 444:
            rights, size, flags = given
            (self.handled,) = struct.unpack("Q", rights)
            assert (size, flags) == (8, 0) and self.handled >> RIGHTS[self.landlock] == 0
            self.rules = os.open(os.devnull, os.O_RDONLY)
            return self.rules
        assert given[0] == self.rules
        if number == 445:
            kind, rule, flags = given[1:]
            rights, place = struct.unpack("=Qi", rule)
            assert (kind, flags) == (1, 0) and rights & ~self.handled == 0
            self.allowed[os.readlink(f"/proc/self/fd/{place}")] = rights
            return 0
        assert given[1:] == (0,) and "privileges" in self.done
        return 0


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    "The measures that worked, and a kernel that knows what was asked of it."
    (tmp_path / "file").write_text("")
    paths = [(str(tmp_path / name), ALL) for name in ("", "file", "missing")]

    def guard(kernel, **changes):
        monkeypatch.setattr(
            ctypes, "CDLL", lambda name: kernel if name is None else pytest.fail(name)
        )
        order = dict(paths=paths, filter=bytes(range(24)), accidents=False, folder=str(tmp_path))
        return sandbox._guard_linux(order | changes)

    return guard


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these measures")


@linux
@pytest.mark.parametrize("landlock", RIGHTS)
def test_each_age_of_the_kernel_gets_the_rights_that_it_knows(landlock, guarded, tmp_path):
    kernel = Kernel(landlock)
    assert guarded(kernel) == ["landlock", "seccomp"]
    assert kernel.done == ["capabilities", "dies", "hidden", "privileges"]
    known = 2 ** RIGHTS[landlock] - 1
    assert kernel.handled == known and kernel.filter == bytes(range(24))
    folder = os.path.realpath(tmp_path)
    assert kernel.allowed == {folder: known, f"{folder}/file": OF_FILES & known}


@linux
@pytest.mark.parametrize(
    "kernel, changes, measures",
    [
        (Kernel(-1), {}, ["seccomp"]),
        (Kernel(0), {}, ["seccomp"]),
        (Kernel(), dict(paths=[]), ["seccomp"]),
        (Kernel(), dict(filter=b""), ["landlock"]),
        (Kernel(locks=False), {}, []),
    ],
)
def test_what_a_kernel_does_not_have_is_no_measure(kernel, changes, measures, guarded):
    assert guarded(kernel, **changes) == measures


@linux
@pytest.mark.parametrize("user, accidents, drops", [(0, True, 1), (0, False, 0), (7, True, 0)])
def test_root_is_given_up_where_accidents_are_refused(user, accidents, drops, guarded, monkeypatch):
    folders = []
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(sandbox, "_drop_root", folders.append)
    assert guarded(Kernel(), accidents=accidents) == ["landlock", "seccomp"]
    assert len(folders) == drops


@pytest.mark.parametrize(
    "measures, accidents, more",
    [
        (["landlock", "seccomp"], True, []),
        (["landlock"], True, ["no process"]),
        (["landlock"], False, []),
        (["seccomp"], True, ["no accidents"]),
        ([], True, ["no process", "no accidents"]),
    ],
)
def test_the_limits_of_a_process(measures, accidents, more, monkeypatch):
    "One second after the signal the kernel kills; what cannot be locked is at least made hard."
    limits, done = {}, []

    def limit(kind, sizes):
        limits[kind] = sizes
        if kind == resource.RLIMIT_NPROC:
            done.append("no process")

    monkeypatch.setattr(sys, "path", ["", "library"])
    monkeypatch.setattr(resource, "setrlimit", limit)
    monkeypatch.setattr(sandbox, "_guard_linux", lambda order: [*measures])
    monkeypatch.setattr(sandbox, "_guard_accidents", lambda folder: done.append("no accidents"))
    order = dict(seconds=5, memory=2**28, linux=True, accidents=accidents, folder="here")
    assert sandbox._guard(order) == ["limits", *measures] and done == more
    assert sys.path == ["library"]
    limits.pop(resource.RLIMIT_NPROC, None)
    assert limits == {
        resource.RLIMIT_CPU: (6, 7),
        resource.RLIMIT_AS: (2**28, 2**28),
        resource.RLIMIT_DATA: (2**28, 2**28),
        resource.RLIMIT_FSIZE: (2**20, 2**20),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
    }


def test_an_error_is_shown_up_to_a_length():
    outcome = sandbox.run_code("", "raise ValueError('x' * 600)", timeout=60)
    assert outcome.error == f"ValueError: {'x' * 488}"
    outcome = sandbox.run_code("def f(): raise ValueError(len('ab'), 'x' * 600)", "f()", timeout=60)
    assert outcome.error == f"ValueError: (2, '{'x' * 483}"


def test_what_a_program_writes_is_shown_and_what_tests_write_is_not():
    "Not even where the tests write what looks like the end of a verdict."
    program = "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)"
    tests = "import os\nprint('tests', flush=True)\nos.write(2, b'tests\\0tests')"
    outcome = sandbox.run_code(program, tests, timeout=60)
    assert outcome.passed and outcome.output.split() == ["out", "err"]
