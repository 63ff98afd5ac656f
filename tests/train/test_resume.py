"Runs that are killed, refused, starved of disk, and none the worse for it."

import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.processes import ROOT, in_child, program

sys.path.insert(0, str(ROOT / "benchmarks"))
import kill_resume

import trainkit.train.checkpoint as checkpoint
from trainkit.train.checkpoint import checkpoint_problem, read_manifest
from trainkit.data.dataloader import Batches
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.optim import OptimConfig
from trainkit.train.config import TrainConfig
from trainkit.train.checkpoint import find_checkpoints, latest_checkpoint
from trainkit.train.trainer import Trainer
from trainkit.train.objectives import lm_loss
from torch.optim.lr_scheduler import LambdaLR

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
ROWS = [np.arange(i, i + 8) % 31 for i in range(24)]


@pytest.fixture(scope="module")
def context():
    return kill_resume.server()


def compare(context, root: Path, kind: str, moments) -> int:
    "Kill one run again and again, and hold its end against that of an undisturbed one."
    assert not kill_resume.start(context, root / "whole", kind, None, False)
    hit = sum(kill_resume.start(context, root / "killed", kind, moment) for moment in moments)
    while kill_resume.start(context, root / "killed", kind, None):
        pass
    whole, killed = (kill_resume.ending(root / name) for name in ("whole", "killed"))
    for part in whole:
        assert killed[part] == whole[part], part
    return hit


@posix
def test_five_kills(tmp_path, context):
    """In a step, an evaluation, a checkpoint's bytes, before its rename, in a deletion.

    Data are drawn by two workers.
    """
    moments = [("step", 9), ("write", 5), ("evaluation", 4), ("rename", 2), ("rotate", 1)]
    assert compare(context, tmp_path, "drawing", moments) == 5


@posix
@pytest.mark.slow
@pytest.mark.parametrize("kind", kill_resume.KINDS)
def test_twenty_kills_at_random(tmp_path, context, kind):
    chance = random.Random(kind)
    assert (
        compare(context, tmp_path, kind, [kill_resume.draw_moment(chance) for _ in range(5)]) >= 3
    )


def trainer(folder, callbacks=(), rate=1e-2, **more):
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=31, d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=8, dropout=0.1
        )
    )
    plan = (
        dict(output_dir=str(folder), max_steps=12, save_steps=3, logging_steps=1, progress=False)
        | more
    )
    return Trainer(
        model,
        lm_loss,
        Batches(ROWS, 4, seed=1),
        config=TrainConfig(**plan),
        optim=OptimConfig(learning_rate=rate),
        callbacks=callbacks,
    )


class At:
    "Do something after a step."

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step(self, trainer, record):
        if record["step"] == self.step:
            self.do(trainer)


def end(folder):
    return read_manifest(folder / "checkpoints" / "checkpoint-12")["proof"]


