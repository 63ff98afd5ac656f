"Programs that try to get out, or to pass without being right."

import contextlib
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainkit.eval import code_eval as sandbox
from trainkit.eval.code_eval import (
    checks_of,
    find_isolation,
    human_eval_problems,
    program_of,
    run_code,
)

RIGHT = "assert f(3) == 6"
SHOULD_RAISE = "try: f(3)\nexcept Exception: pass\nelse: assert False"

# Programs that are wrong, and the tests that they would like to pass
FORGERIES = {
    "an int that equals all": (
        "class Liar(int):\n    def __eq__(self, other): return True\ndef f(x): return Liar()",
        RIGHT,
    ),
    "a float without distance": (
        "class Liar(float):\n    def __sub__(self, other): return 0.0\ndef f(x): return Liar()",
        "assert abs(f(3) - 6.0) < 1e-6",
    ),
    "an object that says what it is": (
        (
            "class Liar:\n"
            "    __class__ = property(lambda self: int)\n"
            "    def __eq__(self, other): return True\n"
            "def f(x): return Liar()"
        ),
        "y = f(3)\nassert isinstance(y, int) and y == 6",
    ),
    "a builtin of its own": (
        "def f(x): return 0\ndef abs(x): return 0",
        "assert abs(f(3) - 6) < 1e-6",
    ),
    "a changed builtin": (
        "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 0",
        "assert abs(f(3) - 6) < 1e-6",
    ),
    "a module of its own": (
        "import math\nclass math: isclose = lambda *given: True\ndef f(x): return 0",
        "assert math.isclose(f(3), 6)",
    ),
    "a changed module": (
        "import math\nmath.isclose = lambda *given: True\ndef f(x): return 0",
        "import math\nassert math.isclose(f(3), 6)",
    ),
    "the argument emptied": (
        "def f(x):\n    x.clear()\n    return []",
        "xs = [2, 1]\nassert f(xs) == sorted(xs)",
    ),
    "the tests in a string": ("def f(x): return 0\n'''", RIGHT + "\n'''"),
    "the tests in a branch": (
        "def f(x): return 0\nif 0:\n    pass\nelse: raise SystemExit(0)",
        RIGHT,
    ),
    "gone before the tests": ("import os\ndef f(x): return 0\nos._exit(0)", RIGHT),
    "gone in the middle": ("import os\ndef f(x): os._exit(0)", SHOULD_RAISE + "\nassert f(3) == 6"),
    "an end taken for an error": ("import os\ndef f(x): os._exit(0)", SHOULD_RAISE),
    "a broken pipe taken for an error": (
        (
            "import os\n"
            "def f(x):\n"
            "    for i in range(3, 64):\n"
            '        try: os.write(i, b"x"*99)\n'
            "        except OSError: pass"
        ),
        SHOULD_RAISE,
    ),
    "a verdict in every pipe": (
        "import os\n"
        "def f(x):\n"
        "    for i in range(64):\n"
        "        for text in VERDICTS:\n"
        "            try: os.write(i, text)\n"
        "            except OSError: pass\n"
        "    os._exit(0)",
        RIGHT,
    ),
    "sys.modules of the main program": (
        "import sys\n"
        "for frame in sys._current_frames().values():\n"
        "    while frame:\n"
        "        for space in (frame.f_globals, frame.f_locals):\n"
        "            for k, v in list(space.items()):\n"
        '                if "status" in k: space[k] = "passed"\n'
        '                if k == "verdict": __import__("os").write(v if isinstance(v, int) else 1, '
        'space.get("token", "").encode())\n'
        "        frame = frame.f_back\n"
        'sys.modules["__main__"].__dict__["status"] = "passed"\n'
        "def f(x): return 0\n"
        "import os; os._exit(0)",
        RIGHT,
    ),
    "an exit that is caught": ("def f(x): raise SystemExit(0)", RIGHT),
    "a list without end": (
        "def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
        RIGHT,
    ),
}

