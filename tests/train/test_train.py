"The loop: gradients of windows, exact resume, interrupts, faults, two processes, overhead."

import json
import math
import os
import signal
import threading
import time
import warnings
import weakref
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.processes import begin, end, rests, together
from torch import nn

from trainkit.config import ConfigError
from trainkit.data.dataloader import Batches, collate, pack
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.settings import CurriculumConfig
from trainkit.train import optim
from trainkit.train.optim import SCHEDULES, Adafactor, AdamW8bit, Lion, Muon, OptimConfig
from trainkit.train.optim import dynamic_code, make_optimizer, make_schedule, newton_schulz
from trainkit.train.optim import param_groups, quantize_blocks
from trainkit.train.config import Control, TrainConfig, TrainingError
from trainkit.train.objectives import PLAIN_HEADS, Loss, body_and_head, lm_loss
from trainkit.train.objectives import lm_objective, noisy_embeddings, objective, sum_losses
from trainkit.train.step import accumulate, count_tokens, eval_loss, make_accelerator
from trainkit._remarks import described
from trainkit.train.trainer import Trainer

torch.set_num_threads(1)
ROWS = [
    [(7 * i + j * j) % 97 for j in range(6 + 5 * i % 23)] for i in range(29)
]  # of 6 to 28 tokens


class Own(nn.Module):
    "A reader's own model: it knows nothing of labels, counts or Hugging Face."

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.rnn, self.dropout = (
            nn.Embedding(97, 16),
            nn.GRU(16, 32, batch_first=True),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(32, 97)

    def forward(self, tokens):
        return self.head(self.dropout(self.rnn(self.embed(tokens))[0]))


def own_loss(model, batch):
    return lm_loss(model, {k: v for k, v in batch.items() if k != "attention_mask"})


own_loss = objective(counts=lm_loss.counts)(own_loss)


def make(kind, dropout=0.0):
    torch.manual_seed(0)
    if kind == "own":
        return Own(dropout)
    if kind in ("ours", "wide"):
        return Transformer(
            ModelConfig(
                vocab_size=97,
                d_model=32 if kind == "ours" else 64,  # 4,096 numbers and more are kept in 8 bits
                n_heads=4,
                n_layers=1,
                d_ff=48,
                max_seq_len=32,
                dropout=dropout,
            )
        )
    import transformers as t

    small = dict(vocab_size=97, bos_token_id=0, eos_token_id=0)
    if kind == "llama":
        return t.LlamaForCausalLM(
            t.LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                **small,
            )
        )
    return t.GPT2LMHeadModel(
        t.GPT2Config(
            n_embd=32,
            n_layer=1,
            n_head=4,
            n_positions=32,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **small,
        )
    )


def trainer(
    model=None,
    rows=ROWS,
    batch_size=2,
    folder="",
    callbacks=(),
    loss=lm_loss,
    lr=1e-2,
    accelerator=None,
    eval_rows=ROWS[:5],
    **config,
):
    config = (
        dict(
            output_dir=str(folder),
            max_steps=12,
            gradient_accumulation_steps=3,
            logging_steps=5,
            eval_steps=4,
            save_steps=5,
            save_total_limit=0,
            progress=False,
        )
        | config
    )
    return Trainer(
        make("ours") if model is None else model,
        loss,
        Batches(rows, batch_size, seed=3),
        Batches(eval_rows, 2),
        TrainConfig(**config),
        callbacks,
        OptimConfig(learning_rate=lr, warmup_steps=2),
        accelerator=accelerator,
    )


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same(a, b):
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def timeless(history):
    return [
        {k: v for k, v in r.items() if not k.endswith(("seconds", "per_second", "share"))}
        for r in history
    ]


class StopAt:
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, record):
        if record["step"] == self.step:
            trainer.control.stop("tired")


# Models of transformers, without their table of logits


@pytest.mark.parametrize("kind", sorted(PLAIN_HEADS) + ["cohere", "gemma2", "granite", "phi"])
def test_loss_in_chunks_is_the_one_that_transformers_computes(kind):
    "For heads of one product; the last four cap, scale or shift logits and are called whole."
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    more = (
        dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        if kind == "gpt2"
        else dict(intermediate_size=48, num_key_value_heads=2, head_dim=16)
    )
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data.mul_(3) if p.dim() > 1 else None  # away from equal logits
    ids = torch.randint(64, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    batch = dict(input_ids=ids, attention_mask=mask, labels=labels)
    assert (body_and_head(model) is not None) == (kind in PLAIN_HEADS)
    theirs, mine = model(**batch, num_items_in_batch=1).loss, lm_loss(model, batch).terms["loss"][0]
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)
    theirs.backward()
    reference = gradient(model).clone()
    model.zero_grad()
    mine.backward()
    assert (gradient(model) - reference).norm() / reference.norm() < 2e-6


def test_a_head_that_does_more_is_called_as_a_whole():
    "An adapter, a hook, a compiler: whatever stands between hidden states and logits."
    model = make("llama")
    assert body_and_head(model) is not None
    model.forward, plain = torch.compile(model.forward), model.forward
    assert body_and_head(model) is None
    model._original_forward, model.forward = (
        plain,
        lambda *a, **k: plain(*a, **k),
    )  # as accelerate's autocast wraps it
    assert body_and_head(model) is not None
    hook = model.lm_head.register_forward_hook(lambda module, inputs, out: out * 2)
    assert body_and_head(model) is None
    hook.remove()
    model.lm_head = nn.Sequential(model.lm_head)
    assert body_and_head(model) is None


# Windows


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kind", ["ours", "llama", "gpt2", "own"])
def test_gradient_of_a_window_is_that_of_one_batch(kind, counted):
    model, loss = make(kind), own_loss if kind == "own" else lm_loss
    used = loss if counted else lambda model, batch: loss(model, batch)
    rows = [
        dict(input_ids=row, labels=[-100] * min(i, len(row) - 2) + row[min(i, len(row) - 2) :])
        for i, row in enumerate(ROWS[:8])
    ]
    whole = collate(rows)
    logits = (
        model(whole["input_ids"])
        if kind == "own"
        else model(whole["input_ids"], attention_mask=whole["attention_mask"]).logits
    )
    expected = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), whole["labels"][:, 1:].flatten()
    )
    expected.backward()
    reference = gradient(model).clone()
    for size in (1, 2, 3, 5, 8):
        model.zero_grad()
        window_loss, _ = accumulate(
            model,
            used,
            [collate(rows[i : i + size]) for i in range(0, 8, size)],
            make_accelerator("no"),
        )
        assert abs(window_loss.item() - expected.item()) < 1e-5
        assert (gradient(model) - reference).norm() / reference.norm() < 1e-6


def test_the_naive_mean_of_means_would_fail_this():
    model, rows = make("ours"), ROWS[:8]
    accelerator = make_accelerator("no")
    accumulate(model, lm_loss, [collate(rows)], accelerator)
    reference = gradient(model).clone()
    model.zero_grad()
    for row in rows:
        (lm_loss(model, collate([row])).total / 8).backward()
    assert (gradient(model) - reference).norm() / reference.norm() > 0.05


@pytest.mark.parametrize("kind", ["ours", "llama", "own"])
def test_runs_with_windows_end_where_runs_with_big_batches_end(kind):
    "29 rows: batches of 6 leave 5 at the end, windows of three batches of 2 leave 2, 2 and 1."
    loss = own_loss if kind == "own" else lm_loss
    big = trainer(
        make(kind), batch_size=6, gradient_accumulation_steps=1, loss=loss, logging_steps=1
    )
    cut = trainer(
        make(kind), batch_size=2, gradient_accumulation_steps=3, loss=loss, logging_steps=1
    )
    one, two = big.train(), cut.train()
    assert one.steps == two.steps == 12 and one.tokens == two.tokens
    for a, b in zip(one.history, two.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], abs=1e-5
        )
        assert a["epoch"] == pytest.approx(b["epoch"])
    for a, b in zip(big.model.parameters(), cut.model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-5


def test_several_terms_keep_their_own_counts():
    @objective(counts=lambda batch: {**lm_loss.counts(batch), "length": len(batch["labels"])})
    def two_terms(model, batch):
        logits = model(batch["input_ids"]).logits
        return Loss(
            {
                **lm_loss(model, batch).terms,
                "length": (logits.logsumexp(-1).square().mean(1).sum(), len(logits), 0.01),
            }
        )

    model, rows, accelerator = make("ours"), [ROWS[3]] * 3 + [ROWS[4]] * 4, make_accelerator("no")
    pieces = [collate(rows[:1]), collate(rows[1:3]), collate(rows[3:])]
    terms = [two_terms(model, piece).terms for piece in pieces]
    expected = (
        sum(t["loss"][0] for t in terms) / sum(t["loss"][1] for t in terms)
        + 0.01 * sum(t["length"][0] for t in terms) / 7
    )
    expected.backward()
    reference = gradient(model).clone()
    model.zero_grad()
    loss, metrics = accumulate(model, two_terms, pieces, accelerator)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (gradient(model) - reference).norm() / reference.norm() < 1e-6 and set(metrics) == {
        "loss",
        "length",
    }


# Resume


@pytest.mark.parametrize(
    "kind, precision", [("ours", "no"), ("ours", "bf16"), ("ours", "fp16"), ("own", "no")]
)
def test_resume_is_exact(tmp_path, kind, precision):
    "Stopped anywhere in two epochs and resumed: equal weights, records and order of the data."

    def run(name, stop=None, resume=None):
        order = []

        def loss(model, batch):
            if model.training:
                order.append(batch["input_ids"].sum().item())
            return (own_loss if kind == "own" else lm_loss)(model, batch)

        t = trainer(
            make(kind, dropout=0.2),
            folder=tmp_path / name,
            callbacks=[StopAt(stop)],
            loss=objective(counts=lm_loss.counts)(loss),
            mixed_precision=precision,
            max_steps=10,
            eval_strategy="steps",
            early_stopping_patience=9,
        )
        return t, t.train(resume), order

    whole, expected, order = run("whole")
    assert (
        expected.steps == 10 and len(order) == 30
    )  # two epochs, each with windows of three batches
    for stop in (1, 4, 5, 6) if precision == "no" else (2, 5):  # an epoch has five steps
        _, first, before = run(f"run{stop}", stop)
        t, rest, after = run(f"run{stop}", resume=True)
        assert (first.steps, first.stop_reason, rest.stop_reason) == (stop, "tired", "finished")
        assert same(whole.model, t.model) and before + after == order
        assert timeless(rest.history) == timeless([r for r in expected.history if r["step"] > stop])
        assert (rest.tokens, rest.best_metric, rest.final_loss) == (
            expected.tokens,
            expected.best_metric,
            expected.final_loss,
        )


def test_evaluation_sampling_and_saving_do_not_change_training(tmp_path):
    plain = trainer(make("own", 0.3), loss=own_loss)
    busy = trainer(
        make("own", 0.3),
        loss=own_loss,
        folder=tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=2,
        logging_steps=1,
        sample_steps=0,
    )
    busy.sample, busy.config.sample_steps = lambda model, step: [("", str(torch.rand(3)))], 3
    plain.train()
    busy.train()
    assert same(plain.model, busy.model)


def test_a_second_run_begins_anew():
    "Training twice with one trainer uses the same batches, not the rest of the first run."
    t = trainer(max_steps=7)
    start = {k: v.clone() for k, v in t.model.state_dict().items()}
    first = t.train()
    end = {k: v.clone() for k, v in t.model.state_dict().items()}
    t.model.load_state_dict(start)
    assert timeless(t.train().history) == timeless(first.history)
    assert all(torch.equal(end[k], v) for k, v in t.model.state_dict().items())


# Checkpoints and best models


def test_the_folder_of_a_run(tmp_path):
    saved = []

    class Saves:
        def on_save(self, trainer, record):
            saved.append((record["kind"], record["step"], Path(record["path"]).name))

    result = trainer(
        folder=tmp_path,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=3,
        callbacks=[Saves()],
        lr=3e-3,
    ).train()
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("checkpoint-*"))
    assert (
        names == ["checkpoint-12", "checkpoint-9"]
        and Path(result.final_checkpoint).name == "checkpoint-12"
    )
    assert [s for s in saved if s[0] == "checkpoint"] == [
        ("checkpoint", s, f"checkpoint-{s}") for s in (3, 6, 9, 12)
    ]
    assert saved[-1] == ("final", 12, "model") and ("best", 4, "best_model") in saved
    assert (
        Path(result.best_model_path) == tmp_path / "best_model"
        and (tmp_path / "model" / "model.safetensors").exists()
    )


