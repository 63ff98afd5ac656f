"Settings for all tests: one thread, no network, and the slow ones only when asked for."
import os

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', HF_HUB_DISABLE_TELEMETRY='1', TOKENIZERS_PARALLELISM='false')

import shutil
import warnings
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(config, items):
    "Leave out slow tests unless TRAINKIT_SLOW is set; TRAINKIT_SLOW_SLICE='1/4' keeps a fixed quarter of them."
    if not os.environ.get('TRAINKIT_SLOW'):
        skip = [item for item in items if 'slow' in item.keywords]
        items[:] = [item for item in items if 'slow' not in item.keywords]
        config.hook.pytest_deselected(items=skip)
    elif part := os.environ.get('TRAINKIT_SLOW_SLICE'):
        index, count = map(int, part.split('/'))
        out = [item for item in items if 'slow' in item.keywords and zlib.crc32(item.nodeid.encode()) % count != index]
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
