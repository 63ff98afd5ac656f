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
from trainkit.align.dpo import Converged
from trainkit.data.dataloader import Batches
from trainkit.progress import StopNow
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.optim import OptimConfig
from trainkit.train.config import TrainConfig
from trainkit.train.checkpoint import find_checkpoints, latest_checkpoint
from trainkit.train.trainer import Trainer, check_identity, save_weights
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


def trainer(folder, callbacks=(), rate=1e-2, judge=None, curve="linear", **more):
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
        judge,
        config=TrainConfig(**plan),
        optim=OptimConfig(learning_rate=rate, lr_scheduler_type=curve),
        callbacks=callbacks,
    )


class At:
    "Do something after a step."

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step(self, trainer, record):
        if record["step"] == self.step:
            self.do(trainer)


class Stream(torch.utils.data.IterableDataset):
    "Rows without a length, each with a value of its own from torch's generator."

    def __iter__(self):
        for row in ROWS:
            yield (torch.from_numpy(row) + torch.randint(0, 5, ())) % 31


@pytest.mark.parametrize("kind", ["shuffled", "generator", "stream"])
def test_a_data_loader_resumes_exactly(tmp_path, kind):
    "It does not know its position: the trainer reads up to it, in the same order."
    data = Stream() if kind == "stream" else [torch.from_numpy(row) for row in ROWS]

    def run(folder, callbacks=(), resume=None):
        one = trainer(tmp_path / folder, callbacks, max_steps=12)
        loader = torch.utils.data.DataLoader(
            data,
            4,
            shuffle=kind != "stream",
            generator=torch.Generator().manual_seed(3) if kind == "generator" else None,
            collate_fn=lambda rows: dict(input_ids=torch.stack(rows), labels=torch.stack(rows)),
        )
        model, config, optim = one.model, one.config, one.optim
        again = Trainer(model, lm_loss, loader, config=config, optim=optim, callbacks=callbacks)
        again.train(resume)
        return again.model.state_dict()

    whole = run("whole")
    run("run", [At(8, lambda t: t.control.stop())])  # In the second epoch
    torch.rand(9)
    resumed = run("run", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


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


class Falling:
    "Each evaluation is worse than the one before, so the first is the best; another metric rises."

    def on_measure(self, trainer, record):
        record |= dict(eval_gain=-record["step"], eval_rise=record["step"])


def judged(folder, callbacks=(), **more):
    knobs = dict(
        eval_strategy="steps", eval_steps=2, save_total_limit=1, load_best_model_at_end=True
    )
    knobs |= dict(metric_for_best_model="gain") | more
    return trainer(
        folder, [Falling(), *callbacks], judge=Batches(ROWS[:4], 4, shuffle=False), **knobs
    )


def stop_at(step):
    return At(step, lambda t: t.control.stop())


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Keep:
    "The weights after the second step, which are the best."

    def on_step(self, trainer, record):
        if record["step"] == 2:
            self.weights = weights(trainer.model)


@pytest.mark.parametrize("way", ["turned on", "elsewhere", "copied", "disk", "disk in background"])
def test_the_best_weights_come_back_from_wherever_they_are(tmp_path, monkeypatch, way):
    "They were in no checkpoint of this folder, and the run ended in an error after its last step."
    keep = Keep()
    if way.startswith("disk"):
        real = checkpoint.write_tensors

        def full(path, *rest):
            if "checkpoint-2" in str(path):
                raise OSError(28, "No space left on device")
            return real(path, *rest)

        monkeypatch.setattr(checkpoint, "write_tensors", full)
        last = judged(tmp_path, [keep], on_save_error="warn", async_save=way.endswith("background"))
        result = last.train()
    else:
        first = tmp_path / "first"
        on = way == "elsewhere"
        judged(first, [keep, stop_at(7)], load_best_model_at_end=on).train()
        folder = first if way == "turned on" else tmp_path / "second"
        last = judged(folder, [stop_at(9)] if way == "copied" else ())
        result = last.train(resume=first / "checkpoints" / "checkpoint-7")
        if way == "copied":  # The second resume knows nothing of the first folder
            last = judged(folder)
            result = last.train(resume=True)
    assert (result.steps, result.best_metric) == (12, -2)
    assert torch.equal(weights(last.model), keep.weights)
    saved = last.read_model(last.model, last.folder / "model")
    assert all(torch.equal(t, last.model.state_dict()[name]) for name, t in saved.items())
    assert not any("best evaluation" in note for note in result.notes)


def test_best_weights_that_are_nowhere_are_looked_for_anew_or_left(tmp_path):
    import shutil

    judged(tmp_path, [stop_at(7)], load_best_model_at_end=False).train()
    shutil.rmtree(tmp_path / "best_model")
    result = judged(tmp_path).train(resume=True)
    assert "of step 2, no longer counts: neither its checkpoint" in result.notes[1]
    assert (result.best_metric, result.steps) == (-8, 12)

    def lose(trainer):
        trainer.flush_checkpoint()
        for name in ("best_model", "checkpoints/checkpoint-2"):
            shutil.rmtree(tmp_path / "lost" / name)

    lost = judged(tmp_path / "lost", [At(11, lose)])
    result = lost.train()
    assert "of step 2, cannot be loaded (there is neither checkpoint-2" in result.notes[-1]
    saved = lost.read_model(lost.model, tmp_path / "lost" / "model")
    assert all(torch.equal(t, lost.model.state_dict()[name]) for name, t in saved.items())


def test_a_best_step_whose_only_save_failed_is_not_taken(tmp_path, monkeypatch):
    real = checkpoint.write_tensors

    def full(path, *rest):
        if "checkpoint-2" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    knobs = dict(on_save_error="warn", save_strategy="no", async_save=False)
    result = judged(tmp_path, **knobs).train()
    assert result.best_metric == -4 and not (tmp_path / "best_model").exists()


@pytest.mark.parametrize("at", [5, 9, 10])
def test_a_resumed_run_converges_at_the_same_step(tmp_path, at):
    "The margin stands still from step 4 on; three evaluations later the run ends."

    class Margin:
        def on_measure(self, trainer, record):
            record["eval_margin"] = min(record["step"], 4)

    def made(*more):
        knobs = dict(load_best_model_at_end=False)
        return judged(tmp_path, [Margin(), Converged("eval_margin"), *more], **knobs)

    made(stop_at(at)).train()
    result = made().train(resume=True)
    assert (result.steps, result.stop_reason) == (10, "converged")


def test_only_callbacks_with_a_state_are_in_a_checkpoint(tmp_path):
    judged(tmp_path / "without", [stop_at(3)]).train()
    judged(tmp_path / "with", [Converged("eval_gain"), Converged(), stop_at(1)]).train()
    texts = [
        (tmp_path / path / "state.json").read_text()
        for path in ("without/checkpoints/checkpoint-3", "with/checkpoints/checkpoint-1")
    ]
    assert "callbacks" not in texts[0]
    assert '"callbacks": {"Converged": {"values": []}, "Converged 2": {"values": []}}' in texts[1]


def test_data_that_began_anew_are_each_seen_once_also_after_an_interrupt(tmp_path):
    "A step that is left in the middle takes its place in the data from the state of the run."
    seen = []

    class Rows:
        def on_step(self, trainer, record):
            at = trainer.train_batches
            seen.extend(at.plan(at.epoch)[at.index - 1])

    def made(*callbacks, rows=ROWS):
        run = trainer(tmp_path, callbacks, max_steps=14)
        run.train_batches = Batches(rows, 4, seed=1)
        run.train_start = run.train_batches.state_dict()
        run._lengths = {0: len(run.train_batches)}
        return run

    made(stop_at(8)).train()  # In the second epoch
    left = made(Rows(), rows=ROWS[:16])
    objective, calls = left.objective, []

    def third(model, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise StopNow("in the middle of a step")
        return objective(model, batch)

    left.objective = third
    left.train(resume=True, force_resume=True)
    made(Rows(), stop_at(12), rows=ROWS[:16]).train(resume=True)
    assert sorted(seen) == list(range(16))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(early_stopping_patience=3), "ends, or keeps a model, differently"),
        (dict(load_best_model_at_end=False), "ends, or keeps a model, differently"),
        (dict(on_nan="skip"), "ends, or keeps a model, differently"),
        (dict(eval_steps=3), "ends, or keeps a model, differently"),
        (dict(max_steps=13), "ends, or keeps a model, differently"),
        (dict(save_steps=4), "with the same result"),
        (dict(eval_steps=3, load_best_model_at_end=False), "with the same result"),
    ],
)
def test_what_a_changed_knob_changes(change, words):
    "A change of how a run ends is allowed, and not called one without effect."
    first = {name: change[name] for name in [*change][1:]}
    before, now = (judged("x", curve="constant", **knobs).identity() for knobs in (first, change))
    notes = check_identity(before, now, "checkpoint-5")
    assert len(notes) == 1 and words in notes[0]