def test_the_best_checkpoint_survives_rotation_and_comes_back(tmp_path):
    t = trainer(
        folder=tmp_path,
        rows=ROWS[:6],
        eval_rows=ROWS[20:],
        lr=3e-2,
        max_steps=40,
        gradient_accumulation_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    result = t.train()
    curve = {r["step"]: r["eval_loss"] for r in result.history if "eval_loss" in r}
    best = min(curve, key=curve.get)
    assert best < 36 and result.best_metric == curve[best]
    assert {p.name for p in (tmp_path / "checkpoints").glob("checkpoint-*")} == {
        f"checkpoint-{best}",
        "checkpoint-40",
    }
    assert t.evaluate()["eval_loss"] == pytest.approx(curve[best], abs=1e-7)


def test_save_strategies(tmp_path):
    trainer(folder=tmp_path / "no", save_strategy="no").train()
    assert (
        not list((tmp_path / "no").glob("checkpoints/*")) and (tmp_path / "no" / "model").exists()
    )
    stopped = trainer(
        folder=tmp_path / "stopped", save_strategy="no", callbacks=[StopAt(3)]
    ).train()  # a stop must not lose anything
    assert Path(stopped.final_checkpoint).name == "checkpoint-3"
    trainer(folder=tmp_path / "epoch", save_strategy="epoch", max_steps=11).train()
    assert sorted(p.name for p in (tmp_path / "epoch" / "checkpoints").glob("c*")) == [
        "checkpoint-10",
        "checkpoint-11",
        "checkpoint-5",
    ]
    before = sorted(tmp_path.rglob("*"))
    trainer(max_steps=2).train()
    assert sorted(tmp_path.rglob("*")) == before


def test_two_runs_in_one_folder(tmp_path):
    class Second:
        def on_step(self, trainer, record):
            if record["step"] == 2:
                with pytest.raises(RuntimeError, match="in use"):
                    globals()["trainer"](folder=tmp_path).train()
                self.seen = True

    second = Second()
    trainer(folder=tmp_path, callbacks=[second], max_steps=3).train()
    assert second.seen


# Faults


def test_nan_leaves_the_good_checkpoint_and_the_weights(tmp_path):
    calls = []

    def loss(model, batch):
        calls.append(0)
        total = lm_loss(model, batch)
        if len(calls) == 3 * 7 + 2:
            total.terms["loss"] = (total.terms["loss"][0] * math.nan, *total.terms["loss"][1:])
        return total

    t = trainer(folder=tmp_path, loss=objective(counts=lm_loss.counts)(loss))
    with pytest.raises(TrainingError, match="Step 8: the loss is nan") as caught:
        t.train()
    assert caught.value.step == 8 and Path(caught.value.checkpoint).name == "checkpoint-5"
    assert [p.name for p in (tmp_path / "checkpoints").glob("checkpoint-*")] == [
        "checkpoint-5"
    ] and not (tmp_path / "model").exists()
    seven = trainer(max_steps=12, callbacks=[StopAt(7)])
    seven.train()
    assert same(t.model, seven.model)
    for cause in ("learning rate", "format", "data"):
        assert cause in str(caught.value)


def test_an_error_in_the_data_or_a_callback_keeps_its_type_and_frees_everything(tmp_path):
    class Broken(Batches):
        def __iter__(self):
            for i, batch in enumerate(super().__iter__()):
                if i == 7:
                    raise OSError("the disk went away")
                yield batch

    ends = []

    class Ends:
        def on_end(self, trainer, record):
            ends.append(record)

    model = make("ours").eval()
    t = Trainer(
        model,
        lm_loss,
        Broken(ROWS, 2, seed=3),
        config=TrainConfig(
            str(tmp_path), max_steps=9, gradient_accumulation_steps=3, progress=False
        ),
        callbacks=[Ends()],
    )
    with pytest.raises(OSError, match="went away") as caught:
        t.train()
    assert (
        "up to step 2 is in" in caught.value.__notes__[0]
        and caught.value.__notes__[1] == "(at step 2 of 9)"
        and "went away" in ends[0]["reason"]
    )
    assert not model.training and "forward" not in vars(model) and t.control.state == "idle"
    assert (
        trainer(folder=tmp_path, max_steps=9).train(resume=True, force_resume=True).steps == 9
    )  # the lock is free again, and nothing is lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_trained_in_float32_masters(dtype):
    """The run equals one with weights widened beforehand and the same compute format.

    GradScaler never sees a float16 gradient.
    """
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    narrow, widened = (
        trainer(make("ours").to(dtype)),
        trainer(make("ours").to(dtype).float(), mixed_precision=name),
    )
    result = narrow.train()
    assert timeless(result.history) == timeless(widened.train().history) and same(
        narrow.model, widened.model
    )
    assert {p.dtype for p in narrow.model.parameters()} == {
        torch.float32
    } and "float32" in result.notes[0]


def test_zero_updates_is_an_error():
    t = trainer(mixed_precision="fp16", max_steps=4, logging_steps=50)
    t.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=0.999)
    with pytest.raises(TrainingError, match="nothing is learned"):
        t.train()


# Optimizers and switches

SWITCHES = {
    "muon": (dict(optim="muon"), {}),
    "groups": (dict(lr_factors={"embed": 0.25}, weight_decays={"norm": 0.1}), {}),
    "in backward": (
        {},
        dict(optimizer_in_backward=True, max_grad_norm=0.0, gradient_accumulation_steps=1),
    ),
    "muon in backward": (
        dict(optim="muon"),
        dict(optimizer_in_backward=True, max_grad_norm=0.0, gradient_accumulation_steps=1),
    ),
    "lion": (dict(optim="lion", adam_beta2=0.99), {}),
    "adafactor": (dict(optim="adafactor"), {}),
    "8 bits": (dict(optim="adamw_8bit"), {}),
    "transposed": ({}, {}),  # In memory, as the adapters of PiSSA
    "adafactor in backward": (
        dict(optim="adafactor"),
        dict(optimizer_in_backward=True, max_grad_norm=0.0, gradient_accumulation_steps=1),
    ),
    "z-loss": ({}, dict(z_loss=1e-3)),
    "noise": ({}, dict(neftune_noise_alpha=5.0)),
    "compiled": ({}, dict(torch_compile=True, torch_compile_backend="aot_eager")),
    "inductor": ({}, dict(torch_compile=True)),
}


@pytest.mark.parametrize(
    "switch", [pytest.param(k, marks=pytest.mark.slow) if k == "inductor" else k for k in SWITCHES]
)
def test_resume_is_exact_with(tmp_path, switch):
    optim, config = SWITCHES[switch]
    rows = (
        [row[:12] for row in ROWS if len(row) >= 12]
        if "compiled" in switch or switch == "inductor"
        else ROWS
    )

    def run(name, resume=None, **more):
        model = make("wide" if switch == "8 bits" else "ours", 0.2)
        if switch == "transposed":
            for p in model.model.layers.parameters():
                p.data = p.data.T.contiguous().T if p.ndim == 2 else p.data
        t = trainer(
            model,
            rows=rows[: len(rows) // 2 * 2],
            folder=tmp_path / name,
            max_steps=8,
            logging_steps=1,
            **config,
            **more,
        )
        t.optim = OptimConfig(learning_rate=1e-2, warmup_steps=2, **optim)
        return t, t.train(resume)

    (whole, expected), _ = run("whole"), run("cut", callbacks=[StopAt(3)])
    again, rest = run("cut", True)
    assert (
        same(whole.model, again.model)
        and timeless(rest.history) == timeless(expected.history)[-len(rest.history) :]
    )
    assert not expected.notes and not any("_orig_mod" in name for name in again.model.state_dict())


def test_in_backward_equals_the_ordinary_step_and_holds_less(tmp_path):
    held = {}

    def run(inside):
        t = trainer(max_grad_norm=0.0, gradient_accumulation_steps=1, optimizer_in_backward=inside)
        waiting = held[inside] = []
        for p in t.model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda _: waiting.append(
                    sum(q.grad.nbytes for q in t.model.parameters() if q.grad is not None)
                )
            )
        t.train()
        return t.model

    assert same(run(False), run(True))
    assert (
        max(held[True]) <= 2 * max(p.nbytes for p in make("ours").parameters()) < max(held[False])
    )


