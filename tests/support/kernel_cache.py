"""One cache of Numba's machine code for all tests and lessons.

Numba keeps what it has compiled next to a module, for as long as the time of the file is the same,
and forgets what a notebook has compiled. Here both go to one folder, in which a change of any
source of a kernel starts anew: a lesson that builds a module and the module's own tests compile
a function once. Where two processes need it at the same moment, one compiles and the other waits.
"""

import hashlib
import json
import shutil
import uuid
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path

import numba
from numba.core.caching import CacheImpl, IndexDataCacheFile, _CacheLocator
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".pytest_cache" / "kernels"


@cache
def sources():
    "A hash of all modules with kernels, and of the code of all notebooks that compile some."
    digest = hashlib.sha256()
    for path in sorted((*ROOT.glob("trainkit/**/*.py"), *ROOT.glob("nbs/**/*.ipynb"))):
        text = path.read_text(encoding="utf-8")
        if "compile_kernels" not in text or path.stem == "_modidx":
            continue
        if path.suffix == ".ipynb":
            text = repr(
                [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
            )
        digest.update(text.encode())
    return digest.hexdigest()


class KernelLocator(_CacheLocator):
    "Where the machine code lies of a function from `compile_kernels`, and when it is valid."

    def get_cache_path(self):
        return str(FOLDER / sources()[:16])

    def get_source_stamp(self):
        return sources()

    def get_disambiguator(self):
        return "0"

    @classmethod
    def from_function(cls, function, path):
        return (
            cls()
            if Path(path).is_relative_to(ROOT / "trainkit") or path.startswith("<ipython-")
            else None
        )


def data_name(self, number):
    "Never one that another process takes at the same moment for a function of other types."
    return f"{self._index_name}.{uuid.uuid4().hex[:16]}.nbc"


name_of = CacheImpl.get_filename_base


def get_filename_base(self, fullname, abiflags):
    "Without the name of the file, which is another one in a notebook."
    if isinstance(self.locator, KernelLocator):
        fullname = "kernels." + fullname.rpartition(".")[2]
    return name_of(self, fullname, abiflags)


HELD = set()  # Files that this process has locked; a function that calls itself needs its own


@contextmanager
def alone(path):
    "Wait until no other process compiles this function; what it has compiled is then on disk."
    if fcntl is None or path in HELD:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        HELD.add(path)
        try:
            yield
        finally:
            HELD.remove(path)
            fcntl.flock(file, fcntl.LOCK_UN)  # A child that was forked meanwhile holds it too


def one_at_a_time(compile_):
    @wraps(compile_)
    def compile_once(self, sig):
        locator = getattr(getattr(self._cache, "_impl", None), "locator", None)
        if not isinstance(locator, KernelLocator):
            return compile_(self, sig)
        path = Path(locator.get_cache_path()) / f"{self._cache._impl.filename_base}.lock"
        with global_compiler_lock, alone(path):  # Of this process only one thread
            return compile_(self, sig)

    return compile_once


def share():
    "From now on this process and those that it forks use the folder, also for notebooks."
    CacheImpl._locator_classes = [KernelLocator, *CacheImpl._locator_classes]
    CacheImpl.get_filename_base = get_filename_base
    IndexDataCacheFile._data_name = data_name
    Dispatcher.compile = one_at_a_time(Dispatcher.compile)
    for old in FOLDER.glob("*") if FOLDER.exists() else ():
        if old.name != sources()[:16]:
            shutil.rmtree(old, ignore_errors=True)
    plain = numba.njit

    def njit(*functions, **options):
        if functions and functions[0].__code__.co_filename.startswith("<ipython-"):
            options["cache"] = True
        return plain(*functions, **options)

    numba.njit = njit
