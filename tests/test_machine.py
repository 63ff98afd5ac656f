"The doctor on other machines: bare ones, broken ones, and real packages that clash."

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit import system
from trainkit.config import pick_device, pick_dtype
from trainkit.system import _glibc, declared_requirements, heap_peak, keep_freed_memory
from trainkit.system import look_at_device
from trainkit.system import COURSE, Report, doctor, environment, explain_dtype

ROOT = Path(__file__).parent.parent


def run(code: str, *flags: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dtype_and_device_are_those_of_config():
    device = pick_device()
    assert look_at_device()["type"] == device.type
    assert f"torch.{explain_dtype(look_at_device())[0]}" == str(pick_dtype(device))


def test_course_packages_are_those_of_the_requirements_file():
    lines = (ROOT / "requirements-course.txt").read_text().splitlines()
    assert [f"{name}=={version}" for name, version in COURSE.items()] == [
        line for line in lines if re.match(r"\w", line)
    ]


def test_declared_is_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(lines):
        return sorted(re.split(r"[\[<>=!~ ]", line)[0].lower() for line in lines)

    requirements = declared_requirements()
    assert {extra: names(lines) for extra, lines in requirements.items()} == {
        "": names(project["dependencies"])
    } | {extra: names(lines) for extra, lines in project["optional-dependencies"].items()}


def test_bare_python_has_a_doctor():
    "No site-packages at all: nothing to import, nothing to raise."
    out = run(
        'import sys; sys.path.insert(0, "."); from trainkit.system import doctor, environment; '
        "import json;"
        'json.dumps(environment()); r = doctor(); print(r.ok, "torch" in sys.modules, '
        "len(r.checks)); print(r)",
        "-S",
    )
    assert out.splitlines()[0].split()[1] == "False"
    assert out.startswith("False") and 'pip install packaging "torch>=' in out


def test_doctor_imports_only_torch():
    out = run(
        "from trainkit.system import doctor; doctor(); import sys;"
        'print([m for m in ("transformers", "accelerate", "pydantic", "matplotlib", '
        '"ipywidgets") if m in sys.modules])'
    )
    assert out.strip() == "[]"


def package(folder: Path, name: str, version: str, **files: str):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / f"{path}.py").write_text(text)


@pytest.mark.parametrize("torchao, broken", [("0.10.0", True), ("0.16.0", False)])
def test_installed_torchao_beside_peft(tmp_path, monkeypatch, torchao, broken):
    package(tmp_path, "torchao", torchao)
    package(tmp_path, "peft", "0.21.2")
    monkeypatch.syspath_prepend(tmp_path)
    report = doctor()
    assert ("pip uninstall -y torchao" in str(report)) == broken and report.ok == (not broken)


def test_torch_that_does_not_import(tmp_path):
    package(
        tmp_path,
        "torch",
        "2.6.0",
        __init__='raise OSError("libcudart.so.12: cannot open shared object file")',
    )
    out = run(
        (
            "from trainkit.system import doctor, environment; r = doctor(); print(r.ok); "
            "print(r); environment()"
        ),
        PYTHONPATH=str(tmp_path),
    )
    assert (
        out.startswith("False")
        and "OSError: libcudart.so.12" in out
        and "pip install --force-reinstall torch" in out
    )


def test_replaced_after_import(tmp_path, monkeypatch):
    import numpy  # noqa: F401

    package(tmp_path, "numpy", "9.9.9")  # What is on disk now; the one in memory is the real one
    monkeypatch.syspath_prepend(tmp_path)
    out = str(doctor())
    assert (
        re.search(r"fail +kernel +imported before .*numpy \S+ \(now 9\.9\.9\)", out)
        and "restart the kernel" in out
    )


def test_environment_holds_nothing_private(monkeypatch):
    for name, value in dict(HF_TOKEN="hf_secret", WANDB_API_KEY="sesame").items():
        monkeypatch.setenv(name, value)
    out = json.dumps(environment())
    for private in ("hf_secret", "sesame", str(Path.home()), str(ROOT)):
        assert private not in out
    facts = json.loads(out)
    assert (
        facts["versions"]["torch"]
        and facts["python"]
        and set(facts["git"] or {"commit", "dirty"}) == {"commit", "dirty"}
    )


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"versions": {}},
        {"versions": None, "device": None},
        {"versions": {"torch": "not a version"}},
    ],
)
def test_nonsense_is_a_warning(facts):
    report = doctor(facts)
    assert isinstance(report, Report) and report.checks and str(report) and report._repr_html_()