def test_compilation_falls_back_and_says_why():
    def failing(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    torch._dynamo.register_backend(failing, name="failing")
    plain, fallen = trainer(), trainer(torch_compile=True, torch_compile_backend="failing")
    ends = []

    class Ends:
        def on_end(self, trainer, record):
            ends.append(record["notes"])

    fallen.callbacks = [Ends()]
    plain.train()
    result = fallen.train()
    assert (
        same(plain.model, fallen.model)
        and "no C++ compiler here" in result.notes[0]
        and ends == [result.notes]
    )


def test_compilation_falls_back_where_torch_has_other_settings(monkeypatch):
    "torch 2.6 has none of these names, and an `AttributeError` ended the run."
    from trainkit.train import step

    def failing(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    new = ("force_non_lazy_backward_lowering", "recompile_limit", "fail_on_recompile_limit_hit")
    seen = []

    def older(config, **settings):
        seen.extend(settings)
        return {name: value for name, value in settings.items() if name not in new}

    monkeypatch.setattr(step, "_known", older)
    plain = torch.nn.Linear(2, 2)
    compiled = step.Compiled(plain, failing, say=str)
    x = torch.ones(1, 2)
    assert torch.equal(compiled(x), plain(x)) and "no C++ compiler here" in compiled.reason
    assert seen[-2:] == ["cache_size_limit", "fail_on_cache_limit_hit"]


# What a reader brings along


def test_a_model_that_knows_no_mask_trains_on_padded_rows_and_refuses_packed_ones():
    plain, masked = (
        trainer(make("own")),
        trainer(make("own"), loss=own_loss),
    )  # own_loss leaves the mask out by hand
    assert plain.train().final_loss == masked.train().final_loss and same(plain.model, masked.model)
    batch = dict(
        input_ids=torch.ones(2, 4, dtype=torch.long), labels=torch.ones(2, 4, dtype=torch.long)
    )
    packed = dict(batch, position_ids=torch.tensor([[0, 1, 0, 1]] * 2))
    left = dict(batch, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
    for bad, word in (
        (packed, "position_ids, so documents"),
        (left, "attention_mask, so padding before"),
    ):
        with pytest.raises(ValueError, match=f"Own.forward takes no {word}"):
            lm_loss(make("own"), bad)


def test_the_groups_are_shown_with_their_peak_rates():
    lines = []

    class Start:
        def on_start(self, trainer, record):
            lines.append(record["groups"])

    t = trainer(callbacks=[Start()], max_steps=1)
    t.train()
    assert "rate 0.01 " in lines[0] and "rate 0 " not in lines[0]


def test_objectives_that_cannot_be_added_up_say_so():
    def mean(model, batch):
        return lm_loss(model, batch).total

    with pytest.raises(TypeError, match="returned Tensor, and must return sums and counts"):
        trainer(loss=mean).train()

    def uncounted(model, batch):
        return lm_loss(model, batch)

    silent = [dict(input_ids=row, labels=[-100] * len(row)) for row in ROWS]
    for pieces in (1, 3):
        with pytest.raises(ValueError, match="every label is -100"):
            trainer(rows=silent, loss=uncounted, gradient_accumulation_steps=pieces).train()


def test_a_used_up_iterator_is_named():
    batch = dict(
        input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)
    )
    with pytest.raises(ValueError, match="at step 3 .an iterator gives its batches only once"):
        Trainer(
            make("ours"),
            lm_loss,
            (batch for _ in range(3)),
            config=TrainConfig(max_steps=8, progress=False),
        ).train()


def test_resuming_with_other_groups_says_which_knob(tmp_path):
    trainer(folder=tmp_path / "run", max_steps=2).train()
    other = trainer(folder=tmp_path / "run", max_steps=4)
    other.optim = OptimConfig(lr_factors={"embed": 2.0})
    with pytest.raises(
        ValueError,
        match="same parameters in other groups .2 there, 3 here.: the patterns of lr_factors",
    ) as caught:
        other.train(resume=True, force_resume=True)
    assert len(str(caught.value)) < 250


def test_a_backward_pass_that_does_not_compile_falls_back_too():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def failing(graph, inputs):
        raise RuntimeError("no backward pass here")

    half = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=failing
    )
    torch._dynamo.register_backend(half, name="half")
    plain, fallen = (
        trainer(max_steps=2),
        trainer(max_steps=2, torch_compile=True, torch_compile_backend="half"),
    )
    plain.train()
    notes = fallen.train().notes
    assert (
        len(notes) == 1 and "no backward pass here" in notes[0] and same(plain.model, fallen.model)
    )


@pytest.mark.slow
def test_a_later_model_is_compiled_as_the_first_one_was():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.register_backend(counting, name="counting")
    for number in range(
        1, 13
    ):  # More than torch's own limit, which counts the versions of all models together
        notes = (
            trainer(
                rows=[[1] * (4 + number)] * 12,
                max_steps=1,
                torch_compile=True,
                torch_compile_backend="counting",
            )
            .train()
            .notes
        )
        assert (len(graphs), notes) == (number, [])


# Every knob of the loop, each with what it must do


class Heard:
    "What the callbacks hear."

    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda trainer, record: self.events.append((name, record))

    def steps(self, name, **wanted):
        return [
            r["step"]
            for n, r in self.events
            if n == name and all(r.get(k) == v for k, v in wanted.items())
        ]

    def last(self, name):
        return [r for n, r in self.events if n == name][-1]


def scored(values):
    "`lm_loss` with a metric that takes these values in one evaluation after the other."
    scores = iter(values)

    def loss(model, batch):
        out = lm_loss(model, batch)
        if not model.training and batch["input_ids"].shape[0] == 1:
            out.metrics["score"] = next(scores)  # the last batch of 5 rows in twos
        return out

    return objective(counts=lm_loss.counts)(loss)


def tree(t):
    return (
        sorted(p.name for p in (t.folder / "checkpoints").glob("checkpoint-*")) if t.folder else []
    )


FIVE = dict(gradient_accumulation_steps=3)  # 15 batches of 2 rows: epochs of 5 steps
# name: (arguments of trainer(), of OptimConfig, a check of trainer, result and callbacks)
OPTIONS = {
    "max_steps over epochs": (
        dict(max_steps=7, num_train_epochs=1),
        {},
        lambda t, r, h: r.steps == 7 and r.stop_reason == "finished",
    ),
    "num_train_epochs": (
        dict(max_steps=-1, num_train_epochs=2),
        {},
        lambda t, r, h: r.steps == 10 and h.last("on_log")["epoch"] == 2,
    ),
    "half an epoch": (dict(max_steps=-1, num_train_epochs=0.5), {}, lambda t, r, h: r.steps == 3),
    "gradient_accumulation_steps": (
        dict(max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=4),
        {},
        lambda t, r, h: r.steps == 4,
    ),
    "adam": (
        {},
        dict(adam_beta1=0.8, adam_beta2=0.97, adam_epsilon=1e-6, weight_decay=0.2),
        lambda t, r, h: (
            all((g["betas"], g["eps"]) == ((0.8, 0.97), 1e-6) for g in t.raw_optimizer.param_groups)
            and {g["weight_decay"] for g in t.raw_optimizer.param_groups} == {0.2, 0.0}
        ),
    ),
    "optim adamw": ({}, dict(optim="adamw"), lambda t, r, h: not t.raw_optimizer.defaults["fused"]),
    "warm-up in steps": (
        dict(logging_steps=1, max_steps=10),
        dict(warmup_steps=4),
        lambda t, r, h: (
            [round(x["learning_rate"] / 1e-2, 6) for x in r.history[:5]] == [0, 0.25, 0.5, 0.75, 1]
        ),
    ),
    "warm-up as a share": (
        dict(logging_steps=1, max_steps=10),
        dict(warmup_steps=0.4),
        lambda t, r, h: (
            [round(x["learning_rate"] / 1e-2, 6) for x in r.history[:5]] == [0, 0.25, 0.5, 0.75, 1]
        ),
    ),
    "warmup_ratio": (
        dict(logging_steps=1, max_steps=10),
        dict(warmup_steps=0, warmup_ratio=0.4),
        lambda t, r, h: (
            [round(x["learning_rate"] / 1e-2, 6) for x in r.history[:5]] == [0, 0.25, 0.5, 0.75, 1]
        ),
    ),
    "max_grad_norm": (
        dict(logging_steps=1, max_grad_norm=1e-9),
        dict(adam_epsilon=1.0, weight_decay=0.0),
        lambda t, r, h: (  # the norm is that before clipping
            min(x["grad_norm"] for x in r.history) > 0.1
            and max(
                (p - q).abs().max()
                for p, q in zip(t.model.parameters(), make("ours").parameters(), strict=True)
            )
            < 1e-8
        ),
    ),
    "gradient norm": (
        dict(logging_steps=4, max_grad_norm=0.0),
        {},
        lambda t, r, h: all(x["grad_norm"] > 0.1 for x in r.history),
    ),
    "logging_steps": (dict(logging_steps=4), {}, lambda t, r, h: h.steps("on_log") == [4, 8, 12]),
    "logging_first_step": (
        dict(logging_steps=5, logging_first_step=True),
        {},
        lambda t, r, h: h.steps("on_log") == [1, 5, 10, 12],
    ),
    "eval_strategy no": (dict(eval_strategy="no"), {}, lambda t, r, h: h.steps("on_eval") == []),
    "eval_strategy steps": (
        dict(eval_strategy="steps", eval_steps=5),
        {},
        lambda t, r, h: h.steps("on_eval") == [5, 10],
    ),
    "eval_strategy epoch": (
        dict(eval_strategy="epoch"),
        {},
        lambda t, r, h: h.steps("on_eval") == [5, 10],
    ),
    "eval_accumulation_steps": (
        dict(eval_strategy="epoch", eval_accumulation_steps=2),
        {},
        lambda t, r, h: (
            h.last("on_eval")["eval_loss"]
            == run_option(dict(eval_strategy="epoch"))[2].last("on_eval")["eval_loss"]
        ),
    ),
    "save_strategy no": (
        dict(folder="x", save_strategy="no"),
        {},
        lambda t, r, h: tree(t) == [] and (t.folder / "model").is_dir(),
    ),
    "save_strategy steps": (
        dict(folder="x", save_steps=5),
        {},
        lambda t, r, h: tree(t) == ["checkpoint-10", "checkpoint-12", "checkpoint-5"],
    ),
    "save_strategy epoch": (
        dict(folder="x", save_strategy="epoch", max_steps=10),
        {},
        lambda t, r, h: tree(t) == ["checkpoint-10", "checkpoint-5"],
    ),
    "save_total_limit": (
        dict(folder="x", save_steps=2, save_total_limit=2),
        {},
        lambda t, r, h: tree(t) == ["checkpoint-10", "checkpoint-12"],
    ),
    "best and last are kept": (
        dict(
            folder="x",
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            save_total_limit=1,
            load_best_model_at_end=True,
            loss=[3, 1, 2, 2, 2, 2],
            metric_for_best_model="score",
            greater_is_better=False,
        ),
        {},
        lambda t, r, h: (
            tree(t) == ["checkpoint-12", "checkpoint-4"]
            and Path(r.best_model_path).name == "best_model"
            and same_weights(t, "checkpoint-4", "best_model", "model")
        ),
    ),
    "the last model without load_best": (
        dict(
            folder="x",
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            loss=[3, 1, 2, 2, 2, 2],
            metric_for_best_model="score",
            greater_is_better=False,
        ),
        {},
        lambda t, r, h: (
            same_weights(t, "checkpoint-4", "best_model")
            and same_weights(t, "checkpoint-12", "model")
            and not same_weights(t, "checkpoint-4", "model")
        ),
    ),
    "greater_is_better": (
        dict(
            eval_steps=2,
            eval_strategy="steps",
            loss=[3, 1, 5, 2, 2, 2],
            metric_for_best_model="eval_score",
        ),
        {},
        lambda t, r, h: (
            (r.best_metric, t.state.best_step, h.steps("on_eval", best=True)) == (5, 6, [2, 6])
        ),
    ),
    "early stopping": (
        dict(
            eval_steps=1,
            eval_strategy="steps",
            early_stopping_patience=2,
            loss=[1, 2, 2.05, 2.02, 9, 9],
            metric_for_best_model="score",
            early_stopping_threshold=0.1,
        ),
        {},
        lambda t, r, h: (r.steps, r.stop_reason) == (4, "early stopping"),
    ),
    "seed alone": (
        dict(seed=7, kind="dropout"),
        {},
        lambda t, r, h: (
            not same(t.model, run_option(dict(seed=8, kind="dropout"))[0].model)
            and same(t.model, run_option(dict(seed=7, kind="dropout"))[0].model)
        ),
    ),
    "tf32 on a device without it": (
        dict(tf32=True),
        {},
        lambda t, r, h: torch.cuda.is_available() or not torch.backends.cuda.matmul.allow_tf32,
    ),
    "mixed_precision": (
        dict(mixed_precision="bf16"),
        {},
        lambda t, r, h: (
            t.accelerator.mixed_precision == "bf16" and r.final_loss != run_option({})[1].final_loss
        ),
    ),
    "optimizer_in_backward": (
        dict(optimizer_in_backward=True, max_grad_norm=0.0, gradient_accumulation_steps=1),
        {},
        lambda t, r, h: same(
            t.model, run_option(dict(max_grad_norm=0.0, gradient_accumulation_steps=1))[0].model
        ),
    ),
    "torch_compile_mode": (
        dict(torch_compile=True, torch_compile_mode="nonsense", max_steps=2),
        {},
        lambda t, r, h: len(r.notes) == 1 and "nonsense" in r.notes[0],
    ),
    "sample_steps": (dict(sample_steps=5), {}, lambda t, r, h: h.steps("on_sample") == [5, 10, 12]),
    "on_oom": (dict(on_oom="raise"), {}, lambda t, r, h: t.retry.on_oom == "raise"),
    **{
        f"schedule {name}": (
            dict(logging_steps=1, max_steps=8),
            dict(lr_scheduler_type=name, warmup_steps=2),
            None,
        )
        for name in SCHEDULES
    },
}


def same_weights(t, first, *others):
    "Whether folders of a run hold the same weights."
    from safetensors.torch import load_file

    def home(name):
        return (
            t.folder / "checkpoints" / name if name.startswith("checkpoint-") else t.folder / name
        )

    weights = [load_file(home(name) / "model.safetensors") for name in (first, *others)]
    assert all(len(a.keys() & b.keys()) >= 10 for a, b in pairwise(weights))
    return all(
        torch.equal(a[k], b[k]) for a, b in pairwise(weights) for k in a.keys() & b.keys()
    )  # tied ones are named once


def run_option(options, optim=None, folder=None):
    config, heard = dict(options), Heard()
    if "folder" in config:
        config["folder"] = folder
    if isinstance(config.get("loss"), list):
        config["loss"] = scored(config["loss"])
    kind, speaks = config.pop("kind", None), config.pop("sample_steps", 0)
    t = trainer(make("ours", 0.2 if kind == "dropout" else 0.0), callbacks=[heard], **config)
    t.optim = OptimConfig(**dict(learning_rate=1e-2, warmup_steps=2) | (optim or {}))
    t.sample, t.config.sample_steps = lambda model, step: [("a", "b")], speaks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return t, t.train(), heard


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, tmp_path):
    options, optim, holds = OPTIONS[name]
    results = run_option(options, optim, tmp_path)
    if holds is not None:
        assert holds(*results)
    else:  # transformers' schedule of the same name
        from transformers import get_scheduler

        t, result, _ = results
        theirs = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
        kind = optim["lr_scheduler_type"]
        more = dict(
            warmup_stable_decay=dict(
                scheduler_specific_kwargs=dict(num_decay_steps=1, num_stable_steps=5)
            ),
            cosine_with_min_lr=dict(scheduler_specific_kwargs=dict(min_lr_rate=0.0)),
        )
        schedule = get_scheduler(
            kind,
            theirs,
            num_warmup_steps=None if kind == "constant" else 2,
            num_training_steps=8,
            **more.get(kind, {}),
        )
        rates = []
        for _ in range(8):
            rates.append(theirs.param_groups[0]["lr"])
            theirs.step(), schedule.step()
        assert [r["learning_rate"] for r in result.history] == pytest.approx(
            rates, abs=2e-7
        )  # polynomial ends at 1e-7 there


