"Settings for all tests: one thread, no network, and the slow ones only when asked for."

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # What one process has compiled, the many after it read

import gc
import shutil
import signal
import sys

# jsonschema would build 38 parsers of web addresses, 1.2 CPU seconds in each process; notebooks
# are validated without them
sys.modules["rfc3987_syntax"] = None

import warnings
import zlib
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from support import lines
from support.cpu import FILE, CpuMeter
from support.processes import SERVER, serve

sys.dont_write_bytecode = False

# What a shell starts with `&` ignores Ctrl-C, and with `nohup` the end of the terminal; tests that
# send one of them would wait for minutes
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.name == "posix" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    "Where xdist tests in several processes, one server is for all of them."
    serve()
    node.workerinput["server"] = {
        name: value
        for name, value in vars(SERVER).items()
        if name in ("_forkserver_address", "_forkserver_authkey")
    }


def pytest_configure(config):
    if path := os.environ.get(FILE):
        os.environ[FILE] = os.path.abspath(path)
        config.pluginmanager.register(CpuMeter(os.environ[FILE]))
    if address := getattr(config, "workerinput", {}).get("server"):
        vars(SERVER).update(
            address,
            _forkserver_alive_fd=os.pipe()[1],
            ensure_running=resource_tracker.ensure_running,
        )  # It lives as long as who began it
    if (
        hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    ):  # Here tests are run
        if path := os.environ.get(lines.FOLDER):
            os.environ[lines.FOLDER] = os.path.abspath(path)
            config.pluginmanager.register(lines.LineMeter())
        from hypothesis import HealthCheck, settings

        # A slow machine is no failure. `make test` tries the same cases each time, so that it fails
        # for what was changed; `make test-slow` draws new ones
        settings.register_profile(
            "busy",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=not os.environ.get("TRAINKIT_SLOW"),
        )
        settings.load_profile("busy")


FIRST = (  # With tests of four seconds and more
    "test_browser",
    "test_cli",
    "test_methods",
    "test_next_steps",
    "test_resume",
    "test_session",
)


# Tests that are slow without saying so in their file. It was measured for all tests together what
# each costs, and which lines no other test runs (CONTRIBUTING.md)
COSTLY = {*Path(__file__).with_name("costly.txt").read_text(encoding="utf-8").splitlines()}


@pytest.hookimpl(tryfirst=True)  # Before `-m slow` chooses
def pytest_collection_modifyitems(config, items):
    """Leave out slow tests unless TRAINKIT_SLOW is set; files with long tests come first.

    TRAINKIT_SLOW_SLICE='1/4' keeps a fixed quarter of the slow tests, and no long one. Long
    tests come first, so that no process is left with one at the end.
    """
    for item in items:
        if item.nodeid in COSTLY:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in FIRST)
    if not os.environ.get("TRAINKIT_SLOW"):
        skip = [item for item in items if "slow" in item.keywords]
        items[:] = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=skip)
    elif part := os.environ.get("TRAINKIT_SLOW_SLICE"):
        index, count = map(int, part.split("/"))
        out = [
            item
            for item in items
            if "slow" in item.keywords
            and ("long" in item.keywords or zlib.crc32(item.nodeid.encode()) % count != index)
        ]
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)


def pytest_collection_finish():
    """Share what Numba compiles, sketch the pictures of reports, and freeze imports and tests.

    Later garbage collections need not search what is frozen.
    """
    with suppress(ImportError):
        from support import kernel_cache

        kernel_cache.share()
    from support.sketches import sketch_curves

    sketch_curves()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_signals():
    "No test leaves its handler of Ctrl-C behind, which the next test would meet."
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is before, f"the test leaves {after} for Ctrl-C, where {before} was"


@pytest.fixture
def real_curves():
    "In this test the pictures of a report are drawn; elsewhere they are sketched."
    from support.sketches import drawn

    with drawn():
        yield


@pytest.fixture(scope="session")
def browser():
    "A headless Chromium, driven by Playwright; without one the test is skipped with a warning."
    named = (
        os.environ.get("CHROMIUM"),
        *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
    )
    executable = next((path for path in named if path and os.path.exists(path)), None)
    if executable is None:
        warnings.warn(
            (
                "NO BROWSER: install chromium, or set CHROMIUM to its path; "
                "the browser tests are skipped"
            ),
            stacklevel=1,
        )
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=executable,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        yield chromium
        chromium.close()