# What leaves a mark outside. In a program {names} stand for what the world holds.
CANARY = 'open({canary!r}, "w").write("dead")'
ESCAPES = {
    # Files -> what has to hold for them not to be reached where there is no namespace
    "writes a file": ("landlock", 'open({mark!r}, "w").write("x")'),
    "overwrites a file": ("landlock", CANARY),
    "deletes with dir_fd": (
        "landlock",
        'import os\nos.remove("canary", dir_fd=os.open({folder!r}, os.O_RDONLY))',
    ),
    "renames with dir_fd": (
        "landlock",
        (
            "import os\n"
            "d = os.open({folder!r}, os.O_RDONLY)\n"
            'os.rename("canary", "mark", src_dir_fd=d, dst_dir_fd=d)'
        ),
    ),
    "sqlite3": (
        "landlock",
        (
            "import sqlite3\n"
            'sqlite3.connect({mark!r}).execute("create table t (x)").connection.commit()'
        ),
    ),
    "sqlite3 attaches": (
        "landlock",
        (
            "import sqlite3\n"
            'c = sqlite3.connect(":memory:")\n'
            'c.execute("attach ? as o", ({mark!r},))\n'
            'c.execute("create table o.t (x)")\n'
            "c.commit()"
        ),
    ),
    "C library writes": (
        "landlock",
        "import ctypes, os\nc = ctypes.CDLL(None)\nc.close(c.creat({mark!r}.encode(), 0o600))",
    ),
    "link from its folder": (
        "landlock",
        'import os\nos.symlink({canary!r}, "link")\nopen("link", "w").write("dead")',
    ),
    "makes a folder": ("landlock", "import os\nos.mkdir({mark!r})"),
    "chmod": ("seccomp", "import os\nos.chmod({canary!r}, 0o777)"),
    "truncates": ("seccomp", "import os\nos.truncate({canary!r}, 0)"),
    "changes a date": ("seccomp", "import os\nos.utime({canary!r}, (1, 1))"),
    "pickle": (
        "landlock",
        (
            "class Bomb:\n"
            "    def __reduce__(self): return (eval, ({canary_code!r},))\n"
            "def f(x): return Bomb()\n"
            "import pickle\n"
            "pickle.loads(pickle.dumps(Bomb()))"
        ),
    ),
    "shared memory with a name": ("landlock", 'open("/dev/shm/" + {name!r}, "w").write("x")'),
    # Secrets
    "reads a file": ("landlock", "def f(x): return open({secret_file!r}).read()"),
    "reads with C": (
        "landlock",
        (
            "import ctypes\n"
            "def f(x):\n"
            "    c = ctypes.CDLL(None)\n"
            "    b = ctypes.create_string_buffer(99)\n"
            "    c.read(c.open({secret_file!r}.encode(), 0), b, 99)\n"
            "    return b.value.decode()"
        ),
    ),
    "reads the environment": (
        "always",
        'import os\ndef f(x): return os.environ["TRAINKIT_SECRET"]',
    ),
    "reads the environment of another": (
        "landlock",
        (
            "def f(x): return "
            'open("/proc/{victim}/environ").read().partition("TRAINKIT_SECRET=")[2].partition(chr(0))[0]'
        ),
    ),
    "sees a size": (
        "namespace",
        'import os\ndef f(x): return "s" * os.stat({secret_file!r}).st_size',
    ),
    # Network
    "TCP": (
        "seccomp",
        'import socket\nsocket.create_connection(("127.0.0.1", {port}), 2).send(b"x")',
    ),
    "UDP": (
        "seccomp",
        (
            "import socket\n"
            'socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {udp}))'
        ),
    ),
    "socket of the file system": (
        "seccomp",
        (
            "import socket\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            's.sendto(b"x", {unix!r})'
        ),
    ),
    "half of a pair": (
        "seccomp",
        (
            "import socket\n"
            "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "a.connect({unix!r})\n"
            'a.send(b"x")'
        ),
    ),
    "asyncio": (
        "seccomp",
        (
            "import asyncio\n"
            "async def go():\n"
            '    r, w = await asyncio.open_connection("127.0.0.1", {port})\n'
            '    w.write(b"x"); await w.drain()\n'
            "asyncio.run(go())"
        ),
    ),
    # Other processes
    "a shell": ("seccomp", 'import os\nos.system("echo x > {mark}")'),
    "another interpreter": (
        "seccomp",
        (
            "import subprocess, sys\n"
            'subprocess.run([sys.executable, "-c", "open({mark!r}, chr(119))"], check=True)'
        ),
    ),
    "becomes another": (
        "seccomp",
        (
            "import os, sys\n"
            'os.execv(sys.executable, [sys.executable, "-c", "open({mark!r}, chr(119))"])'
        ),
    ),
    "a child that stays": (
        "seccomp",
        (
            "import os, time\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0:\n"
            "        time.sleep(0.5)\n"
            '        open({mark!r}, "w").write("x")\n'
            "    os._exit(0)"
        ),
    ),
    "kills another": ("seccomp", "import os\nos.kill({victim}, 9)"),
    "kills through a pipe": (
        "seccomp",
        "import fcntl, os\n"
        "r, w = os.pipe()\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, {victim})\n"
        "fcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC)\n"
        'os.write(w, b"x")',
    ),
    "limits another": (
        "seccomp",
        "import resource\nresource.prlimit({victim}, resource.RLIMIT_NOFILE, (7, 7))",
    ),
    "slows another": ("seccomp", "import os\nos.setpriority(os.PRIO_PROCESS, {victim}, 19)"),
    "holds a core of another": (
        "seccomp",
        (
            "import os\n"
            "assert len(os.sched_getaffinity({victim})) > 1\n"
            "os.sched_setaffinity({victim}, {{0}})"
        ),
    ),
    "memory that stays": (
        "seccomp",
        "import ctypes\nassert ctypes.CDLL(None).shmget({key}, 64, 0o1600) >= 0",
    ),
}