def test_accumulation_is_said_once(tmp_path):
    now = trainer(tmp_path, gradient_accumulation_steps=2).identity()
    notes = check_identity(trainer(tmp_path).identity(), now, "checkpoint-5", force=True)
    assert len(notes) == 1 and "batches_per_step was 1 and is 2" in notes[0]


def test_a_new_patience_counts_from_the_resume(tmp_path):
    judged(tmp_path, [stop_at(9)], max_steps=20).train()
    result = judged(tmp_path, max_steps=20, early_stopping_patience=3).train(resume=True)
    assert (result.steps, result.stop_reason) == (14, "early stopping")


def test_another_metric_begins_without_the_best_of_the_old_one(tmp_path):
    judged(tmp_path, [stop_at(7)], metric_for_best_model="loss").train()
    run = judged(tmp_path, metric_for_best_model="rise")
    with pytest.raises(ValueError, match="metric_for_best_model"):
        run.train(resume=True)
    result = run.train(resume=True, force_resume=True)
    assert result.best_metric == 12
    assert any("was chosen by eval_loss, the least" in note for note in result.notes)


def test_the_rates_of_an_optimizer_of_ones_own(tmp_path):
    "They are logged, another one is refused, and a forced resume takes those of this run."

    def made(rate, decay, *callbacks):
        run = trainer(tmp_path, callbacks, curve="constant")
        run.build_optimizer = lambda model, config: torch.optim.AdamW(
            model.parameters(), lr=rate, weight_decay=decay
        )
        return run

    result = made(0.05, 0.0, stop_at(4)).train()
    assert {record["learning_rate"] for record in result.history} == {0.05}
    assert made(0.05, 0.0, stop_at(5)).train(resume=True).steps == 5
    for rate, decay, words in ((0.01, 0.0, "initial_lr"), (0.05, 0.5, "weight_decay")):
        with pytest.raises(ValueError, match=f"build_optimizer: {words} of group 0 was"):
            made(rate, decay).train(resume=True)
    forced = made(0.01, 0.5)
    result = forced.train(resume=True, force_resume=True)
    group = forced.raw_optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.5)
    assert {record["learning_rate"] for record in result.history} == {0.01}
    assert "initial_lr of group 0 was 0.05 and is 0.01" in result.notes[0]


