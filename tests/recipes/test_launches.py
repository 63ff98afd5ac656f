"What the words about processes ask for, the command and files of a launch, and why one failed."

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import in_child
from support.snapshots import answer_all
from typer.testing import CliRunner

from trainkit.config import ConfigError, to_dict
from trainkit.recipes import launcher
from trainkit.recipes.launcher import LaunchConfig, WorkerFailed, find_failure, translate_launch
from trainkit.settings import OPTIMIZER_NAMES, SHARDED_OPTIMIZERS

DEFAULTS = to_dict(LaunchConfig())


def asked(question):
    "For `WORDS [with WORDS OF THE COMMAND LINE]` in JSON, the launch and what is left."
    words, _, more = question.partition(" with ")
    notes: list = []
    try:
        launch, rest = translate_launch(json.loads(words), notes, **json.loads(more or "{}"))
    except ConfigError as error:
        return " | ".join(str(error).splitlines())
    changed = {k: v for k, v in to_dict(launch).items() if v != DEFAULTS[k]}
    noted = "".join(f" ! {p.path} = {p.value}: {p.remedy}" for p in notes)
    return f"{json.dumps(changed)} {json.dumps(rest)}{noted}"


def test_what_the_words_about_processes_ask_for():
    answer_all(asked, "launch_words.txt")


def command(question):
    "For the fields of a launch in JSON, the variables, the words and the files."
    fields = json.loads(question)
    gpu, launch = fields.pop("gpu", False), LaunchConfig(**fields)
    words, env = launcher.launch_command(["train.py"], launch, Path("here"), gpu)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    files = launcher.launch_files(launch, gpu)
    deepspeed = files.get("deepspeed.json", "").replace("\n", "")
    accelerate = ", ".join(files["accelerate.yaml"].splitlines())
    variables = [f"{name}={value}" for name, value in env.items()]
    return " ".join([*variables, *words[3:], "|", accelerate, deepspeed]).strip()