@posix
def test_termination_saves_and_a_resume_ends_alike(tmp_path):
    trainer(tmp_path / "whole").train()
    result = trainer(
        tmp_path / "run", [At(4, lambda t: signal.raise_signal(signal.SIGTERM))]
    ).train()
    assert (result.stop_reason, result.exit_code, result.steps) == ("terminated", 143, 4)
    assert (
        Path(result.final_checkpoint).name == "checkpoint-4"
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    trainer(tmp_path / "run").train("auto")
    assert end(tmp_path / "run") == end(tmp_path / "whole")


def lose_terminal(folder, workers):
    "A run whose terminal goes away in its fourth step, as when a connection is lost."
    import fcntl
    import pty
    import termios

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup around the tests would leave it ignored
    os.setsid()
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in (1, 2):
        os.dup2(slave, fd)
    os.close(slave)

    class Say:
        def on_end(self, trainer, record):
            print("x" * 10_000, flush=True)  # nobody is there
            os.write(2, b"x")

    def leave(trainer):
        os.close(
            master
        )  # the kernel says so to the leader of the session, and a shell says it again
        os.killpg(0, signal.SIGHUP)

    run = trainer(folder / "run", [At(4, leave), Say()])
    run.train_batches.num_workers = workers
    result = run.train()
    (folder / "end").write_text(
        f"{result.stop_reason} {result.exit_code} {result.final_checkpoint}"
    )


@posix
@pytest.mark.parametrize("workers", [0, 1])
def test_a_lost_connection_saves_and_a_resume_ends_alike(tmp_path, workers):
    trainer(tmp_path / "whole").train()
    in_child(lose_terminal, tmp_path, workers, folder=tmp_path)
    assert (
        tmp_path / "end"
    ).read_text() == f"terminated 143 {tmp_path / 'run' / 'checkpoints' / 'checkpoint-4'}"
    trainer(tmp_path / "run").train("auto")
    assert end(tmp_path / "run") == end(tmp_path / "whole")


@pytest.mark.parametrize("how", [True, "auto"])
def test_a_run_whose_every_checkpoint_is_damaged_does_not_begin_again(tmp_path, how):
    "One is passed over; all are an error that names them, and nothing is moved or written."
    trainer(tmp_path / "whole").train()
    trainer(tmp_path / "run", [At(7, lambda t: t.control.stop())]).train()
    home = tmp_path / "run" / "checkpoints"
    (home / "checkpoint-7" / "state.json").unlink()
    with pytest.warns(UserWarning, match="Skipped .*checkpoint-7: it lacks state.json"):
        trainer(tmp_path / "run").train(how)
    assert end(tmp_path / "run") == end(tmp_path / "whole")
    for path in find_checkpoints(home):
        (path / "model.safetensors").write_bytes(b"half")
    before = sorted(home.rglob("*"))
    with pytest.raises(
        ValueError,
        match=(
            r"checkpoint-12 is damaged: model.safetensors has 4 of .*checkpoint-6 is "
            r"damaged.*under another name"
        ),
    ):
        trainer(tmp_path / "run").train(how)
    with pytest.raises(
        ValueError, match="checkpoint-12 is damaged: .* Name another checkpoint, or start a new run"
    ):
        trainer(tmp_path / "run").train(home / "checkpoint-12")
    assert sorted(home.rglob("*")) == before
    assert trainer(tmp_path / "new").train("auto").steps == 12


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("answer", ["raise", "warn"])
def test_disk_that_is_full_amid_a_checkpoint(tmp_path, monkeypatch, asynchronous, answer):
    "The disk fills up half way: nothing torn is left, the message helps, a resume is exact."
    trainer(tmp_path / "whole").train()
    real, calls = checkpoint.write_tensors, []

    def short(path, tensors, *rest):
        calls.append(path)
        if 5 <= len(calls) <= 6:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(path, tensors, *rest)

    monkeypatch.setattr(checkpoint, "write_tensors", short)
    run = trainer(tmp_path / "run", async_save=asynchronous, on_save_error=answer)
    if answer == "raise":
        with pytest.raises(OSError, match="checkpoint-6: the disk is full: free some space"):
            run.train()
        assert os.listdir(tmp_path / "run" / "checkpoints") == ["checkpoint-3"]
    else:
        result = run.train()
        assert (
            "the disk is full" in result.notes[0]
            and "The run continues; the last checkpoint is" in result.notes[0]
        )
    monkeypatch.undo()
    assert all(
        checkpoint_problem(p) == "" for p in find_checkpoints(tmp_path / "run" / "checkpoints")
    )
    trainer(tmp_path / "run").train("auto")
    assert end(tmp_path / "run") == end(tmp_path / "whole")


def test_folder_that_is_removed_while_the_run_goes_on(tmp_path):
    import shutil

    def remove(trainer):
        trainer.flush_checkpoint()
        shutil.rmtree(tmp_path / "run")

    result = trainer(tmp_path / "run", [At(5, remove)]).train()
    assert (
        "was removed during the run" in result.notes[0]
        and Path(result.final_checkpoint).name == "checkpoint-12"
    )
    assert [p.name for p in find_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "checkpoint-6",
        "checkpoint-9",
        "checkpoint-12",
    ]


def test_slow_disk_does_not_stop_the_run_and_loses_nothing(tmp_path, monkeypatch):
    "Steps continue while the checkpoint is held up; the next save waits for it."
    gate, real, steps = threading.Event(), checkpoint.write_tensors, []

    def slow(path, tensors, *rest):
        gate.wait(20)
        return real(path, tensors, *rest)

    monkeypatch.setattr(checkpoint, "write_tensors", slow)

    def look(trainer):
        steps.append(trainer.writer.busy)
        gate.set()

    trainer(tmp_path / "run", [At(5, look)], async_save=True).train()
    assert steps == [True] and [
        p.name for p in find_checkpoints(tmp_path / "run" / "checkpoints")
    ] == [f"checkpoint-{n}" for n in (6, 9, 12)]


def test_an_older_checkpoint_leaves_the_abandoned_ones_aside(tmp_path):
    home = tmp_path / "run" / "checkpoints"
    trainer(tmp_path / "run").train()
    halted = trainer(tmp_path / "run", [At(7, lambda t: t.control.stop())], rate=1e-3)
    halted.train(home / "checkpoint-6", force_resume=True)
    assert (
        latest_checkpoint(home).name == "checkpoint-7"
        and (home / "abandoned-1" / "checkpoint-12").is_dir()
    )


def test_a_resume_deletes_what_a_killed_process_had_no_time_to(tmp_path):
    home = tmp_path / "run" / "checkpoints"
    trainer(tmp_path / "run").train()
    trainer(tmp_path / "run", save_total_limit=2).train(
        "auto"
    )  # nothing left to do, and nothing saved
    assert [path.name for path in find_checkpoints(home)] == ["checkpoint-9", "checkpoint-12"]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seed=1), "train.seed was 42 and is 1"),
        (dict(rate=1e-3), "optim.learning_rate was 0.01 and is 0.001"),
        (dict(gradient_accumulation_steps=2), "batches_per_step was 1 and is 2"),
        (dict(max_steps=20), "total_steps was 12 and is 20"),
    ],
)
def test_another_run_is_refused_and_nothing_is_lost(tmp_path, change, message):
    trainer(tmp_path, [At(5, lambda t: t.control.stop())]).train()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **change).train(True)
    assert {
        p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()
    } == before
    notes = trainer(tmp_path, **change).train(True, force_resume=True).notes
    assert any("as you requested" in note and message in note for note in notes)