@dataclass
class World:
    "Harmless targets that a program may try to reach, all in the test's folder or on loopback."

    folder: Path
    victim: subprocess.Popen
    sockets: list
    packets: list

    @property
    def names(self):
        tcp, udp, _ = self.sockets
        canary = str(self.folder / "canary")
        return dict(
            folder=str(self.folder),
            canary=canary,
            mark=str(self.folder / "mark"),
            secret_file=str(self.folder / "secret"),
            victim=self.victim.pid,
            port=tcp.getsockname()[1],
            udp=udp.getsockname()[1],
            unix=str(self.folder / "socket"),
            key=0x7A110000 + os.getpid() % 65536,
            name=f"trainkit-{os.getpid()}",
            canary_code=CANARY.format(canary=canary),
        )

    def marked(self, pause=0.2):
        "What a program has done to it."
        import ctypes
        import resource

        time.sleep(pause)
        canary = self.folder / "canary"
        wrong = [] if canary.is_file() and canary.read_text() == "alive" else ["canary"]
        if canary.is_file() and (
            canary.stat().st_mode & 0o777 != 0o600 or canary.stat().st_mtime < 9
        ):
            wrong.append("its mode or date")
        for path in (self.folder / "mark", Path("/dev/shm") / self.names["name"]):
            if path.exists():
                wrong.append(str(path))
        if self.packets:
            wrong.append("network")
        if self.victim.poll() is not None:
            return [*wrong, "victim"]
        if resource.prlimit(self.victim.pid, resource.RLIMIT_NOFILE) == (7, 7):
            wrong.append("limits")
        if os.getpriority(os.PRIO_PROCESS, self.victim.pid) != os.getpriority(os.PRIO_PROCESS, 0):
            wrong.append("priority")
        if os.sched_getaffinity(self.victim.pid) != os.sched_getaffinity(0):
            wrong.append("cores")
        if ctypes.CDLL(None).shmget(self.names["key"], 64, 0) >= 0:
            wrong.append("shared memory")
        return wrong


SECRET = "s" * 23


