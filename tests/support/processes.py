"Fresh processes for tests: functions, commands and groups of ranks, with shared imports."

import asyncio
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from support import cpu, lines

ROOT = Path(__file__).resolve().parents[2]
FORK = multiprocessing.get_context(
    "forkserver"
)  # a fresh process for each caller, the imports paid once for all
# Seconds that a process gets; slow cells take minutes even on a machine that does nothing else
PATIENCE = 1800 if os.environ.get("TRAINKIT_SLOW") else 600
FORK.set_forkserver_preload(["support.prewarm"])
SERVER = forkserver._forkserver


def serve():
    "Start the server from which fresh processes are forked, unless it runs."
    with patch.dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(
            filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH")))
        ),
    ):
        SERVER.ensure_running()


def same_environment(environment):
    "Take over what a test has set since the server started, as a new process would."
    for name in {*os.environ, *environment} - {"PYTHONPATH"}:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]


def child(function, args, out, err, meter, environment):
    "The body of a process: what it says goes to two files."
    same_environment(environment)
    gc.freeze()  # what was imported is no garbage, and is not looked through again
    multiprocessing.set_start_method(
        None, force=True
    )  # the platform's own for what `function` starts
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.dump_traceback_later(PATIENCE - 10, file=2)  # Where all threads of a hang are
    made = lines.recorder(cpu.current_test()) if os.environ.get(lines.FOLDER) else None
    try:
        code = function(*args)
    finally:
        if made:
            lines.finish(made)
        sys.stdout.flush(), sys.stderr.flush()
        if meter[0]:
            cpu.record_all(*meter, "forked")
    sys.exit(code)


def begin(function, *args, folder):
    "Start it in a fresh process, which writes what it says to out.txt and err.txt in `folder`."
    out, err = folder / "out.txt", folder / "err.txt"
    for path in (out, err):
        path.write_text("")
    serve()
    meter = os.environ.get(cpu.FILE), cpu.current_test()
    process = FORK.Process(target=child, args=(function, args, out, err, meter, dict(os.environ)))
    process.start()
    return process


def end(process, folder, timeout=PATIENCE):
    "Wait, kill it after `timeout` seconds, and return what `subprocess.run` returns."
    process.join(timeout)
    if process.exitcode is None:
        process.kill(), process.join()
    out, err = (
        (folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
        for name in ("out", "err")
    )
    return SimpleNamespace(returncode=process.exitcode, stdout=out, stderr=err)


def in_child(function, *args, folder):
    "Call it in a fresh process, its logs in `folder`; its result."
    return end(begin(function, *args, folder=folder), folder)


def ranked(function, args, env):
    os.environ.update(env)
    return function(*args)


def together(n, function, *args, folder):
    "The same call in `n` processes on gloo; what each said last, as JSON."
    from trainkit.recipes.launcher import free_port

    env = dict(
        ACCELERATE_USE_CPU="true",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(n),
        LOCAL_WORLD_SIZE=str(n),
    )
    logs = [Path(tempfile.mkdtemp(prefix="rank", dir=folder)) for _ in range(n)]
    running = [
        begin(ranked, function, args, env | dict(RANK=str(i), LOCAL_RANK=str(i)), folder=logs[i])
        for i in range(n)
    ]
    waiting, last = [*running], time.monotonic() + 240
    while waiting and all(
        p.exitcode in (None, 0) for p in running
    ):  # one that fails leaves the others waiting for it
        wait([p.sentinel for p in waiting], max(last - time.monotonic(), 0))
        waiting = [p for p in running if p.exitcode is None] if time.monotonic() < last else []
    ended = [
        end(p, log, 0 if p.exitcode is None else None) for p, log in zip(running, logs, strict=True)
    ]
    assert all(process.returncode == 0 for process in ended), ended
    return [json.loads(process.stdout.splitlines()[-1]) for process in ended]


def command(words, cwd, env):
    from support.sketches import sketch_curves

    sketch_curves()
    os.chdir(cwd), os.environ.update(env)
    sys.argv[1:] = words
    try:
        runpy.run_module("trainkit", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code


def shell(*words, cwd, **env):
    "The command `trainkit WORDS`, in a fresh process."
    with tempfile.TemporaryDirectory() as folder:
        return in_child(
            command,
            [str(w) for w in words],
            cwd,
            {"PYTHONPATH": str(ROOT), **env},
            folder=Path(folder),
        )


def run_file(path, cwd):
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.argv[:] = [str(path)]
    runpy.run_path(str(path), run_name="__main__")


def program(code, folder):
    "`python program.py` in a fresh process and folder; torch and trainkit are imported already."
    path = Path(folder) / "program.py"
    path.write_text(code, encoding="utf-8")
    with tempfile.TemporaryDirectory() as logs:
        return in_child(run_file, path, folder, folder=Path(logs))


def call(*words, cwd, **env):
    "The same command in this process, where it is not the process that is looked at."
    from trainkit.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        chdir(cwd),
        patch.dict(os.environ, env),
        patch.object(sys, "argv", ["trainkit", *map(str, words)]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def rests(thread):
    "Whether it is held by a pause; a time would be too short on a busy machine."
    from trainkit.train.config import Control

    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code is not Control.wait.__code__:
        frame = frame.f_back
    return frame is not None


def await_here(coroutine):
    "`asyncio.run`, also where the loop of a browser's driver rests in this thread."
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(coroutine)
    finally:
        asyncio._set_running_loop(loop)
