"Faults in a run: out of memory, NaN, failing helpers, and what is left of the run."

import math
import os
import signal
from pathlib import Path

import pytest
import torch
from test_train import ROWS, StopAt, make, same, timeless, trainer
from torch import nn

from trainkit.data.dataloader import Batches
from trainkit.train.step import StepTooBig
from trainkit.train.monitors import HealthCheck
from trainkit.train.objectives import Loss, lm_loss, objective
from trainkit.memory.offload import OffloadedOptimizer
from trainkit.train.optim import OptimConfig
from trainkit.train.config import TrainConfig, TrainingError
from trainkit.recipes.runner import offloaded_optimizer
from trainkit.train.step import make_accelerator
from trainkit.train.trainer import Trainer


def limited(rows, error=None, start=0):
    "`lm_loss` on a machine with room for `rows` rows, from its `start`th batch on."
    calls = []

    def loss(model, batch):
        calls.append(len(batch["input_ids"]))
        total = lm_loss(model, batch)
        if model.training and len(calls) > start and len(batch["input_ids"]) > rows:
            raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return total

    loss.calls = calls
    return objective(counts=lm_loss.counts)(loss)


# Memory


@pytest.mark.parametrize(
    "error",
    [None, MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["device", "host", "allocator"],
)
def test_a_step_that_does_not_fit_is_done_in_halves_with_the_same_gradient(tmp_path, error):
    "Batches of 6 with room for 2: the run equals one with room, to 1e-6, and reports it."
    room, short = (
        trainer(
            batch_size=6,
            gradient_accumulation_steps=2,
            logging_steps=1,
            loss=loss,
            folder=tmp_path / name,
        )
        for name, loss in (("room", lm_loss), ("short", limited(2, error, start=5)))
    )
    expected, result = room.train(), short.train()
    for a, b in zip(expected.history, result.history, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-6) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], abs=1e-5
        )
        assert (a["tokens"], a["epoch"]) == (b["tokens"], b["epoch"])
    for a, b in zip(room.model.parameters(), short.model.parameters(), strict=True):
        assert (a - b).abs().max() < 2e-5
    assert len(result.notes) == 2 and all("the same gradient" in note for note in result.notes), (
        result.notes
    )
    assert (
        result.notes[0].startswith("Step 4: Out of memory")
        and "4 pieces of at most 2 rows" in result.notes[1]
    )
    assert not expected.notes and short.state.pieces == 4


def test_a_retried_step_draws_the_same_random_numbers():
    "The objective adds noise: the step that succeeds sees what the failed one saw."
    drawn = {}

    def noisy(name, limit):
        drawn[name] = []
        inner = limited(limit)

        def loss(model, batch):
            drawn[name].append(torch.rand(()).item())
            return inner(model, batch)

        return objective(counts=lm_loss.counts)(loss)

    for name, limit in (("room", 99), ("short", 4)):
        trainer(
            batch_size=6, gradient_accumulation_steps=1, max_steps=1, loss=noisy(name, limit)
        ).train()
    assert drawn["short"][0] == drawn["short"][1] == drawn["room"][0] and len(drawn["short"]) == 3


def test_dropout_and_other_couplings_are_said(tmp_path):
    result = trainer(make("ours", 0.2), batch_size=6, max_steps=2, loss=limited(3)).train()
    assert len(result.notes) == 1 and "other dropout masks" in result.notes[0]
    coupled = objective(additive=False)(limited(3))
    t = trainer(
        batch_size=6, gradient_accumulation_steps=1, max_steps=2, loss=coupled, folder=tmp_path
    )
    with pytest.raises(
        TrainingError,
        match="Step 1: .*6 rows.*couples the rows.*smaller per_device_train_batch_size",
    ):
        t.train()
    with pytest.raises(torch.OutOfMemoryError, match="Tried"):
        trainer(batch_size=6, max_steps=2, loss=limited(3), on_oom="raise").train()


