"Settings for all tests: one thread, no network, and the slow ones only when asked for."
import os

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', HF_HUB_DISABLE_TELEMETRY='1', TOKENIZERS_PARALLELISM='false')

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
def root() -> Path:
    return ROOT