def test_the_command_and_files_of_a_launch(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    answer_all(command, "launch_commands.txt")


def test_the_threads_that_were_asked_for_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in command('{"num_processes": 2}')


ROOT_CAUSE = """
Failures:
  rank      : 7 (local_rank: 7)
  exitcode  : 1
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_10:00:00
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 4321)
"""


def test_the_process_that_failed_first_and_its_last_words(tmp_path):
    "The log is that of the last attempt; its last eight lines are shown."
    for number in range(12):
        for local in ("0", "1"):
            log = tmp_path / "run" / f"attempt_{number}" / local / "stderr.log"
            log.parent.mkdir(parents=True)
            log.write_text("".join(f"line {i} of {local} in {number}\n\n" for i in range(20)))
        os.utime(tmp_path / "run" / f"attempt_{number}", (9, 9))
    rank, code, log, restarts = find_failure(ROOT_CAUSE, tmp_path)
    assert (rank, code, restarts) == (3, -9, 11)
    assert log == tmp_path / "run" / "attempt_11" / "1" / "stderr.log"
    failed = WorkerFailed(rank, code, log, restarts)
    first, *lines = str(failed).splitlines()
    assert first.startswith(
        "Process 3 died after 11 restarts (killed, perhaps because the memory was full). Its log is"
    )
    assert lines == [f"  line {i} of 1 in 11" for i in range(12, 20)]
    log.unlink()
    copy = pickle.loads(pickle.dumps(failed))
    assert str(copy) == str(failed) and (copy.rank, copy.exit_code, copy.log) == (3, -9, log)
    assert find_failure("nothing", tmp_path) == (
        *(None, None),
        tmp_path / "run" / "attempt_11" / "0" / "stderr.log",
        11,
    )
    assert find_failure("nothing", tmp_path / "none") == (None, None, None, 0)


@pytest.mark.parametrize(
    "rank, code, restarts, words",
    [
        (None, None, 0, "Process ? died (exit code None). It left no log"),
        (0, 0, 1, "Process 0 died after 1 restart (exit code 0). It left no log"),
        (1, 1, 0, "Process 1 died (exit code 1). It left no log"),
        (1, -2, 0, "Process 1 died (interrupted). It left no log"),
        (1, -6, 0, "Process 1 died (aborted). It left no log"),
        (1, -11, 0, "Process 1 died (a crash). It left no log"),
        (2, -15, 2, "Process 2 died after 2 restarts (terminated). It left no log"),
    ],
)
def test_why_a_process_ended(rank, code, restarts, words):
    assert str(WorkerFailed(rank, code, None, restarts)) == words


def test_a_gpu_for_each_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launcher._check_start(LaunchConfig(2), gpu=True)
    launcher._check_start(LaunchConfig(3), gpu=False)
    with pytest.raises(ValueError, match="num_processes = 3, and this machine has 2 GPUs"):
        launcher._check_start(LaunchConfig(3), gpu=True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert launcher._check_forks(1) == launcher._check_forks(2) == 2
    with pytest.raises(ValueError, match="3"):
        launcher._check_forks(3)
    with pytest.raises(ValueError, match="num_processes = 0: must be at least 1"):
        launcher._check_forks(0)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launcher._check_forks(3) == 0


def test_a_file_that_contains_the_word_that_ends_it():
    text = launcher.as_script({"a/b.json": "END\n", "a/c d.txt": "x\nEND\nEND_OF_FILE\n"}, "go")
    assert text.splitlines() == [
        *("mkdir -p a", "cat > a/b.json <<'END_OF_FILE'", "END", "END_OF_FILE"),
        *("cat > 'a/c d.txt' <<'END_OF_THIS_FILE'", "x", "END", "END_OF_FILE"),
        *("END_OF_THIS_FILE", "go"),
    ]


AFTER_A_FORK = """
import torch
from trainkit.recipes.launcher import notebook_launch

def product():
    return float((torch.ones(4096, 512) @ torch.ones(512, 512)).sum())

def both():
    return product(), torch.distributed.is_mpi_available()

torch.distributed.is_mpi_available = lambda: True  # As in Debian's torch
assert torch.get_num_threads() == 2
product()
print(notebook_launch(both) == [(product(), False)] * 2)
"""


def test_processes_of_a_notebook_compute_although_its_threads_did():
    """The threads of a process do not survive a fork, and a product with two would wait for them.

    accelerate does not see MPI, by which each process would find itself alone."""
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    call = [sys.executable, "-c", AFTER_A_FORK]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


# In place of torchrun: a process that saves when a signal comes, and one below it that will not end
SAVES = """
import os, signal, subprocess, sys
deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]"
deaf += "; print('ready', flush=True); time.sleep(600)"
below = subprocess.Popen(
    [sys.executable, "-c", deaf], stdout=subprocess.PIPE, stderr=-3, start_new_session=True
)
below.stdout.readline()
print("below", below.pid, file=open("below.txt", "w"), flush=True)
def save(number, frame):
    print("[default0]:saved", *["a long line" * 10] * 2000, file=sys.stderr, flush=True)
    raise RuntimeError("torchrun tells where it was")
signal.signal(int(sys.argv[1]), save)
os.kill(os.getppid(), int(sys.argv[1]))
signal.pause()
"""


def launch_until(number, folder, again):
    os.chdir(folder)
    (folder / "saves.py").write_text(SAVES)
    if again:  # A program's own handler stays, and what it raises ends the job
        signal.signal(number, lambda *_: sys.exit(7))
    launcher.run_command([sys.executable, "saves.py", str(int(number))], {}, folder)


@pytest.mark.parametrize(
    "number, own, code",
    [
        (signal.SIGTERM, False, 143),
        (signal.SIGINT, False, 1),  # KeyboardInterrupt
        (signal.SIGHUP, False, 129),
        (signal.SIGTERM, True, 7),
    ],
)
def test_a_signal_ends_a_launch_with_all_its_processes(tmp_path, number, own, code):
    from trainkit.recipes.control import is_alive

    done = in_child(launch_until, number, tmp_path, own, folder=tmp_path)
    assert done.returncode == code, done.stderr[-500:]
    assert own or "[default0]:saved" in done.stderr
    assert "where it was" not in done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (number == signal.SIGINT)
    assert not is_alive(int((tmp_path / "below.txt").read_text().split()[1]))


# In place of torchrun: it saves when SIGTERM comes, and kills the launcher outright
ORPHAN = """
import os, signal
def save(number, frame):
    open("saved.txt", "w").close()
    raise SystemExit
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGKILL)
while True:
    signal.pause()
"""


def launch_orphan(folder):
    os.chdir(folder)
    (folder / "orphan.py").write_text(ORPHAN)
    launcher.run_command([sys.executable, "orphan.py"], {}, folder)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child")
def test_a_killed_launcher_leaves_no_job_behind(tmp_path):
    assert in_child(launch_orphan, tmp_path, folder=tmp_path).returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while not (tmp_path / "saved.txt").exists():
        assert time.monotonic() < end, "the job outlived its launcher"
        time.sleep(0.02)


def test_a_launch_is_remembered_for_its_resume(tmp_path, monkeypatch):
    from trainkit.recipes.config import RunConfig

    commands = []
    monkeypatch.setattr(launcher, "run_command", lambda command, *_: commands.append(command))
    config = RunConfig("mine", runs_dir=str(tmp_path))
    folder = launcher.launch(config, 2, "fsdp", max_restarts=1, say=list)
    assert launcher.launch(config, 2, say=list).name == "mine-2"  # Another run
    plan = launcher.launch_of(folder)
    assert (plan.num_processes, plan.strategy, plan.max_restarts) == (2, "fsdp", 1)
    assert launcher.launch(config, resume=True, say=list, **vars(plan)) == folder
    assert commands[0] == commands[2]
    with pytest.raises(FileNotFoundError, match="trainkit train --resume"):
        launcher.launch_of(tmp_path)


def test_a_launch_is_resumed_by_force_as_one_process_is(tmp_path, monkeypatch):
    from trainkit.cli import app
    from trainkit.recipes.config import RunConfig

    commands = []
    monkeypatch.setattr(launcher, "run_command", lambda command, *_: commands.append(command))
    config = RunConfig("mine", runs_dir=str(tmp_path))
    folder = launcher.launch(config, 2, say=list)
    (folder / "config.yaml").write_text((folder / "launch" / "config.yaml").read_text())
    done = CliRunner().invoke(app, ["launch", "--resume", str(folder), "--force-resume"])
    assert done.exit_code == 0, done.output
    assert commands[1] == [*commands[0], "--resume", "auto", "--force-resume"]
    done = CliRunner().invoke(app, ["launch", "--force-resume"])
    assert "--force-resume goes with --resume" in str(done.exception)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_optimizers_that_cannot_be_sharded_are_refused_before_the_run(name):
    "The list in the settings says of each optimizer what the sharded model says of its class."
    from trainkit.train.optim import OptimConfig, make_optimizer
    from trainkit.train.sharding import ShardedModel

    optimizer = make_optimizer(torch.nn.Linear(8, 8), OptimConfig(optim=name))
    try:
        ShardedModel.start(SimpleNamespace(strategy="fsdp", wrapped=SimpleNamespace()), optimizer)
        sharded = True
    except ValueError as error:
        assert "use optim=" in str(error)
        sharded = False
    assert sharded == (name in SHARDED_OPTIMIZERS)