def test_pieces_survive_a_resume(tmp_path):
    "Four pieces give a gradient with other last bits, so a checkpoint stores their number."

    def run(name, **more):
        return trainer(
            make("ours", 0.2),
            batch_size=6,
            folder=tmp_path / name,
            max_steps=8,
            logging_steps=1,
            gradient_accumulation_steps=2,
            **more,
        )

    whole = run("whole", loss=limited(2, start=3))
    whole.train()
    run("cut", loss=limited(2, start=3), callbacks=[StopAt(5)]).train()
    again = run(
        "cut", loss=limited(99)
    )  # a machine with room, which must continue in pieces all the same
    rest = again.train(resume=True)
    assert (
        same(whole.model, again.model)
        and not rest.notes
        and timeless(rest.history) == timeless(whole.history[5:])
    )


def test_a_row_that_does_not_fit_alone_ends_the_run_saved(tmp_path):
    loss = limited(0, start=9)
    t = trainer(folder=tmp_path, loss=loss, save_steps=100)
    with pytest.raises(
        TrainingError,
        match=r"Step 4: Out of memory with 1 row of up to \d+ tokens.*gradient checkpointing.*LoRA",
    ) as caught:
        t.train()
    assert (caught.value.step, Path(caught.value.checkpoint).name) == (
        4,
        "checkpoint-3",
    ) and isinstance(caught.value.__cause__, StepTooBig)
    assert all(p.grad is None for p in t.model.parameters())
    whole, again = trainer(), trainer(folder=tmp_path)
    whole.train()
    again.train(resume=True)
    assert same(whole.model, again.model)


# Numbers that are none


def spoilt(calls, value=math.nan):
    "An objective with two terms, of which the second is NaN in the given calls."
    count = []

    @objective(counts=lambda batch: {**lm_loss.counts(batch), "length": len(batch["labels"])})
    def loss(model, batch):
        total = lm_loss(model, batch)
        if model.training:
            count.append(0)
        n = len(batch["labels"])
        total.terms["length"] = (
            total.terms["loss"][0].detach() * 0
            + (value if model.training and len(count) in calls else 1.0) * n,
            n,
            0.1,
        )
        return total

    return loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_loss_names_step_batch_rows_and_term(value):
    t = trainer(loss=spoilt([8], value))
    with pytest.raises(TrainingError, match="Step 3: the loss is") as caught:
        t.train()
    batch = Batches(ROWS, 2, seed=3).plan(0)[7]
    assert f"(batch 8 of epoch 1, rows {batch[0]}, {batch[1]}: the term 'length')" in str(
        caught.value
    )


def test_skipping_leaves_weights_schedule_and_means_alone_and_is_never_silent():
    plain, skipping = (
        trainer(loss=spoilt([]), logging_steps=1, max_steps=6),
        trainer(loss=spoilt([8]), logging_steps=1, max_steps=7, on_nan="skip"),
    )
    rates, weights = [], []

    class Watch:
        def on_step(self, trainer, record):
            rates.append(trainer.schedule.last_epoch)
            weights.append(trainer.model.lm_head.weight.detach().clone())

    skipping.callbacks = [Watch()]
    plain.train()
    result = skipping.train()
    assert (
        rates == [1, 2, 2, 3, 4, 5, 6]
        and torch.equal(weights[1], weights[2])
        and not torch.equal(weights[2], weights[3])
    )
    losses = [r["loss"] for r in result.history]
    assert (
        math.isnan(losses[2])
        and all(map(math.isfinite, losses[:2] + losses[3:]))
        and result.history[-1]["skipped_steps"] == 1
    )
    assert len(result.notes) == 1 and result.notes[0].startswith(
        "Step 3 is skipped: the loss is nan (batch 8 of epoch 1"
    )
    assert all(p.isfinite().all() for p in skipping.model.parameters()) and math.isfinite(
        result.final_loss
    )
    wide = (
        trainer(loss=spoilt([8]), logging_steps=7, max_steps=7, on_nan="skip").train().history[-1]
    )
    assert wide["loss"] == pytest.approx(
        sum(x for x in losses if math.isfinite(x)) / 6, abs=1e-6
    ) and math.isfinite(wide["length"])


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * math.inf


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_infinite_gradient_is_traced_to_its_parameters_and_can_be_skipped(clip):
    calls = []

    def loss(model, batch):
        calls.append(0)
        total = lm_loss(model, batch).total
        return Loss({"loss": (Spike.apply(total) if len(calls) == 4 else total, 1, 1.0)})

    config = dict(max_steps=6, gradient_accumulation_steps=1, logging_steps=1, max_grad_norm=clip)
    with pytest.raises(
        TrainingError,
        match=(
            r"Step 4: the norm of the gradient is (nan|inf) \(batch 4 of epoch 1, "
            r"rows .*the gradient of model.embed_tokens.weight"
        ),
    ):
        trainer(loss=loss, **config).train()
    calls.clear()
    result = trainer(loss=loss, on_nan="skip", **config).train()
    assert result.steps == 6 and len(result.notes) == 1 and result.history[-1]["skipped_steps"] == 1