# schedule -> our knobs, and their names in transformers, for so many steps after the warm-up
SCHEDULE_KNOBS = {
    "constant": [({}, {})],
    "constant_with_warmup": [({}, {})],
    "linear": [({}, {})],
    "cosine": [({}, {}), *[(dict(num_cycles=n), dict(num_cycles=n)) for n in (0, 0.5, 1, 1.5)]],
    "cosine_with_min_lr": [
        (dict(min_lr_ratio=floor, num_cycles=n), dict(min_lr_rate=floor, num_cycles=n))
        for floor in (0, 0.1, 1)
        for n in (0.5, 1)
    ],
    "cosine_with_restarts": [
        ({}, {}),
        *[(dict(num_cycles=n), dict(num_cycles=n)) for n in (1, 2, 3)],
    ],
    "polynomial": [
        (
            dict(power=power, **more),
            dict(power=power, **(dict(lr_end=0.01 * more["min_lr_ratio"]) if more else {})),
        )
        for power in (0, 0.5, 1, 2)
        for more in ({}, dict(min_lr_ratio=0.1))
    ],
    "warmup_stable_decay": [
        (
            dict(decay_ratio=ratio, min_lr_ratio=floor, **more),
            dict(decay=ratio, min_lr_ratio=floor, **more),
        )
        for ratio in (0.1, 0.5, 1)
        for floor in (0, 0.1, 1)
        for more in ({}, dict(num_cycles=1), dict(num_cycles=1.5))
    ],
}


def rates_of(optimizer, schedule, steps):
    "The learning rate before each step and after the last."
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_is_transformers_over_a_grid_of_knobs(kind):
    "At every step and at the end, with and without warm-up, for every knob of a schedule."
    from transformers import get_scheduler

    for mine, theirs in SCHEDULE_KNOBS[kind]:
        for total, warmup in ((20, 4), (20, 0), (37, 36), (5, 1), (1, 0)):
            named = dict(theirs)
            if "decay" in named:
                named["num_decay_steps"] = named.pop("decay") * (total - warmup)
            ours, reference = (torch.optim.SGD([torch.zeros(1)], lr=0.01) for _ in range(2))
            config = OptimConfig(
                learning_rate=0.01, lr_scheduler_type=kind, warmup_steps=warmup, **mine
            )
            rates = rates_of(ours, make_schedule(ours, config, total), total)
            expected = rates_of(
                reference, get_scheduler(kind, reference, warmup, total, named), total
            )
            assert rates == pytest.approx(expected, abs=1e-15), (mine, total, warmup)


def test_every_knob_of_the_loop_has_a_test():
    "A knob that is added to TrainConfig must appear somewhere in the tests."
    from trainkit.config import knobs

    text = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")
    )
    missing = [k.name for k in knobs(TrainConfig) if k.name not in text]
    assert missing == [], missing


