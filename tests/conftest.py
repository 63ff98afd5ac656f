"Settings for all tests: one thread, no network, and the slow ones only when asked for."
import os

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', HF_HUB_DISABLE_TELEMETRY='1', TOKENIZERS_PARALLELISM='false')
os.environ.pop('PYTHONDONTWRITEBYTECODE', None) # What one process has compiled, the many after it read

import asyncio
import gc
import io
import json
import multiprocessing
import runpy
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

sys.dont_write_bytecode = False
ROOT = Path(__file__).parent.parent


FORK = multiprocessing.get_context('forkserver') # a fresh process for each caller, the imports paid once for all
FORK.set_forkserver_preload(['warm']) # tests/warm.py
SERVER = forkserver._forkserver


def serve():
    "Begin the server from which fresh processes are forked, if there is none."
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT/'tests'), os.environ.get('PYTHONPATH'))))): SERVER.ensure_running()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    "Where xdist tests in several processes, one server is for all of them."
    serve()
    node.workerinput['server'] = {name: value for name, value in vars(SERVER).items() if name in ('_forkserver_address', '_forkserver_authkey')}


def pytest_configure(config):
    if told := getattr(config, 'workerinput', {}).get('server'):
        vars(SERVER).update(told, _forkserver_alive_fd=os.pipe()[1], ensure_running=resource_tracker.ensure_running) # It lives as long as who began it
    if hasattr(config, 'workerinput') or config.getoption('dist', 'no') == 'no': # Here tests are run
        from hypothesis import HealthCheck, settings
        settings.register_profile('busy', deadline=None, suppress_health_check=[HealthCheck.too_slow]) # A slow machine is no failure
        settings.load_profile('busy')


def child(function, args, out, err):
    "The body of a process: what it says goes to two files."
    gc.freeze() # what was imported is no garbage, and is not looked through again
    multiprocessing.set_start_method(None, force=True) # the platform's own for what `function` starts
    for number, path in ((1, out), (2, err)): os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try: code = function(*args)
    finally: sys.stdout.flush(), sys.stderr.flush()
    sys.exit(code)


def begin(function, *args, folder):
    "Start it in a fresh process, which writes what it says to out.txt and err.txt in `folder`."
    out, err = folder/'out.txt', folder/'err.txt'
    for path in (out, err): path.write_text('')
    serve()
    process = FORK.Process(target=child, args=(function, args, out, err))
    process.start()
    return process


def end(process, folder, timeout=600):
    "Wait for it, and kill it after `timeout` seconds; returncode, stdout and stderr as `subprocess.run` gives them."
    process.join(timeout)
    if process.exitcode is None: process.kill(), process.join()
    out, err = ((folder/f'{name}.txt').read_text(encoding='utf-8', errors='replace') for name in ('out', 'err'))
    return SimpleNamespace(returncode=process.exitcode, stdout=out, stderr=err)


def in_child(function, *args, folder):
    "Call it in a fresh process, its logs in `folder`; what became of it."
    return end(begin(function, *args, folder=folder), folder)


def ranked(function, args, env):
    os.environ.update(env)
    return function(*args)


def together(n, function, *args, folder):
    "The same call in `n` processes on gloo; what each said last, as JSON."
    from trainkit.processes import free_port
    env = dict(ACCELERATE_USE_CPU='true', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    logs = [Path(tempfile.mkdtemp(prefix='rank', dir=folder)) for _ in range(n)]
    running = [begin(ranked, function, args, env | dict(RANK=str(i), LOCAL_RANK=str(i)), folder=logs[i]) for i in range(n)]
    waiting, last = [*running], time.monotonic() + 240
    while waiting and all(p.exitcode in (None, 0) for p in running): # one that fails leaves the others waiting for it
        wait([p.sentinel for p in waiting], max(last - time.monotonic(), 0))
        waiting = [p for p in running if p.exitcode is None] if time.monotonic() < last else []
    ended = [end(p, log, 0 if p.exitcode is None else None) for p, log in zip(running, logs, strict=True)]
    assert all(found.returncode == 0 for found in ended), ended
    return [json.loads(found.stdout.splitlines()[-1]) for found in ended]


def command(words, cwd, env):
    os.chdir(cwd), os.environ.update(env)
    sys.argv[1:] = words
    try: runpy.run_module('trainkit', run_name='__main__', alter_sys=True)
    except SystemExit as end: return end.code


def shell(*words, cwd, **env):
    "The command `trainkit WORDS`, in a fresh process."
    with tempfile.TemporaryDirectory() as folder:
        return in_child(command, [str(w) for w in words], cwd, {'PYTHONPATH': str(ROOT), **env}, folder=Path(folder))


def call(*words, cwd, **env):
    "The same command in this process, where it is not the process that is looked at."
    from trainkit.cli import main
    out, err, code = io.StringIO(), io.StringIO(), 0
    with chdir(cwd), patch.dict(os.environ, env), patch.object(sys, 'argv', ['trainkit', *map(str, words)]), redirect_stdout(out), redirect_stderr(err):
        try: main()
        except SystemExit as end: code = end.code or 0
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


FIRST = ('test_browser', 'test_distributed', 'test_cli', 'test_align', 'test_translate') # With tests of ten seconds and more


def pytest_collection_modifyitems(config, items):
    """Leave out slow tests unless TRAINKIT_SLOW is set; TRAINKIT_SLOW_SLICE='1/4' keeps a fixed quarter of them, and no long one.
    Files with long tests come first, so that no process is left with one at the end."""
    items.sort(key=lambda item: item.path.stem not in FIRST)
    if not os.environ.get('TRAINKIT_SLOW'):
        skip = [item for item in items if 'slow' in item.keywords]
        items[:] = [item for item in items if 'slow' not in item.keywords]
        config.hook.pytest_deselected(items=skip)
    elif part := os.environ.get('TRAINKIT_SLOW_SLICE'):
        index, count = map(int, part.split('/'))
        out = [item for item in items if 'slow' in item.keywords
               and ('long' in item.keywords or zlib.crc32(item.nodeid.encode()) % count != index)]
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)


def rests(thread):
    "Whether it is held by a pause; a time would be too short on a busy machine."
    from trainkit.plan import Control
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code is not Control.wait.__code__: frame = frame.f_back
    return frame is not None


def await_here(coroutine):
    "`asyncio.run`, also where the loop of a browser's driver rests in this thread."
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try: return asyncio.run(coroutine)
    finally: asyncio._set_running_loop(loop)


def pytest_collection_finish():
    "Whoever collects garbage later looks no more through what was imported and the tests themselves."
    gc.collect()
    gc.freeze()


@pytest.fixture(scope='session')
def browser():
    "A headless Chromium, driven by Playwright; the test is skipped, with a warning, where there is none."
    named = (os.environ.get('CHROMIUM'), *map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome')))
    found = next((path for path in named if path and os.path.exists(path)), None)
    if found is None:
        warnings.warn('NO BROWSER: install chromium, or set CHROMIUM to its path; the browser tests are skipped', stacklevel=1)
        pytest.skip('no Chromium on this machine')
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=[
            '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
            '--disable-component-update', '--disable-sync'])
        yield chromium
        chromium.close()
