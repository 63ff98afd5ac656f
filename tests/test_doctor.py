"What the doctor says of many machines, and the limits of a container."

import os
import subprocess
import sys

import pytest
from support.snapshots import compare

from trainkit import system
from trainkit.system import available_memory, doctor, explain_dtype, file_cache, read_number
from trainkit.system import usable_cores

GIB = 2**30
CPU = dict(type="cpu", name="A", count=1, threads=2, build="cpu")
CUDA = dict(CPU, type="cuda", name="G", build="12.4", capability=(8, 0), vram=(16 * GIB, 8 * GIB))
SOUND = dict(
    python="3.11.7",
    versions=dict(system.COURSE, packaging="24.0", torch="2.5", numpy="2.0", ipywidgets="8.1"),
    declared={"": ["torch>=2.4", "numpy"], "gpu": ["bitsandbytes>=0.45"], "dev": ["never"]},
    requires={},
    loaded={},
    device=CPU,
    nvidia=False,
    notebook=False,
    flags={},
    ram=(16 * GIB, 2 * GIB),
    disk=(100 * GIB, 50 * GIB),
    cores=2,
    bwrap=True,
)


def versions(**more):
    return dict(versions={k: v for k, v in (SOUND["versions"] | more).items() if v})


MACHINES = {
    "sound": {},
    "old python": dict(python="3.10.9"),
    "newest python": dict(python="3.11.0"),
    "old torch, no numpy": versions(torch="2.3", numpy=None),
    "no packaging": versions(packaging=None),
    "torchao 0.15 next to peft 0.19": versions(torchao="0.15.0", peft="0.19.0"),
    "torchao 0.16 next to peft 0.19": versions(torchao="0.16.0", peft="0.19.0"),
    "torchao 0.15 next to peft 0.18": versions(torchao="0.15.0", peft="0.18.9"),
    "what a library wants": dict(requires={"torch": ["numpy>=3", "sympy"]}),
    "replaced": dict(loaded={"torch": "2.4+cpu", "numpy": "2.0+local", "gone": "1"}),
    "no torch": dict(device={}),
    "a torch that breaks": dict(device=dict(error="OSError: no library")),
    "a GPU that torch does not see": dict(nvidia=True),
    "a GPU": dict(device=CUDA, nvidia=True),
    "an old GPU": dict(device=dict(CUDA, capability=(7, 5), vram=(GIB, GIB))),
    "a newer GPU": dict(device=dict(CUDA, capability=(12, 0))),
    "two GPUs": dict(device=dict(CUDA, count=2)),
    "two GPUs in a notebook": dict(device=dict(CUDA, count=2), notebook=True),
    "one of them": dict(
        device=dict(CUDA, count=2), notebook=True, flags={"CUDA_VISIBLE_DEVICES": "0"}
    ),
    "an AMD GPU": dict(device=dict(CUDA, build="ROCm 6.2", vram=(8 * GIB, GIB))),
    "an Apple": dict(device=dict(CPU, type="mps")),
    "little room": dict(ram=(4 * GIB, 2 * GIB - 1), disk=(9 * GIB, 0)),
    "nothing known": dict(ram=None, disk=None, device=dict(CPU, threads=0)),
    "more threads than cores": dict(cores=1),
    "fewer threads": dict(cores=3),
    "no widgets": versions(ipywidgets=None),
    "no widgets in a notebook": versions(ipywidgets=None) | dict(notebook=True),
    "widgets 7.6": versions(ipywidgets="7.6.9"),
    "widgets 7.7": versions(ipywidgets="7.7.0", ipykernel="7.0.1"),
    "kernel 7.1": versions(ipykernel="7.1.0"),
    "trl": versions(trl="0.20"),
    "trl, offline": versions(trl="0.20") | dict(flags={"HF_HUB_OFFLINE": "1"}),
    "trl, silent": versions(trl="0.20") | dict(flags={system.FLAGS[2]: "yes"}),
    "no bwrap": dict(bwrap=False),
    "an extra that replaces": versions(bitsandbytes="0.40"),
    "an extra that is there": versions(bitsandbytes="0.45.0"),
    "half of the course": versions(**{name: None for name in [*system.COURSE][:2]}),
}