def test_data_seed_and_seed_are_apart():
    "One seed chooses the order of the data, the other dropout: RunConfig hands them on."
    from trainkit.recipes.preparation import make_batches
    from trainkit.recipes.config import RunConfig
    from types import SimpleNamespace

    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0)

    def order(**seeds):
        return (
            make_batches(RunConfig(train=TrainConfig(**seeds)), ROWS, ROWS, tokenizer)[0]
            .order(0)
            .tolist()
        )

    sized = make_batches(
        RunConfig(train=TrainConfig(per_device_train_batch_size=3, per_device_eval_batch_size=5)),
        ROWS,
        ROWS,
        tokenizer,
    )
    assert [len(b) for b in sized] == [10, 6]
    assert order(seed=1) == order(seed=2, data_seed=1) != order(seed=2) and order(seed=2) == order(
        seed=1, data_seed=2
    )


# Control


def test_pause_leaves_speed_and_time_alone():
    control = Control()
    t = trainer(max_steps=40, logging_steps=1)
    t.control = control

    class Pause:
        def on_step(self, trainer, record):
            if record["step"] == 20:
                control.pause()
                threading.Timer(0.5, control.resume).start()

    t.callbacks, wait, held = [Pause()], control.wait, []

    def timed():
        began = time.monotonic()
        wait()
        held.append(time.monotonic() - began)

    control.wait = timed
    began = time.monotonic()
    result = t.train()
    wall, pause = time.monotonic() - began, sum(held)
    assert pause > 0.1 and result.seconds < wall - 0.9 * pause and result.steps == 40
    before, record = result.history[
        19:21
    ]  # The step after the pause: its speed is that of the time that it took
    took = (record["tokens"] - before["tokens"]) / record["tokens_per_second"]
    assert abs(took - (record["seconds"] - before["seconds"])) < 0.5 * pause
    record = result.history[21]
    assert (
        record["eta_seconds"] < 2 * record["seconds"] * 18 / 22 + 0.05
    )  # not slowed down by the half second of the pause


def test_training_in_a_thread_and_stopping_from_another(tmp_path):
    t, box = trainer(folder=tmp_path, max_steps=10**6), []
    thread = threading.Thread(target=lambda: box.append(t.train()), daemon=True)
    handler = signal.getsignal(signal.SIGINT)
    thread.start()
    while t.state.step < 5:
        time.sleep(0.005)
    assert t.control.state == "running" and signal.getsignal(signal.SIGINT) is handler
    t.control.pause()
    last = time.monotonic() + 300
    while not rests(thread):
        assert time.monotonic() < last, "it does not end"
        time.sleep(0.005)
    step = t.state.step
    time.sleep(0.1)
    assert t.state.step == step and t.control.state == "paused"
    t.control.stop("enough")
    thread.join(300)
    assert (
        box[0].stop_reason == "enough"
        and box[0].steps == step
        and Path(box[0].final_checkpoint).name == f"checkpoint-{step}"
    )


def after_step_four(folder, stubborn=False):
    "A run that waits there for Ctrl-C; the stubborn one reports it and stays in its step."

    class Wait:
        def on_step(self, trainer, record):
            if record["step"] != 4:
                return
            print("step 4", flush=True)
            while not trainer.control.stopping:
                time.sleep(0.01)
            if stubborn:
                print("heard", flush=True), time.sleep(600)

    result = trainer(folder=folder, max_steps=60, callbacks=[Wait()]).train(resume="auto")
    print("result", result.stop_reason, result.steps)


def until_said(word, process, folder):
    while f"{word}\n" not in (folder / "out.txt").read_text():
        assert process.is_alive(), (folder / "err.txt").read_text()
        time.sleep(0.01)


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path):
    process = begin(after_step_four, tmp_path, folder=tmp_path)
    until_said("step 4", process, tmp_path)
    os.kill(process.pid, signal.SIGINT)
    done = end(process, tmp_path, 60)
    assert done.returncode == 0, done.stderr
    message, result = done.stdout.splitlines()[-2:]
    assert result == "result interrupted 4"
    assert (
        "after step 4 of 60" in message and "checkpoint-4" in message and "resume=True" in message
    )
    t = trainer(folder=tmp_path, max_steps=7)
    assert t.train(resume=True, force_resume=True).steps == 7


def test_the_second_ctrl_c_interrupts_at_once(tmp_path):
    process = begin(after_step_four, tmp_path, True, folder=tmp_path)
    for word in ("step 4", "heard"):  # Two that come together are one
        until_said(word, process, tmp_path)
        os.kill(process.pid, signal.SIGINT)
    done = end(process, tmp_path, 60)
    assert (
        done.returncode != 0 and "KeyboardInterrupt" in done.stderr and "result" not in done.stdout
    )


# accelerate


def test_the_model_is_given_back(tmp_path):
    model = make("ours").eval()
    forward = type(model).forward
    trainer(model, mixed_precision="bf16", max_steps=2).train()
    assert not model.training and "forward" not in vars(model) and type(model).forward is forward
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.long)).logits.dtype == torch.float32
    first = trainer(
        model, mixed_precision="no", max_steps=2
    ).train()  # another format in the same process
    assert first.steps == 2


def test_overflow_skips_one_step():
    from copy import deepcopy

    t = trainer(mixed_precision="fp16", logging_steps=1, max_steps=5)
    t.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30)
    seen, start = [], deepcopy(t.model.state_dict())

    class Watch:
        def on_step(self, trainer, record):
            seen.append(
                (
                    record["skipped_steps"],
                    all(
                        torch.equal(a, b)
                        for a, b in zip(
                            start.values(), trainer.model.state_dict().values(), strict=True
                        )
                    ),
                    trainer.schedule.last_epoch,
                )
            )

    t.callbacks = [Watch()]
    t.train()
    assert seen == [
        (1, True, 0),
        (1, True, 1),
        (1, False, 2),
        (1, False, 3),
        (1, False, 4),
    ]  # the first rate of the warm-up is 0


def share(counted, folder):
    "What one of several processes does, and says."
    loss = lm_loss if counted else lambda model, batch: lm_loss(model, batch)
    t = trainer(
        batch_size=2,
        gradient_accumulation_steps=2,
        loss=loss,
        logging_steps=1,
        max_steps=9,
        eval_strategy="steps",
        eval_steps=3,
        folder=folder,
        mixed_precision="no",
    )
    result = t.train()
    if t.accelerator.is_main_process:
        torch.save(
            torch.cat([p.detach().flatten() for p in t.model.parameters()]), folder / "weights.pt"
        )
    print(
        json.dumps(
            dict(
                processes=t.accelerator.num_processes, history=result.history, tokens=result.tokens
            )
        ),
        flush=True,
    )
    t.accelerator.wait_for_everyone()
    os._exit(0)  # threads of gloo may abort what is left of the interpreter


@pytest.mark.slow  # test_distributed has a quick one
@pytest.mark.parametrize("counted", [True, False])
def test_two_processes_are_one(tmp_path, counted):
    """2 processes x batch 2 x accumulation 2 = 1 process x batch 4 x 2, with uneven rows.

    The last window is partial.
    """
    one = trainer(
        batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        max_steps=9,
        eval_strategy="steps",
        eval_steps=3,
        mixed_precision="no",
    )
    result = one.train()
    two = together(2, share, counted, tmp_path, folder=tmp_path)[0]
    assert two["processes"] == 2 and two["tokens"] == result.tokens
    for a, b in zip(result.history, two["history"], strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "eval_tokens"):
            if key in a:
                assert a[key] == pytest.approx(b[key], abs=1e-5), key
    weights = torch.load(tmp_path / "weights.pt")
    assert (
        torch.cat([p.detach().flatten() for p in one.model.parameters()]) - weights
    ).abs().max() < 2e-6


def test_evaluation_holds_the_logits_of_one_batch():
    "Only sums are kept, so that the size of the evaluation set does not matter."
    held, most = [], []

    def loss(model, batch):
        logits = model(batch["input_ids"]).logits
        held.append(weakref.ref(logits))
        most.append(sum(ref() is not None for ref in held))
        labels = batch["input_ids"][:, 1:]
        return Loss(
            {
                "loss": (
                    nn.functional.cross_entropy(
                        logits[:, :-1].transpose(1, 2), labels, reduction="sum"
                    ),
                    labels.numel(),
                    1.0,
                )
            }
        )

    t = trainer(make("ours"), loss=loss, eval_rows=ROWS, eval_accumulation_steps=None)
    assert t.evaluate()["eval_loss"] > 0
    assert len(held) > 3 and max(most) == 1


def test_the_best_weights_need_a_place():
    with pytest.raises(ValueError, match="needs an output_dir"):
        trainer(load_best_model_at_end=True, eval_strategy="steps")


def test_the_bar_ends_with_the_last_step_and_the_evaluation_has_its_own(monkeypatch, capsys):
    "In the terminal: Training is complete, then a line Evaluating; after a stop, the bar is first."
    from trainkit.progress import Progress
    from trainkit.train import trainer as module

    seen = []

    class Recorded(Progress):
        def __init__(self, total, title, *words, **more):
            self.visible = more.get("where") != "silent"  # A stage that only a panel shows
            if self.visible:
                seen.append(("open", title, total))
            super().__init__(total, title, *words, **{**more, "where": "silent"})

        def close(self):
            if not self.closed and self.visible:
                seen.append(("close", self.title, self.clock.done))
            super().close()

    monkeypatch.setattr(module, "Progress", Recorded)
    t = trainer(max_steps=4, eval_strategy="steps", eval_steps=2, progress=True)
    t.train()
    size = len(t.eval_batches)
    whole = [("open", "Evaluating", size), ("close", "Evaluating", size)]
    assert seen == [("open", "Training", 4), *whole, ("close", "Training", 4), *whole]

    class Stops:
        def on_step(self, t, record):
            if record["step"] == 2:
                t.control.stop("interrupted")

    monkeypatch.setattr(module, "note", lambda *words, **_: seen.append(words[0][:12]))
    seen.clear()
    t = trainer(max_steps=4, eval_strategy="no", progress=True, callbacks=[Stops()])
    t.train()
    assert seen == [("open", "Training", 4), ("close", "Training", 2), "Stopped afte"]