@pytest.fixture
def world(monkeypatch):
    "Not in tmp_path: the path of a socket is short."
    import ctypes
    import shutil

    monkeypatch.setenv("TRAINKIT_SECRET", SECRET)
    folder = Path(tempfile.mkdtemp(prefix="world-"))
    for name, text in (("canary", "alive"), ("secret", SECRET)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time\ntime.sleep(300)"])
    tcp, udp = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    )
    udp.bind(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    unix.bind(str(folder / "socket"))
    packets = []

    def listen(receive):
        with contextlib.suppress(OSError):
            while True:
                if not receive():
                    return  # A socket that is shut gives nothing
                packets.append(1)

    for receive in (lambda: tcp.accept()[0].recv(9), lambda: udp.recv(9), lambda: unix.recv(9)):
        threading.Thread(target=listen, args=(receive,), daemon=True).start()
    yield (it := World(folder, victim, [tcp, udp, unix], packets))
    names = it.names
    victim.kill()
    victim.wait()
    for end in it.sockets:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
    libc = ctypes.CDLL(None)
    if (memory := libc.shmget(names["key"], 64, 0)) >= 0:
        libc.shmctl(memory, 0, None)
    (Path("/dev/shm") / names["name"]).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def require(kind):
    why, isolation = sandbox._try_isolation(kind)
    if why:
        pytest.skip(why)
    return isolation


linux = pytest.mark.skipif(sys.platform != "linux", reason="what is tried here is there on Linux")
both = pytest.mark.parametrize("isolation", ["namespace", "process"])


@both
@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_program_does_not_pass(name, isolation):
    require(isolation)
    program, tests = FORGERIES[name]
    frame = sandbox._encode(("passed", "", []), lambda thing: 1 // 0)
    texts = [
        b"\0" + frame,
        len(frame).to_bytes(4, "big") + frame,
        *(
            len(f).to_bytes(4, "big") + f
            for f in (sandbox._encode(("value", 6), lambda thing: 1 // 0),)
        ),
    ]
    outcome = run_code(f"VERDICTS = {texts!r}\n{program}", tests, timeout=60, isolation=isolation)
    assert outcome.status == "failed", outcome


@linux
@both
@pytest.mark.parametrize("name", ESCAPES)
def test_no_program_gets_out(name, isolation, world):
    sandboxed = require(isolation)
    needs, program = ESCAPES[name]
    outcome = run_code(
        program.format(**world.names), f"assert f(0) == {SECRET!r}", timeout=60, isolation=isolation
    )
    out = outcome.passed or bool(world.marked())
    if isolation == "process" and needs not in (*sandboxed, "always"):
        words = dict(
            namespace="names, sizes", landlock="files of this user", seccomp="network can be used"
        )[needs]
        assert words in find_isolation("process").note  # It was reported
    else:
        assert not out, (outcome, world.marked())


@linux
@pytest.mark.parametrize("name", ESCAPES)
def test_they_get_out_of_a_plain_process(name, world):
    "Else the test above would show nothing."
    program = (
        ESCAPES[name][1].format(**world.names)
        + f'\nif "f" in globals(): assert f(0) == {SECRET!r}; print("read")'
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=world.folder,
    )
    if "holds a core" in name and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one core")
    end = time.monotonic() + 60  # One leaves its mark later
    while "read" not in done.stdout and not world.marked(0.01):
        assert time.monotonic() < end, done.stderr


@pytest.fixture
def fresh():
    "What was found out about the machine is found out anew, before and after."
    for _ in ("before", "after"):
        for known in (sandbox._try_isolation, sandbox._mounts):
            known.cache_clear()
        if _ == "before":
            yield


@linux
@pytest.mark.parametrize(
    "script, why",
    [
        (None, "apt-get install bubblewrap"),
        ('echo "bwrap: No permissions" >&2; exit 1', "No permissions"),
    ],
)
def test_without_a_namespace_the_run_says_so_or_refuses(script, why, monkeypatch, tmp_path, fresh):
    if script:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = find_isolation()
    assert (
        choice.kind == "process" and why in choice.note and "not everything is kept" in str(choice)
    )
    with pytest.raises(RuntimeError, match=f"isolation='namespace' cannot be had: .*{why}"):
        find_isolation("namespace")
    with pytest.raises(RuntimeError, match=why):
        run_code("x = 1", isolation="namespace")
    with pytest.warns(UserWarning, match=why):
        assert run_code("def f(x): return 2*x", RIGHT, timeout=60).passed


@pytest.mark.filterwarnings("ignore:Programs run in a process")
def test_a_system_with_neither_landlock_nor_seccomp(monkeypatch, tmp_path, fresh):
    "As macOS: the verdict holds, clumsy programs are stopped, and the rest is reported."
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    note = find_isolation().note
    assert (
        "only Linux" in note
        and "files of this user can be read and written" in note
        and "network can be used" in note
    )
    assert run_code("def f(x): return 2*x", RIGHT, timeout=60).passed
    for program in (
        'open("{0}", "w")',
        'import os\nos.mkdir("{0}")',
        'import os\nos.system("touch {0}")',
        "import socket\nsocket.socket()",
    ):
        assert "PermissionError" in run_code(program.format(tmp_path / "mark"), timeout=60).error
    assert not (tmp_path / "mark").exists()
    for program, tests in FORGERIES.values():
        assert run_code(f'VERDICTS = [b"\\0"]\n{program}', tests, timeout=60).status == "failed"


@both
@pytest.mark.parametrize(
    "program",
    [
        'i = 0\nwhile True:\n    open(str(i), "wb").write(bytes(2**20))\n    i += 1',
        'print("x"*10**8)',
        "import time\nx = []\nwhile True: x.append(bytearray(2**20))",
        "def f(x): return f(x)",
        'def f(x): return "x"*10**8',
    ],
)
def test_what_is_used_up_is_limited(program, isolation, monkeypatch, tmp_path):
    require(isolation)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = run_code(program, RIGHT, timeout=60, memory=2**28, isolation=isolation)
    assert outcome.status in ("failed", "memory"), outcome
    assert outcome.seconds < 55 and list(tmp_path.iterdir()) == []


@both
def test_a_program_that_hangs_is_killed_with_its_threads(isolation):
    require(isolation)
    outcome = run_code(
        (
            "import threading, time\n"
            "for _ in range(3): threading.Thread(target=time.sleep, args=(600,)).start()\n"
            "def f(x):\n"
            "    while True: pass"
        ),
        RIGHT,
        timeout=0.5,
        isolation=isolation,
    )
    assert outcome.status == "timeout" and outcome.seconds < 60
    busy = run_code(
        (
            "import threading\n"
            "def g():\n"
            "    while True: pass\n"
            "for _ in range(2): threading.Thread(target=g).start()\n"
            "g()"
        ),
        timeout=0.5,
        isolation=isolation,
    )
    assert busy.status == "timeout"


def test_what_is_read_from_the_program_is_plain():
    "Random bytes and spoiled messages are refused, or are exactly such data."
    draw = random.Random(0)

    def none(*thing):
        raise TypeError("no objects")

    def plain(value):
        kinds = {list, tuple, set, frozenset}
        if type(value) is dict:
            return all(plain(x) for pair in value.items() for x in pair)
        return (
            all(map(plain, value))
            if type(value) in kinds
            else type(value) in (type(None), bool, int, float, complex, str, bytes)
        )

    def make(depth):
        kind = draw.randrange(11 if depth else 7)
        if kind < 7:
            return [
                None,
                draw.random() < 0.5,
                draw.randrange(-(2**70), 2**70),
                draw.gauss(0, 1),
                complex(draw.random(), float("inf")),
                "é\ud800" * draw.randrange(3),
                b"\0x",
            ][kind]
        items = [make(0 if kind in (9, 10) else depth - 1) for _ in range(draw.randrange(4))]
        return [list, tuple, set, lambda x: dict(zip(x, x, strict=True))][kind - 7](items)

    for _ in range(2000):
        value = make(4)
        data = sandbox._encode(value, none)
        back = sandbox._decode(data, none)
        assert back == value and type(back) is type(value) and plain(back)
        spoiled = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            spoiled[draw.randrange(len(spoiled))] = draw.choice(b"NTFifcsbLUSZDym\0\1\xff")
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            assert plain(sandbox._decode(bytes(spoiled), none))
    with pytest.raises(ValueError):
        sandbox._decode(b"L\0\0\0\0\0\0\0\1" * 10**5 + b"N", none)
    with pytest.raises(ValueError, match="nested deeper"):
        sandbox._encode([[]], none, 100)


def test_one_pipe_carries_what_the_tests_need():
    "Values, objects, exceptions, functions, and the order of things."
    program = """
class Node:
    count = 0
    def __init__(self, value, next=None): self.value, self.next = value, next; Node.count += 1
    def __iter__(self):
        while self: yield self.value; self = self.next
    def __getitem__(self, i): return list(self)[i]
    def __contains__(self, x): return x in list(self)
    def __repr__(self): return f'Node({self.value})'
class Odd(KeyError): pass
def reverse(node):
    last = None
    while node: last, node = Node(node.value, last), node.next
    return last
def fails(x): raise Odd(x)
def apply(function, *args, **named): return [function(*args, **named), function(*args, **named)]
def grow(d, key, *, to): d[key]['x'].append(to)
def deep(x): return x
from collections import Counter, namedtuple
Pair = namedtuple('Pair', 'a b')
def pair(): return Pair(1, Counter('aab'))
"""
    tests = """
import math
node = Node(1, Node(2, Node(3)))
back = reverse(node)
assert list(back) == [3, 2, 1] and back[0] == 3 and 2 in back and 9 not in back
assert str(back) == 'Node(3)' and back.next.next.next is None and Node.count == 6
assert back is not node and back == back and back != None
back.value = 7
assert list(back)[0] == 7
try: back == node
except TypeError as error: assert 'exists only in the program' in str(error)
else: assert False
try: fails('k')
except KeyError as error: assert error.args == ('k',)
else: assert False
seen = []
assert apply(lambda x, y=0: seen.append(x) or x + y, 2, y=3) == [5, 5] and seen == [2, 2]
def boom(x): raise OverflowError('mine')
try: apply(boom, 1)
except OverflowError as error: assert str(error) == 'mine'
else: assert False
d = {'k': {'x': [1]}}
inner = d['k']['x']
grow(d, 'k', to=5)
assert d == {'k': {'x': [1, 5]}} and inner == [1, 5]
assert pair() == (1, {'a': 2, 'b': 1}) and type(pair()) is tuple
assert math.isnan(deep(float('nan'))) and deep(-0.0).hex() == '-0x0.0p+0'
assert deep(complex('inf')) == complex('inf') and deep(10**5000) == 10**5000
nested = {1: {2}, (3, None): frozenset([b'x', 'y'])}
assert deep(nested) == nested
try: missing()
except NameError: pass
else: assert False
try: deep(object())
except TypeError as error: assert 'cannot be passed' in str(error)
else: assert False
try: deep.__globals__['__builtins__'] == 1
except (TypeError, ValueError): pass
"""
    for isolation in ("auto", "process"):
        outcome = run_code(program, tests, timeout=60, isolation=isolation)
        assert outcome.passed, outcome


HELPED = ("HumanEval/32", "HumanEval/33", "HumanEval/38", "HumanEval/50")


@both
@pytest.mark.parametrize("some", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_the_tasks_of_human_eval(some, isolation):
    "The published solutions pass, functions without a body fail, helpers may be redefined."
    from concurrent.futures import ThreadPoolExecutor

    require(isolation)
    problems = [
        p
        for i, p in enumerate(human_eval_problems())
        if some == "all" or i % 20 == 0 or p["task_id"] in HELPED
    ]
    bad = "    return None\npoly = encode_cyclic = encode_shift = lambda *given: 0\n"

    def judged(problem, body):
        return run_code(program_of(problem, body), checks_of(problem), 60, isolation=isolation)

    with ThreadPoolExecutor(2) as pool:
        for problem, good, wrong in zip(
            problems,
            pool.map(lambda p: judged(p, p["canonical_solution"]), problems),
            pool.map(lambda p: judged(p, bad), problems),
            strict=True,
        ):
            assert good.passed and not wrong.passed, (problem["task_id"], good, wrong)


SIBLINGS = """
import os
def f(x):
    for process in filter(str.isdigit, os.listdir('/proc')):
        try:
            parent = open(f'/proc/{process}/stat').read().rsplit(')', 1)[1].split()[1]
            words = open(f'/proc/{process}/cmdline').read()
        except OSError: continue
        if int(parent) != os.getppid() or int(process) == os.getpid(): continue
        if 'marshal' not in words: continue
        print('seen')
        for place in [f'fd/{i}' for i in range(12)] + ['mem']:
            try:
                os.write(os.open(f'/proc/{process}/{place}', os.O_WRONLY), VERDICT)
                print('written')
            except OSError: pass
    return 0
"""


@linux
def test_the_process_of_the_tests_is_out_of_reach_where_files_are_not(monkeypatch):
    "No Landlock, no hook: /proc shows the process, and the kernel opens nothing of it."
    require("process")
    encode, frame = sandbox._encode, sandbox._encode(("passed", "", []), lambda thing: 1 // 0)
    sandbox._boot()

    def bare(value, *more):
        return encode(
            value | dict(paths=[], accidents=False) if type(value) is dict else value, *more
        )

    monkeypatch.setattr(sandbox, "_encode", bare)
    outcome = run_code(
        f"VERDICT = {bytes(1) + frame!r}\n{SIBLINGS}", RIGHT, timeout=60, isolation="process"
    )
    assert (
        outcome.status == "failed" and "seen" in outcome.output and "written" not in outcome.output
    ), outcome