def test_what_the_doctor_says():
    "The findings that differ from those of a sound machine, and its last line."
    sound = str(doctor(SOUND)).splitlines()
    lines = [f"# sound\n{doctor(SOUND)}\n"]
    for name, changes in MACHINES.items():
        report = doctor(SOUND | changes)
        told = [line.strip() for line in str(report).splitlines() if line not in sound]
        lines.append(f"# {name}: {report.ok}\n" + "".join(f"{line}\n" for line in told))
    compare("\n".join(lines), "doctor.txt")
    with pytest.raises(RuntimeError) as error:
        doctor(SOUND | dict(python="3.10.9", device=dict(error="x"))).require()
    assert str(error.value) == (
        "This machine is not ready:\n  python: 3.10.9\n    install Python 3.11 or newer\n"
        "  device: torch does not import: x\n    pip install --force-reinstall torch"
    )
    assert doctor(SOUND).require().summary() == "ready"


def test_the_dtype_of_a_device():
    pairs = [((8, 0), "bfloat16"), ((7, 9), "float16"), ((9, 0), "bfloat16")]
    for capability, dtype in pairs:
        assert explain_dtype(dict(type="cuda", capability=capability))[0] == dtype


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 8),
        (dict(cpu_dot_max="max 100000"), 8),
        (dict(cpu_dot_max="250000 100000"), 2),
        (dict(cpu_dot_max="350000 100000"), 4),
        (dict(cpu_dot_max="10000 100000"), 1),
        (dict(cpu_dot_max="9900000 100000"), 8),
        (dict(cpu__cpu_dot_cfs_quota_us="-1", cpu__cpu_dot_cfs_period_us="100000"), 8),
        (dict(cpu__cpu_dot_cfs_quota_us="300000", cpu__cpu_dot_cfs_period_us="100000"), 3),
    ],
)
def test_cores_of_a_container(files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    assert usable_cores(write(tmp_path, **files)) == cores


@pytest.mark.parametrize(
    "files, room",
    [
        ({}, (1000, 600)),
        (dict(memory_dot_max="max", memory_dot_current="5"), (1000, 600)),
        (dict(memory_dot_max="1000", memory_dot_current="900"), (1000, 600)),
        (dict(memory_dot_max="999", memory_dot_current="900"), (999, 99)),
        (dict(memory_dot_max="999", memory_dot_current="9"), (999, 600)),
        (
            dict(
                memory_dot_max="500", memory_dot_current="450", memory_dot_stat="inactive_file 30"
            ),
            (500, 80),
        ),
        (
            dict(
                memory__memory_dot_limit_in_bytes="400",
                memory__memory_dot_usage_in_bytes="300",
                memory__memory_dot_stat="inactive_file 1\ntotal_inactive_file 7",
            ),
            (400, 107),
        ),
    ],
)
def test_memory_of_a_container(files, room, tmp_path, monkeypatch):
    import psutil

    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: type("M", (), dict(total=1000, available=600))
    )
    assert available_memory(write(tmp_path, **files)) == room


def test_the_first_number_of_a_file(tmp_path):
    folder = write(tmp_path, a="max 5", b="7 8", c="")
    assert read_number(f"{folder}/a", f"{folder}/c", f"{folder}/d", f"{folder}/b") == 7
    assert read_number(f"{folder}/a") is None and file_cache(folder) == 0


def test_a_fork_does_not_wait_for_the_helpers_of_its_parent():
    "A thread that computes may begin in a process that was forked after a product."
    program = """if True:
        import os, signal
        import torch
        from trainkit.system import start_worker

        left = torch.ones(256, 256)
        left @ left
        start_worker(lambda: left @ left, name="in the parent").join()
        left @ left
        if not (child := os.fork()):
            signal.alarm(20)
            start_worker(lambda: None, name="in the child").join()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    env = dict(os.environ, OMP_NUM_THREADS="2")
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "7", done.stderr