def test_how_a_run_is_watched_may_change(tmp_path):
    trainer(tmp_path / "whole").train()
    trainer(tmp_path / "run", [At(5, lambda t: t.control.stop())]).train()
    result = trainer(
        tmp_path / "run", logging_steps=5, save_steps=4, save_total_limit=0, async_save=False
    ).train(True)
    assert (
        "with the same result" in result.notes[0]
        and end(tmp_path / "run")["weights"] == end(tmp_path / "whole")["weights"]
    )


def test_a_second_process_is_refused_with_the_first_ones_number(tmp_path):
    code = f"from trainkit.train.checkpoint import run_lock\nwith run_lock({str(tmp_path)!r}): pass"
    with room_lock(tmp_path):
        done = program(code, tmp_path)
    assert f"process {os.getpid()} on " in done.stderr and done.returncode == 1


def room_lock(folder):
    from trainkit.train.checkpoint import run_lock

    return run_lock(folder)


def test_another_schedule_is_refused(tmp_path):
    "A function has no place in the config that is compared."

    def falling(optimizer, config, steps):
        return LambdaLR(optimizer, lambda step: 0.9**step)

    def level(optimizer, config, steps):
        return LambdaLR(optimizer, lambda step: 1.0)

    def made(schedule, *callbacks):
        made = trainer(tmp_path, callbacks)
        made.build_schedule = schedule
        return made

    made(falling, At(4, lambda t: t.control.stop())).train()
    with pytest.raises(ValueError, match="give the build_schedule of the run"):
        made(level).train(resume=True)
    assert made(falling).train(resume=True).steps == 12