def test_the_refusal_names_the_checkpoint():
    before, now = (dict(facts=dict(given=dict(rewards=[name]))) for name in "fg")
    with pytest.raises(ValueError, match="^checkpoint-5 belongs to another run: rewards given in"):
        check_identity(before, now, "checkpoint-5")


@pytest.mark.parametrize("best", [False, True])
def test_a_checkpoint_is_written_although_the_one_before_failed(tmp_path, best):
    "The failure in the background is a note of the run; a new best evaluation is kept."

    def fail(trainer):
        trainer.writer.error = OSError(28, "Nothing was written to checkpoint-3")

    make = judged if best else trainer
    metric = dict(metric_for_best_model="rise", save_total_limit=3) if best else {}
    run = make(tmp_path, [At(6, fail)], on_save_error="warn", max_steps=7, **metric)
    result = run.train()
    [note] = result.notes
    assert note.startswith("Step 6: Nothing was written to checkpoint-3. The run continues")
    assert "checkpoint-6" in os.listdir(tmp_path / "checkpoints")
    assert result.best_metric == (6 if best else None)


@pytest.mark.parametrize("answer", ["raise", "warn"])
def test_a_best_model_that_finds_no_room(tmp_path, answer):
    "It may fail as a checkpoint may, and the next one is tried; else the error says how to resume."
    full = [2, 4]

    def write(model, folder):
        if "best_model" in folder.name and run.state.step in full:
            raise OSError(28, "No space left on device")
        save_weights(model, folder)

    knobs = dict(metric_for_best_model="rise", on_save_error=answer, save_steps=1, max_steps=7)
    run = judged(tmp_path, **knobs)
    run.write_model = write
    if answer == "raise":
        with pytest.raises(OSError, match="best_model: the disk is full") as caught:
            run.train()
        assert "the last checkpoint is " in caught.value.__notes__[0]
        assert "checkpoint-1: resume=True resumes it" in caught.value.__notes__[0]
        full.clear()
        assert judged(tmp_path, **knobs).train(resume=True).steps == 7
        return
    result = run.train()
    assert [note.split(":")[0] for note in result.notes] == ["Step 2", "Step 4"]
    assert all(note.endswith("there is no best_model") for note in result.notes)
    assert (result.best_metric, Path(result.best_model_path).name) == (6, "best_model")


@pytest.mark.parametrize("answer", ["raise", "warn"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_model_is_written_although_the_last_checkpoint_was_not(
    tmp_path, monkeypatch, answer, asynchronous
):
    real = checkpoint.write_tensors

    def full(path, *rest):
        if "checkpoint-12" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    run = trainer(tmp_path, on_save_error=answer, async_save=asynchronous, save_steps=5)
    with pytest.raises(OSError, match="checkpoint-12: the disk is full") as caught:
        run.train()
    notes = " ".join(caught.value.__notes__)
    assert "checkpoint-10: resume=True resumes it)" in notes and f"{tmp_path}/model" in notes
    saved = run.read_model(run.model, tmp_path / "model")
    assert all(torch.equal(t, run.model.state_dict()[name]) for name, t in saved.items())
    monkeypatch.undo()
    assert trainer(tmp_path, save_steps=5).train(resume=True).steps == 12


def test_what_a_forced_resume_says_of_other_batches(tmp_path):
    "That they begin again, and not that the data have changed; lengths are no sums to be read."

    def made(rows, size, *callbacks):
        run = trainer(tmp_path, callbacks)
        run.train_batches = Batches(rows, size, seed=1, group_by_length=True)
        run.train_start = run.train_batches.state_dict()
        run._lengths = {0: len(run.train_batches)}
        return run

    rows = [row[: 4 + i % 5] for i, row in enumerate(ROWS)]
    made(rows, 4, stop_at(5)).train()
    notes = made([*rows[:-1], rows[0][:3]], 2).train(resume=True, force_resume=True).notes
    assert any("(batch_size: 4 then, 2 now; other lengths)" in note for note in notes)
    assert not any("another batch next" in note for note in notes)