def test_rocm_is_named_where_torch_says_cuda(monkeypatch):
    "torch calls an AMD GPU cuda; the build says what it is, and which program looks at it."
    import torch

    from trainkit.system import check_device, check_room

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.2.41133", raising=False)
    assert look_at_device()["build"] == "ROCm 6.2.41133"
    device = dict(
        type="cuda",
        name="AMD Instinct MI300X",
        count=1,
        capability=(9, 4),
        build="ROCm 6.2.41133",
        vram=(2**34, 2**28),
        threads=1,
    )
    facts = dict(device=device, nvidia=None, notebook=False, flags={}, ram=None, disk=None, cores=2)
    assert next(check_device(facts)).seen == "cuda (AMD Instinct MI300X, ROCm 6.2.41133)"
    assert "rocm-smi" in next(check_room(facts)).fix
    facts["device"] = device | dict(name="NVIDIA H200", build="12.8")
    assert (
        next(check_device(facts)).seen == "cuda (NVIDIA H200)"
        and "nvidia-smi" in next(check_room(facts)).fix
    )


M = 2**20
TWICE = [(0, M), (0, 0), (1, 2 * M), (1, 0), (2, M)]  # The second block does not fit into the first


@pytest.mark.skipif(_glibc() is None, reason="asks glibc")
@pytest.mark.parametrize(
    "events, knobs, peak",
    [
        ([(0, 100)], {}, 0),
        ([(0, M), (0, 0), (1, M // 2)], {}, M),
        ([(0, M), (1, M), (0, 0), (2, M // 2), (3, M // 2)], {}, 2.5 * M),
        (TWICE, {}, 3 * M),
        (TWICE, dict(thread=True), 3 * M),
        (TWICE, dict(kept=False), 2 * M),
    ],
)
def test_the_memory_that_blocks_will_take(events, knobs, peak):
    "What is freed stays with the process, or goes back at once; on whole pages."
    took = heap_peak(events, beside=[()], seconds=20, **knobs)
    assert took is not None and took % 4096 == 0
    # glibc 2.43 lets the block at the end of the heap grow
    least = 2 * M if events is TWICE else peak
    assert least <= took <= peak + 6 * 4096


@pytest.mark.skipif(_glibc() is None, reason="asks glibc")
def test_a_busy_machine_does_not_lose_the_memory_that_was_played(monkeypatch):
    "One layout that takes too long is left out of the mean; the limit is CPU time."
    results = iter([b"400", b"200", subprocess.TimeoutExpired("python", 1)])
    limits = []

    def run(call, input, capture_output, timeout):
        limits.append((json.loads(call[-1])["seconds"], timeout))
        if isinstance(result := next(results), Exception):
            raise result
        return subprocess.CompletedProcess(call, 0, stdout=result)

    monkeypatch.setattr(system.subprocess, "run", run)
    assert heap_peak([(0, 100)], beside=[(), (), ()], seconds=3) == 300
    assert limits == [(3, 60)] * 3


def test_the_record_of_a_machine_counts_in_gib(monkeypatch):
    facts = dict(ram=(24 * 2**30, 9 * 2**30), device=dict(kind="cuda", vram=(16 * 2**30, 2**30)))
    monkeypatch.setattr(system, "collect_facts", lambda: facts)
    record = environment()
    assert (record["ram_gib"], record["device"]) == (24.0, dict(kind="cuda", vram_gib=16.0))


def test_freed_memory_is_kept_by_glibc_unless_it_is_set_up_already(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    with keep_freed_memory() as kept, keep_freed_memory(False) as unwanted:
        assert kept == (platform.libc_ver()[0] == "glibc") and not unwanted
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    with keep_freed_memory() as kept:
        assert not kept


def test_memory_is_kept_within_the_block_and_not_after(monkeypatch):
    calls = []
    libc = SimpleNamespace(mallopt=lambda option, value: calls.append((option, value)))
    for name in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(system, "_glibc", lambda: libc)
    monkeypatch.setattr(system, "trim_malloc", lambda: calls.append("trim"))
    monkeypatch.setattr(system, "_loops", [0])
    with keep_freed_memory(), keep_freed_memory():
        assert calls == [*system.KEEP.items()]
    assert calls == [*system.KEEP.items(), *system.USUAL.items(), "trim"]