def test_skipping_has_an_end_and_float16_goes_on(tmp_path):
    with pytest.raises(TrainingError, match="Step 13: the loss is nan"):
        trainer(
            loss=spoilt(range(7, 1000)), on_nan="skip", max_steps=40, gradient_accumulation_steps=2
        ).train()
    result = trainer(
        loss=spoilt([8]), on_nan="skip", mixed_precision="fp16", logging_steps=1, max_steps=6
    ).train()
    assert result.steps == 6 and math.isfinite(result.final_loss) and len(result.notes) == 1


# Helpers


class Deadly(list):
    "Rows of which one kills the process that asks for it, once."

    def __init__(self, rows, at, flag):
        super().__init__(rows)
        self.at, self.flag, self.owner = at, flag, os.getpid()

    def __getitem__(self, i):
        if i == self.at and os.getpid() != self.owner and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


@pytest.mark.parametrize("place", [10, 13])
def test_a_loader_process_that_dies_is_named_and_the_run_goes_on_exactly(tmp_path, place):
    "Killed with a batch of its own in hand, in the middle of a window or at its start."
    row = Batches(ROWS, 2, seed=3).plan(0)[place][0]

    def run(name, resume=None):
        t = Trainer(
            make("ours", 0.2),
            lm_loss,
            Batches(Deadly(ROWS, row, tmp_path / "died"), 2, seed=3, num_workers=1),
            config=TrainConfig(
                str(tmp_path / name),
                max_steps=8,
                gradient_accumulation_steps=3,
                logging_steps=1,
                save_steps=100,
                progress=False,
            ),
            optim=OptimConfig(learning_rate=1e-2),
        )
        return t, t.train(resume)

    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid") as caught:
        run("run")
    notes = " ".join(caught.value.__notes__)
    assert "up to step " in notes, notes
    step = int(notes.split("up to step ")[1].split()[0])
    assert "fewer num_workers" in notes and 0 < step <= place // 3 and f"checkpoint-{step}" in notes
    (again, rest), (whole, expected) = run("run", resume=True), run("whole")
    assert same(whole.model, again.model) and timeless(rest.history) == timeless(
        expected.history[step:]
    )
    assert callable(signal.getsignal(signal.SIGCHLD)) or signal.getsignal(signal.SIGCHLD) == before


def test_a_loader_process_that_dies_between_two_steps_loses_nothing(tmp_path):
    "PyTorch raises the error from a signal, wherever the main thread is just then."

    class Struck(Trainer):
        def stop_reason(self):
            if self.state.step == 3:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
            return super().stop_reason()

    trainer = Struck(
        make("ours", 0.2),
        lm_loss,
        Batches(ROWS, 2, seed=3),
        config=TrainConfig(str(tmp_path), max_steps=8, save_steps=100, progress=False),
    )
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid") as caught:
        trainer.train()
    notes = " ".join(caught.value.__notes__)
    assert "everything up to step 3 is in" in notes and notes.count("fewer num_workers") == 1
    assert [*tmp_path.rglob("checkpoint-3")]