@pytest.mark.parametrize("epochs", [3, 1.5])
def test_epochs_of_a_curriculum_have_their_own_lengths(tmp_path, epochs):
    curriculum = CurriculumConfig("length_based", start_length=4, end_length=16, steps=4)
    rows = [np.arange(i, i + 16) % 97 for i in range(12)]
    batches = Batches(rows, 4, curriculum=curriculum)
    lengths = [batches.batches_of(epoch) for epoch in range(3)]
    assert lengths[0] > lengths[1] == lengths[2] == 3
    held = [dict(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long())]
    trainer = Trainer(
        make("ours"),
        lm_loss,
        batches,
        eval_batches=held,
        config=TrainConfig(
            output_dir=str(tmp_path),
            num_train_epochs=epochs,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=9,
            progress=False,
        ),
    )
    trainer.train()
    ends = [lengths[0], sum(lengths[:2]), sum(lengths)] if epochs == 3 else [lengths[0]]
    evaluated = [r["step"] for r in trainer.history if "eval_loss" in r]
    assert evaluated[: len(ends)] == ends
    assert trainer.state.step == (sum(lengths) if epochs == 3 else lengths[0] + 2)
    assert {f"checkpoint-{step}" for step in ends} <= {
        p.name for p in (tmp_path / "checkpoints").iterdir()
    }


def test_padding_of_packed_rows_is_no_token_that_was_read():
    examples = [dict(input_ids=[5] * n, labels=[-100] + [5] * (n - 1)) for n in (9, 5, 4, 8, 3)]
    rows = pack(examples, 16, "best_fit")
    batch = collate(rows)
    assert "attention_mask" not in batch and batch["input_ids"].numel() > 29
    assert count_tokens(batch) == 29
    assert count_tokens(collate(rows, padding_free=True)) == 29


def test_noise_on_the_embeddings_ends_with_the_run():
    plain, noisy = trainer(), trainer(neftune_noise_alpha=5.0)
    assert plain.train().final_loss != noisy.train().final_loss
    assert not noisy.model.get_input_embeddings()._forward_hooks

    def other(model, batch):
        return lm_loss(model, batch)

    other = objective(counts=lm_loss.counts)(other)
    with pytest.raises(ValueError, match="neftune_noise_alpha=5 is for learning from texts"):
        trainer(loss=other, neftune_noise_alpha=5.0)


def test_a_metric_that_no_evaluation_has_is_found_before_the_first_step():
    here = trainer(metric_for_best_model="accuracy", eval_strategy="steps")
    with pytest.raises(ConfigError, match="'accuracy': must be one of loss, seconds, tokens"):
        here.train()
    assert here.state.step == 0 and not here.history


# --- optimizers against those of other libraries, and against plain arithmetic

SHAPES = ((5, 7), (7, 5), (3, 4, 6), (4,), (1, 1))


def trained(make, shapes=SHAPES, steps=4, scale=1.0):
    "Parameters after a few steps with the same gradients."
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    optimizer = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = scale * torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in params]


def alike(ours, theirs, rtol=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("scale", [0.01, 30.0])
@pytest.mark.parametrize("knobs", [{}, dict(decay_rate=-0.5, clip_threshold=0.3, eps=1e-3)])
def test_adafactor_is_transformers(scale, knobs):
    from transformers.optimization import Adafactor as Theirs

    eps = knobs.get("eps", 1e-30)
    theirs = dict(knobs, lr=0.1, weight_decay=0.2, eps=(eps, 1e-3))
    theirs |= dict(scale_parameter=False, relative_step=False)
    alike(
        trained(lambda params: Adafactor(params, 0.1, weight_decay=0.2, **knobs), scale=scale),
        trained(lambda params: Theirs(params, **theirs), scale=scale),
    )
    state = Adafactor([torch.zeros(3, 4, 6)])
    shapes = dict(exp_avg_sq_row=(3, 4), exp_avg_sq_col=(3, 6), exp_avg_sq=(3, 4, 6))
    for name, shape in shapes.items():
        assert state.state_shape(name, torch.zeros(3, 4, 6)) == shape


def test_lion_by_hand():
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(s, generator=generator) for s in SHAPES]
    means = [torch.zeros(s) for s in SHAPES]
    for _ in range(4):
        for p, mean in zip(params, means, strict=True):
            grad = torch.randn(p.shape, generator=generator)
            p *= 1 - 0.1 * 0.2
            p -= 0.1 * torch.sign(0.8 * mean + 0.2 * grad)
            mean.copy_(0.7 * mean + 0.3 * grad)
    alike(trained(lambda params: Lion(params, 0.1, (0.8, 0.7), 0.2)), params)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(adjust, nesterov):
    shapes = ((5, 7), (7, 5), (6, 6))
    ours = dict(nesterov=nesterov, adjust_lr_fn=adjust, ns_dtype=torch.bfloat16, momentum=0.8)
    theirs = dict(nesterov=nesterov, adjust_lr_fn=adjust, momentum=0.8)
    alike(
        trained(lambda params: Muon(params, 0.1, 0.2, **ours), shapes),
        trained(lambda params: torch.optim.Muon(params, 0.1, 0.2, **theirs), shapes),
        rtol=0.05,
    )
    matrix = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    for x in (matrix, matrix.T):
        left, sizes, right = torch.linalg.svd(x / x.norm(), full_matrices=False)
        for _ in range(3):
            sizes = 3.4445 * sizes - 4.775 * sizes**3 + 2.0315 * sizes**5
        assert torch.allclose(newton_schulz(x, 3), left @ sizes.diag() @ right, atol=1e-5)


@pytest.mark.parametrize("knobs", [dict(weight_decay=0.0), dict(weight_decay=0.1), dict(eps=0.1)])
def test_small_parameters_in_8_bits_take_adamw_s_steps(knobs):
    options = dict(lr=0.1, betas=(0.8, 0.9), **knobs)
    shapes = (*SHAPES, (4095,))
    alike(
        trained(lambda params: AdamW8bit(params, **options), shapes),
        trained(lambda params: torch.optim.AdamW(params, **options), shapes),
    )
    for size, dtype in ((4095, torch.float32), (4096, torch.uint8)):
        assert AdamW8bit([p := torch.zeros(size)])._start(p)["state1"].dtype == dtype


def test_the_code_of_8_bits_is_that_of_bitsandbytes():
    from bitsandbytes.functional import create_dynamic_map

    for signed in (True, False):
        code = dynamic_code(signed)
        assert torch.allclose(code, create_dynamic_map(signed).float(), atol=1e-7)
        lookup, numbers = optim._nearest(signed, torch.device("cpu"))
        grid = torch.arange(2**16).double() / 32767.5 - 1
        far = (numbers.double()[lookup.long()] - grid).abs()
        nearest = torch.cat([(grid[:, None] - code.double()).abs().amin(1)])
        assert torch.allclose(far, nearest, atol=1e-6)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 900])
