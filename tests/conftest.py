"Settings for all tests: one thread, no network, and the slow ones only when asked for."
import os

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', HF_HUB_DISABLE_TELEMETRY='1', TOKENIZERS_PARALLELISM='false')

import multiprocessing
import runpy
import shutil
import sys
import tempfile
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


FORK = multiprocessing.get_context('forkserver') # a fresh process for each caller, torch's import paid once for all
FORK.set_forkserver_preload(['nbdev.test', 'IPython', 'matplotlib.pyplot', 'matplotlib_inline.backend_inline', 'torch', 'bitsandbytes',
                             'transformers.trainer', 'transformers.models.llama.modeling_llama', 'accelerate', 'peft', 'datasets'])


def child(function, args, out, err):
    "The body of a process: what it says goes to two files."
    multiprocessing.set_start_method(None, force=True) # the platform's own for what `function` starts
    for number, path in ((1, out), (2, err)): os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try: code = function(*args)
    finally: sys.stdout.flush(), sys.stderr.flush()
    sys.exit(code)


def in_child(function, *args, folder):
    "Call it in a fresh process, its logs in `folder`; returncode, stdout and stderr as `subprocess.run` gives them."
    out, err = folder/'out.txt', folder/'err.txt'
    for path in (out, err): path.write_text('')
    process = FORK.Process(target=child, args=(function, args, out, err))
    process.start()
    process.join(600)
    if process.exitcode is None: process.kill(), process.join()
    said = (path.read_text(encoding='utf-8', errors='replace') for path in (out, err))
    return SimpleNamespace(returncode=process.exitcode, stdout=next(said), stderr=next(said))


def command(words, cwd, env):
    os.chdir(cwd), os.environ.update(env)
    sys.argv[1:] = words
    try: runpy.run_module('trainkit', run_name='__main__', alter_sys=True)
    except SystemExit as end: return end.code


def shell(*words, cwd, **env):
    "The command `trainkit WORDS`, in a fresh process."
    with tempfile.TemporaryDirectory() as folder:
        return in_child(command, [str(w) for w in words], cwd, {'PYTHONPATH': str(ROOT), **env}, folder=Path(folder))


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