def test_waiting_for_data_is_measured_and_found():
    import time

    class Slow(Batches):
        def __iter__(self):
            took = 0.01
            for batch in super().__iter__():
                time.sleep(3 * took)  # however slow the machine is just now
                began = time.perf_counter()
                yield batch
                took = time.perf_counter() - began

    shares = {}
    for kind in (Batches, Slow):
        health = HealthCheck(say=lambda text: None)
        result = Trainer(
            make("ours"),
            lm_loss,
            kind(ROWS, 2),
            config=TrainConfig(max_steps=8, logging_steps=1, progress=False),
            callbacks=[health],
        ).train()
        shares[kind] = sorted(r["data_share"] for r in result.history)[4]
        assert ("waiting_for_data" in [finding.name for finding in health.findings]) == (
            kind is Slow
        )
    assert shares[Batches] < 0.25 < 0.5 < shares[Slow] <= 1


# What a caller brings


def test_an_accelerator_of_ones_own_does_every_backward_pass():
    from accelerate import Accelerator

    own, calls = Accelerator(cpu=True), []
    backward = own.backward
    own.backward = lambda loss, **more: (calls.append(0), backward(loss, **more))
    theirs, ours = (
        trainer(accelerator=own, mixed_precision="auto", max_steps=4),
        trainer(accelerator=make_accelerator("no"), max_steps=4),
    )
    theirs.train()
    ours.train()
    assert theirs.accelerator is own and len(calls) == 12 and same(theirs.model, ours.model)


def test_an_optimizer_that_lives_elsewhere(tmp_path):
    "Its state may be anywhere if its groups hold the parameters and it has a state_dict."
    optim, batches = (
        OptimConfig(learning_rate=1e-2, warmup_steps=2),
        lambda: Batches(ROWS, 2, seed=3),
    )
    config = TrainConfig(max_steps=6, offload_optimizer=True, progress=False)
    here = trainer(max_steps=6, gradient_accumulation_steps=1)
    away = Trainer(
        make("ours"),
        lm_loss,
        batches(),
        config=config,
        optim=optim,
        build_optimizer=offloaded_optimizer,
    )
    here.train()
    away.train()
    assert same(here.model, away.model)
    for steps in (3, 6):  # Its memories are in the checkpoint
        plan = TrainConfig(
            str(tmp_path), max_steps=6, save_steps=3, offload_optimizer=True, progress=False
        )
        part = Trainer(
            make("ours"),
            lm_loss,
            batches(),
            config=plan,
            optim=optim,
            build_optimizer=offloaded_optimizer,
            callbacks=[StopAt(steps)],
        )
        part.train("auto")
    assert same(here.model, part.model) and type(part.raw_optimizer) is OffloadedOptimizer
    with pytest.raises(ValueError, match="offload_optimizer=True needs build_optimizer"):
        Trainer(make("ours"), lm_loss, batches(), config=config)


def test_a_single_file_checkpoint_is_refused_with_a_sentence(tmp_path):
    path = tmp_path / "checkpoint-10000.pt"
    torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(
        ValueError, match=r"checkpoint-10000.pt is one file, and a checkpoint here is a folder"
    ):
        trainer(folder=tmp_path / "run").train(resume=path)


def test_a_run_that_began_within_an_epoch_is_rescued_where_it_was(tmp_path):
    "From the fourth batch of the loader on; after the error the same batches follow."

    def run(name, loss=lm_loss):
        made = trainer(folder=tmp_path / name, gradient_accumulation_steps=1, loss=loss)
        batches = Batches(ROWS, 2, seed=3)
        batches.load_state_dict(batches.state_dict() | dict(index=3))
        return Trainer(made.model, loss, batches, config=made.config)

    whole = run("whole")
    whole.train()
    with pytest.raises(TrainingError, match="everything up to step 2"):
        run("half", limited(0, start=2)).train()
    resumed = run("half")
    resumed.train(resume=True)
    assert same(resumed.model, whole.model)