@pytest.mark.parametrize("signed", [True, False])
def test_the_loops_for_8_bits_give_the_same_bytes(size, signed):
    "Run by Python, where numpy sees an index outside; with a block of zeros, and a tiny one."
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator) * torch.logspace(-6, 3, size)
    x = x if signed else x.abs()
    x[256:512] *= 1e-36
    x[512:768] = 0
    codes, again = torch.zeros(2, size, dtype=torch.uint8)
    absmax, found = torch.zeros(2, -(-size // 256))
    quantize_blocks(x.clone(), signed, codes, absmax)
    lookup, numbers = optim._nearest(signed, torch.device("cpu"))
    bits = (t.view(torch.int32).numpy() for t in (x, found))
    with np.errstate(all="ignore"):
        optim.pack_state(x.numpy(), found.numpy(), *bits, lookup.numpy(), again.numpy())
    assert torch.equal(found, absmax)
    assert torch.equal(absmax, torch.stack([part.abs().max() for part in x.split(256)]))
    plain, loop = torch.zeros(2, size)
    optim.dequantize_blocks(codes, absmax, signed, plain)
    optim.unpack_state(codes.numpy(), absmax.numpy(), numbers.numpy(), loop.numpy())
    assert torch.equal(plain, loop)
    scales = absmax.repeat_interleave(256)[:size]
    assert ((plain - x).abs() <= 0.013 * scales + 1e-38).all()
    tiny = scales < 3e-39
    assert torch.equal(codes[~tiny], again[~tiny])
    assert (codes[scales == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_8_bits_by_hand(dtype, monkeypatch):
    "Its numbers are those of the bytes; in pieces of two blocks, also of a matrix that is turned."
    monkeypatch.setattr(optim, "UPDATE_CHUNK", 512)
    size, rate, eps, decay, (beta1, beta2) = 4096 + 64, 0.1, 1e-3, 0.2, (0.8, 0.9)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(size, generator=generator).to(dtype)
    turned = nn.Parameter(weights.view(-1, 64).clone().T)
    optimizer = AdamW8bit([turned], rate, (beta1, beta2), eps, decay, backend="python")
    w = turned.detach().reshape(-1).float().clone()
    means = []
    for signed in (True, False):
        codes = torch.zeros(size, dtype=torch.uint8)
        means.append((signed, codes, torch.zeros(-(-size // 256))))
    for step in (1, 2, 3):
        grad = torch.randn(size, generator=generator).to(dtype)
        turned.grad = grad.view(turned.shape)
        optimizer.step()
        g, values = grad.float(), []
        for beta, value, (signed, codes, absmax) in zip(
            (beta1, beta2), (g, g * g), means, strict=True
        ):
            old = dynamic_code(signed)[codes.long()] * absmax.repeat_interleave(256)[:size]
            values.append(beta * old + (1 - beta) * value)
            quantize_blocks(values[-1].clone(), signed, codes, absmax)
        m, v = values
        bottom = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
        w = w * (1 - rate * decay) - rate / (1 - beta1**step) * m / bottom
        w = w.to(dtype).float()
        assert torch.allclose(turned.detach().reshape(-1).float(), w, rtol=0.01, atol=1e-4)
    assert optimizer.state[turned]["absmax1"].shape == (17,)
    assert optimizer.state_shape("absmax1", turned) == (17,)


@pytest.mark.parametrize(
    "knobs, total, steps",
    [
        (dict(warmup_steps=0, warmup_ratio=0.1), 25, 3),
        (dict(warmup_steps=0.2, warmup_ratio=0.1), 21, 5),
        (dict(warmup_steps=1), 21, 1),
        (dict(warmup_steps=7, warmup_ratio=0.5), 21, 7),
        (dict(warmup_steps=7, lr_scheduler_type="constant"), 21, 0),
        (dict(warmup_steps=7, lr_scheduler_type="constant_with_warmup"), 21, 7),
    ],
)
def test_the_steps_of_the_warm_up(knobs, total, steps):
    assert optim.warmup_steps(OptimConfig(**knobs), total) == steps


def test_a_warm_up_that_fills_the_run_is_said():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    for total, warned in ((1, False), (2, True), (3, True), (4, False)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            make_schedule(optimizer, OptimConfig(warmup_steps=3), total)
        assert any("fills the whole run" in str(w.message) for w in said) == warned
    with pytest.raises(ValueError, match="total_steps = 0: a run has at least 1 step"):
        make_schedule(optimizer, OptimConfig(), 0)


def test_a_rule_for_nothing_names_what_there_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 5))
    with pytest.raises(ValueError, match="name with 'x'; there are .*, .*, .* and 2 more$"):
        make_optimizer(model, OptimConfig(lr_factors={"x": 2.0}))
    groups = param_groups(model, 0.5, {"0": 2.0}, {"2": 0.1}, scale=lambda name: 4.0)
    found = {name: (g["lr_factor"], g["weight_decay"]) for g in groups for name, _ in g["params"]}
    assert found == {
        "0.weight": (8.0, 0.125),
        "0.bias": (8.0, 0.0),
        "1.weight": (4.0, 0.125),
        "2.weight": (4.0, 0.025),
        "2.bias": (4.0, 0.025),
    }


def test_an_evaluation_is_the_mean_over_everything():
    "Of each term and metric over its own items, whatever a batch has of them."

    def sums(model, batch):
        a, b = batch["a"], batch["b"]
        terms = dict(first=(sum(a), len(a), 2.0), second=(sum(b), len(b), 0.5))
        return Loss(terms, dict(largest=(max(a), 1), none=(0.0, 0), length=(10 * len(a), len(a))))

    batches = [dict(a=[1.0, 2.0, 6.0], b=[4.0]), dict(a=[5.0], b=[1.0, 2.0]), dict(a=[9.0], b=[])]
    found = eval_loss(make("own"), sums, batches, make_accelerator("no"))
    assert math.isnan(found.pop("none"))
    assert found == pytest.approx(
        dict(
            loss=2 * 23 / 5 + 0.5 * 7 / 3,
            tokens=5,
            first=23 / 5,
            second=7 / 3,
            largest=20 / 3,
            length=10,
        )
    )
    alone = eval_loss(make("own"), sums, [batches[2]], make_accelerator("no"))
    assert (alone["loss"], alone["tokens"]) == (18, 1) and math.isnan(alone["second"])


@pytest.mark.parametrize("scaled", [False, True])
def test_noise_of_embeddings_has_its_bounds(scaled):
    "Uniform up to alpha / root(tokens times width), before Gemma's scale; none in evaluation."
    model = Own()
    embedding = model.embed
    model.get_input_embeddings = lambda: embedding
    model.config = SimpleNamespace(scale_embeddings=scaled)
    ids = torch.randint(97, (40, 25))
    plain = embedding(ids).detach()
    with noisy_embeddings(model, 5.0):
        noise = embedding(ids).detach() - plain
        with torch.no_grad():
            assert torch.equal(embedding(ids), plain)
        embedding.eval()
        assert torch.equal(embedding(ids), plain)
        embedding.train()
    most = 5 / (25 * 16) ** 0.5 / (4 if scaled else 1)
    assert (
        0.99 * most < noise.max() <= most * 1.0001 and -most * 1.0001 <= noise.min() < -0.99 * most
    )
    assert abs(float(noise.mean())) < 0.02 * most and torch.equal(embedding(ids), plain)
    with noisy_embeddings(nn.Linear(1, 1), None):
        pass
    with pytest.raises(ValueError, match="neftune_noise_alpha = 5: Linear has no get_input"):
        with noisy_embeddings(nn.Linear(1, 1), 5.0):
            pass


def test_a_z_loss_of_a_model_that_returns_logits_alone():
    "Its own labels are moved by one, and 0.5·(log Z)² is added where there is a label."

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 7)

        def forward(self, input_ids):
            return self.table(input_ids)

    model, ids = Logits(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    labels = torch.tensor([[1, -100, 3], [4, 5, 6]])
    logits = model(torch.tensor([2, 4, 5]))
    entropy = nn.functional.cross_entropy(logits, torch.tensor([3, 5, 6]), reduction="sum")
    squares = logits.logsumexp(-1).square().sum()
    batch = dict(input_ids=ids, labels=labels)
    found = sum_losses(model, batch, 0.5)
    assert torch.allclose(found[0], entropy + 0.5 * squares) and torch.allclose(found[1], squares)
    assert torch.allclose(sum_losses(model, batch)[0], entropy)
    terms = lm_objective(0.5)(model, batch).terms
    assert float(terms["cross_entropy"][0]) == pytest.approx(float(entropy), rel=1e-5)
    assert float(terms["z_loss"][0]) == pytest.approx(float(squares), rel=1e-5)
    assert [(int(n), w) for _, n, w in terms.values()] == [(3, 1.0), (3, 0.5)]


class TwoProcesses(SimpleNamespace):
    "What a loop asks of accelerate; the other process has the same numbers."

    device = torch.device("cpu")
    num_processes = 2
    gradient_accumulation_steps = 1
    scaler = None
    mixed_precision = "no"

    def reduce(self, x, how):
        return 2 * x

    def autocast(self):
        return nullcontext()

    def no_sync(self, model):
        return nullcontext()

    def backward(self, loss):
        loss.backward()


def test_processes_ask_each_other_about_once_a_second(monkeypatch):
    """Ten steps in five seconds are two a second: they ask again two steps later.

    After at least one step, and at most `logging_steps` steps.
    """
    monkeypatch.setattr(time, "monotonic", lambda: 105.0)
    for seconds, step, wanted in ((5, 10, 12), (50, 10, 11), (0.1, 10, 17), (5, 4, 5)):
        loop = SimpleNamespace(
            state=SimpleNamespace(step=step),
            accelerator=TwoProcesses(),
            config=SimpleNamespace(logging_steps=7),
            next_look=step,
            last_look=105.0 - seconds,
            looked_at=0,
        )
        assert Trainer._all_stop(loop, True) and loop.next_look == wanted
        assert (loop.last_look, loop.looked_at) == (105.0, step)
        assert not Trainer._all_stop(loop, True), "it is not asked again yet"
        loop.state.step = loop.next_look
        assert not Trainer._all_stop(loop, False)


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("step", [3, 4])
def test_what_is_unsaved_is_known_to_the_process_that_saves(main, step):
    accelerator = TwoProcesses(is_main_process=main)
    loop = SimpleNamespace(
        checkpoint="run/checkpoints/checkpoint-3",
        accelerator=accelerator,
        state=SimpleNamespace(step=step),
    )
    assert Trainer._unsaved(loop) is (main and step == 4)


def test_a_process_without_a_batch_joins_in_with_zeros():
    "One batch for two processes: the second computes it, too, and its gradient counts nothing."
    model = nn.Linear(2, 1, bias=False)

    def objective(model, batch):
        return Loss({"loss": (model(batch["x"]).sum(), torch.tensor(4), 1.0)})

    objective.additive = True
    objective.counts = lambda batch: {"loss": 4}
    batch = dict(x=torch.ones(4, 2))
    for rank, gradient in ((0, 2.0), (1, 0.0)):  # Twice the gradient, since both are averaged
        model.zero_grad()
        loss, _ = accumulate(model, objective, [batch], TwoProcesses(process_index=rank))
        assert model.weight.grad.tolist() == [[gradient, gradient]]
        assert float(loss) == pytest.approx(float(model.weight.sum()) * (1 - rank))


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no such signals")
def test_a_signal_within_a_block_is_handled_after_it():
    from trainkit.train.trainer import defer_signals

    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        with defer_signals(signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
            assert not came
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_schedule_is_shown_with_both_rates(tmp_path):
    "0.1·0.5 at this step, and 0.02 in the checkpoint."
    schedule = SimpleNamespace(
        base_lrs=[0.1], lr_lambdas=[lambda step: 0.5], last_epoch=3, get_last_lr=lambda: [0.02]
    )
    with pytest.raises(ValueError, match="rate 0.02 at step 3, and this schedule 0.05: "):
        Trainer._check_rate(SimpleNamespace(schedule=schedule), tmp_path)


def test_groups_are_shown_with_the_ends_of_their_names():
    weights = [nn.Parameter(torch.zeros(3, 2)) for _ in range(5)]
    groups = [
        dict(params=weights[:2], param_names=["a", "b"], weight_decay=0.1),
        dict(params=weights[2:], param_names=["c", "d", "e"], lr=0.5),
    ]
    first, second = optim.show_groups(torch.optim.SGD(groups, lr=0.25)).splitlines()
    assert first.split() == "SGD 2 parameters 12 numbers rate 0.25 decay 0.1 a, b".split()
    assert second.split() == "SGD 3 parameters 18 numbers rate 0.5 decay 0 c, d, … e".split()


@pytest.mark.parametrize("strategy", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("knobs", [dict(on_nan="skip"), dict(torch_compile=True), {}])
def test_what_a_model_in_parts_cannot_be_trained_with(strategy, knobs, monkeypatch):
    from trainkit.train import trainer

    monkeypatch.setattr(trainer, "launched", lambda: True)
    monkeypatch.setattr(trainer, "shard", lambda *_: SimpleNamespace(strategy=strategy))
    config = SimpleNamespace(**dict(on_nan="stop", torch_compile=False) | knobs)
    loop = SimpleNamespace(config=config, model=None, accelerator=None)
    words = next(iter(knobs), "")
    if not words or (words, strategy) == ("on_nan", "fsdp"):
        Trainer._place_model(loop)
        return
    with pytest.raises(ValueError, match=f"{words}=.* cannot be combined with {strategy}"):
        Trainer._place_model(loop)


def test_with_another_number_of_processes_each_draws_its_own_numbers(monkeypatch):
    "The second one begins with the seed 7 + 1 + 1000·3 after step 3."
    from trainkit.train import trainer

    seeds = []
    monkeypatch.setattr(trainer, "seed_everything", seeds.append)
    for rank, path in ((0, "checkpoint-3"), (1, "checkpoint-3"), (1, None)):
        loop = SimpleNamespace(
            check_resume=lambda resume, force, path=path: (path and Path(path), []),
            state=SimpleNamespace(step=3, best_step=None, pieces=1),
            accelerator=TwoProcesses(process_index=rank),
            config=SimpleNamespace(seed=7),
            cursor=None,
            folder=None,
            retry=SimpleNamespace(),
            _load=lambda path, force: dict(rng_states=[0]),
            _tidy=lambda path: None,
            _lasting_callbacks=dict,
            _move_later_checkpoints=lambda after: None,
        )
        Trainer.restore(loop, True)
    assert seeds == [3008]


@pytest.mark.parametrize(("best", "moved"), [(5, True), (2, False), (..., False)])
def test_the_best_model_of_an_abandoned_future_goes_with_it(best, moved, tmp_path, monkeypatch):
    from trainkit.train import trainer

    for name in ("checkpoints/checkpoint-5", "checkpoints/checkpoint-2", "best_model"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(trainer, "_best_step", lambda folder: best)
    said = []
    loop = SimpleNamespace(
        folder=tmp_path,
        accelerator=SimpleNamespace(is_main_process=True),
        state=SimpleNamespace(best_step=2),
        note=said.append,
    )
    Trainer._move_later_checkpoints(loop, after=3)
    aside = tmp_path / "checkpoints" / "abandoned-1"
    gone = ["best_model", "checkpoint-5"] if moved else ["checkpoint-5"]
    assert sorted(path.name for path in aside.iterdir()) == gone
    assert (tmp_path / "best_model").exists() is not moved
    assert said[0].startswith("checkpoint-5, best_model, from" if moved else "checkpoint-5, from")


def test_random_numbers_of_a_gpu_are_restored_with_the_others(monkeypatch):
    import random

    from trainkit.train.step import set_random_state

    restored = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = random.getstate(), torch.get_rng_state(), torch.ones(1)
    before = random.random(), torch.rand(1)
    set_random_state(state)
    assert (random.random(), torch.rand(1)) == before and restored == [state[2]]


def test_what_is_logged_is_of_the_time_since_the_last_record(monkeypatch):
    "600 tokens in 5 seconds, 2 of them waiting for data; the means of two losses and of a metric."
    from trainkit.train import trainer

    monkeypatch.setattr(trainer.time, "monotonic", lambda: 105.0)
    told, shown = [], []
    state = SimpleNamespace(
        step=4, tokens=1000, losses=[1.0, 2.0], loss=0.0, metrics={"a": [6.0, 3], "b": [1.0, 0]}
    )
    state.skipped = 1
    loop = SimpleNamespace(
        state=state,
        last_log=(100.0, 400),
        data_seconds=2.0,
        epoch=0.5,
        learning_rate=0.1,
        grad_norm=3.0,
        seconds=7.0,
        total_steps=8,
        bar=SimpleNamespace(
            clock=SimpleNamespace(eta=lambda steps: 10.0 * steps),
            update=lambda step, **numbers: shown.append((step, numbers)),
        ),
        notify=lambda event, **record: told.append((event, record)),
    )
    Trainer.log(loop)
    wanted = dict(step=4, epoch=0.5, loss=1.5, learning_rate=0.1, grad_norm=3.0, tokens=1000)
    wanted |= dict(tokens_per_second=120.0, seconds=7.0, eta_seconds=80.0, skipped_steps=1)
    assert told == [("on_log", {"a": 2.0, **wanted, "data_share": 0.4})]
    assert shown == [(4, {"loss": 1.5, "tokens/s": 120.0})]
    assert (loop.last_log, loop.data_seconds) == ((105.0, 1000), 0.0)
    assert (state.losses, state.metrics, state.loss) == ([], {}, 1.5)
    Trainer.log(loop)
    record = told[1][1]
    assert math.isnan(record["loss"]) and record["tokens_per_second"] == record["data_share"] == 0
    loop.last_log, loop.data_seconds = (104.0, 1000), 2.0
    Trainer.log(loop)
    assert told[2][1]["data_share"] == 1.0, "what was waited for before the last record, too"


def test_pauses_and_evaluations_are_timed(monkeypatch):
    "From 10 to 13 seconds: the last record is taken to be 3 seconds later."
    from trainkit.train import trainer

    clock = iter([10.0, 13.0, 20.0, 22.5])
    monkeypatch.setattr(trainer.time, "monotonic", lambda: next(clock))
    loop = SimpleNamespace(last_log=(100.0, 5))
    with Trainer.pause_clock(loop):
        pass
    assert loop.last_log == (103.0, 5)
    monkeypatch.setattr(trainer, "eval_loss", lambda *_: dict(loss=2.0, f1=0.5))
    loop = SimpleNamespace(
        eval_start=None,
        shards=None,
        model=nn.Linear(1, 1),
        accelerator=SimpleNamespace(device="cpu"),
        eval_batches=[],
        objective=None,
        state=SimpleNamespace(step=9),
        _eval_bar=nullcontext,
    )
    assert Trainer.evaluate(loop) == dict(step=9, eval_loss=2.0, eval_f1=0.5, eval_seconds=2.5)


@pytest.mark.parametrize("tasks", [("a", "b"), ("a", "a")])
def test_losses_of_tasks_are_means_over_their_own_items(tasks):
    "(6 + 2) / (3 + 1) and 9 / 3, each with half of a second term; together 17 / 7."

    def goal(model, batch):
        total, count = batch["numbers"].tolist()
        return Loss(
            {"loss": (total, count, 1.0), "other": (2 * total, count, 0.5)}, {"m": (total, 2)}
        )

    numbers = [(6.0, 3, tasks[0]), (2.0, 1, tasks[0]), (9.0, 3, tasks[1])]
    batches = [dict(numbers=torch.tensor([s, n]), task=task) for s, n, task in numbers]
    found = eval_loss(nn.Linear(1, 1), goal, batches, make_accelerator("no"))
    wanted = dict(loss=2 * 17 / 7, tokens=7, m=17 / 6, other=2 * 17 / 7)
    if tasks == ("a", "b"):
        wanted |= dict(a_loss=2 * 2.0, b_loss=2 * 3.0)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("method", "here"),
    [("compute_loss", "objective"), ("_log_metrics", "on_log"), ("custom_training_step", "Loss")],
)
def test_a_method_that_only_other_trainers_call_is_refused(method, here):
    with pytest.raises(TypeError, match=f"Mine.{method} would never be called.*{here}"):
        type("Mine", (Trainer,), {method: lambda self, *_: None})
    type("Mine", (Trainer,), {"log_samples": lambda self: [], "mine": lambda self: None})


@pytest.mark.parametrize(
    ("argument", "here"),
    [
        ("args", "config=TrainConfig"),
        ("train_dataset", "train_batches"),
        ("tokenizer", "save_model"),
    ],
)
def test_an_argument_of_another_trainer_is_named(argument, here):
    with pytest.raises(TypeError, match=f"Trainer has no '{argument}': here it is .*{here}"):
        Trainer(model=nn.Linear(2, 2), **{argument: 1})
    assert "train_batches: A list" in described(Trainer), "its parameters are still explained"


def test_the_loops_arguments_are_checked_where_they_enter():
    rows = [dict(input_ids=torch.arange(5), labels=torch.arange(5))] * 4
    model, batches = Own(), Batches([[1, 2, 3]] * 4, 2)
    plan = TrainConfig(max_steps=1, progress=False)

    class Data(torch.utils.data.Dataset):
        def __getitem__(self, i):
            return rows[i]

    for wrong, words in (
        (lambda: Trainer(model, own_loss, Data()), "a Data, whose items are rows"),
        (lambda: Trainer(model, "lm", batches), r"a str, and must be a function \(model, batch\)"),
        (
            lambda: Trainer(model, own_loss, batches, optim=torch.optim.SGD(model.parameters())),
            "build_optimizer=lambda",
        ),
        (
            lambda: Trainer(
                model, own_loss, batches, build_optimizer=torch.optim.SGD(model.parameters())
            ),
            r"a SGD: a function \(model, OptimConfig\)",
        ),
        (
            lambda: Trainer(model, own_loss, batches).train(resume_from_checkpoint=True),
            "Trainer.train has no 'resume_from_checkpoint': here it is resume=",
        ),
        (
            lambda: Trainer(
                model, lambda m, b: m(b["input_ids"]).mean(), batches, config=plan
            ).train(),
            "A mean over n items is",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            wrong()
    with pytest.raises(ValueError, match="eval_batches="):
        Trainer(model, own_loss, batches).evaluate()


def test_an_optimizer_of_another_model_is_refused_and_a_partial_one_reported():
    "An optimizer that was made before `add_lora`, or of a copy, would train nothing."
    model, plan = Own(), TrainConfig(max_steps=1, progress=False)

    def run(parameters):
        optimizer = torch.optim.SGD(parameters, 1e-2)
        batches = Batches([[1, 2, 3]] * 4, 2)
        return Trainer(
            model, own_loss, batches, config=plan, build_optimizer=lambda *_: optimizer
        ).train()

    with pytest.raises(ValueError, match="no parameter that trains here"):
        run(Own().parameters())
    assert "leaves out 5 of the 7" in run(model.head.parameters()).notes[0]


def test_a_loader_over_a_stream_has_no_length():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield dict(input_ids=torch.arange(5), labels=torch.arange(5))

    loader = torch.utils.data.DataLoader(Stream(), 2)
    plan = TrainConfig(max_steps=3, progress=False)
    assert Trainer(Own(), own_loss, loader, config=plan).train().steps == 3
    with pytest.raises(ConfigError, match="max_steps = -1: must be set"):
        Trainer(Own(), own_loss, loader)
    with pytest.raises(ValueError, match="DataLoader has no length"):
        Trainer(Own(), own_loss, loader, config=TrainConfig(max_steps=3, save_strategy="epoch"))
