"""The memory that a program of its own needs at most: measured in a child process, in bytes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# In the child. `ru_maxrss` would begin with the parent's peak, which hides what the child needs
PEAK_MEMORY = """
def peak_memory():
    import resource, sys
    if sys.platform.startswith('linux'):
        with open('/proc/self/status') as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith('VmHWM'))
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
"""

# Freed tensors go back to the system at once: what malloc keeps for later differs by 10 MB from one
# run to the next, and says nothing of the code that is measured
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def run_measured(code: str, *arguments: object) -> str:
    "What `code` prints in a process of its own; it may call `peak_memory()`."
    done = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **MALLOC},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
