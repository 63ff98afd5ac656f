"Plans name what is predicted, and a larger budget never needs more levers; runs record both."

import json
import sys
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from support.processes import call, in_child

from trainkit.memory import planner
from trainkit.memory.estimate import MemoryWatch, meta_copy
from trainkit.lora.inject import LoRAConfig
from trainkit.lora.inject import add_lora
from trainkit.memory.estimate import predict_memory
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import lm_loss
from trainkit.memory.planner import Setup, plan_memory, predict_setup
from trainkit.quant.quantize import QuantConfig, quantize_model
from trainkit.train.config import TrainConfig
from trainkit.train.trainer import Trainer

TINY = ModelConfig(vocab_size=300, d_model=64, n_heads=2, n_layers=1, d_ff=128, max_seq_len=128)


def test_plans_are_predictions_and_larger_budgets_need_no_more_levers(monkeypatch):
    known = cache(lambda setup: predict_setup(TINY, setup))  # The plans ask for the same ones
    monkeypatch.setattr(planner, "predict_setup", lambda model, setup: known(setup))
    start = Setup(6, 64)
    need = predict_setup(TINY, start).peak
    before = 0
    for share in (1, 0.6, 0.3):
        plan = plan_memory(TINY, share * need, start)
        assert (
            plan.fits
            and plan.peak <= share * need
            and plan.peak == predict_setup(TINY, plan.setup).peak
        )
        assert plan.setup.batch_size * plan.setup.accumulation == 6 and len(plan.levers) >= before
        before = len(plan.levers)
    assert before > 0


def test_a_budget_too_small_says_the_smallest_need():
    plan = plan_memory(TINY, "1 kB", Setup(1, 64), levers=["chunked loss"])
    assert not plan.fits and "the smallest need is" in str(plan)
    assert plan.peak == min(size for _, size in plan.waterfall)
    ax = plan.draw()
    (_, top), (_, bottom) = ax.transData.transform([(0, 0), (0, len(plan.waterfall))])
    one = (top - bottom) / len(plan.waterfall) * 72 / ax.figure.dpi
    assert one > 12, "a line of text and its bar need as many points"
    with pytest.raises(ValueError, match="no lever 'lora'"):
        plan_memory(TINY, 1, levers=["lora"])


@pytest.mark.parametrize(
    "setup",
    [
        Setup(4, 32, accumulation=2, mixed_precision="bf16"),
        Setup(1, 8, chunked_loss=True, checkpointing=True, optim="adamw_8bit"),
        Setup(2, 32, in_backward=True),
        Setup(4, 32, checkpointing=True, lora_rank=4, bits=4, new_tokens=True),
    ],
)
def test_a_deep_model_is_predicted_from_a_few_of_its_layers(setup, monkeypatch):
    deep = replace(TINY, n_layers=9, layer_windows=[16] * 9)
    whole = planner._predict(deep, setup)
    made = []
    make = planner.make_setup
    monkeypatch.setattr(planner, "_reports", {})
    monkeypatch.setattr(
        planner,
        "make_setup",
        lambda model, setup: made.append(model.n_layers) or make(model, setup),
    )
    report = predict_setup(deep, setup)
    assert made == [2, 3]
    assert (report.peak, report.parts) == (whole.peak, whole.parts)


def test_a_model_of_different_layers_is_predicted_as_a_whole():
    deep, lora = replace(TINY, n_layers=9), LoRAConfig(layers_to_transform=[0])
    assert planner._repeats(deep, Setup())
    assert not planner._repeats(replace(deep, layer_windows=[0, 16, *[0] * 7]), Setup())
    assert not planner._repeats(deep, Setup(lora_rank=4, lora=lora))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_setup_is_a_quantized_model(bits):
    lora = LoRAConfig(r=4, target_modules="q_proj")
    model = add_lora(quantize_model(Transformer(TINY), QuantConfig(bits=bits, threshold=0)), lora)
    setup = Setup(2, 64, chunked_loss=True, lora_rank=4, bits=bits, lora=lora)
    assert predict_setup(TINY, setup).parts == predict_memory(meta_copy(model), 2, 64).parts


def test_a_run_says_what_was_predicted_and_measured():
    ids = torch.zeros(4, 64, dtype=torch.long)
    watch, entries = MemoryWatch(64), {}

    class Log:
        def on_end(self, trainer, record):
            entries.update(record)

    Trainer(
        Transformer(TINY),
        lm_loss,
        [dict(input_ids=ids, labels=ids)] * 3,
        callbacks=[watch, Log()],
        config=TrainConfig(max_steps=3, progress=False, per_device_train_batch_size=4),
    ).train()
    assert watch.report.peak == predict_memory(lambda: Transformer(TINY), 4, 64).peak
    assert (
        entries["step_memory_predicted_gib"] * 2**30 == watch.report.resident >= watch.report.peak
    ), "a process holds more than tensors"
    assert entries[
        "step_memory_measured_gib"
    ] > 0 and "predicted for a step of 4 x 64 tokens" in str(watch)


def watched(folder):
    "A run in a process whose memory holds nothing yet that a step could take again."
    from trainkit.recipes.config import method_config
    from trainkit.recipes.runner import run

    run(
        method_config(
            {
                "name": "watched",
                "runs_dir": str(folder),
                "data": dict(path="stdlib", max_chars=40_000, max_length=64),
                "tokenizer": dict(vocab_size=320),
                "model": dict(d_model=384, n_heads=2, n_layers=4, d_ff=1024, max_seq_len=64),
                "sampling": dict(max_new_tokens=2),
                "train": dict(
                    max_steps=2, logging_steps=1, eval_strategy="no", sample_steps=0, progress=False
                ),
            }
        ),
        verbose=False,
    )


def saves_best(folder):
    "A run that evaluates, and saves its best model, between two steps."
    from trainkit.memory.estimate import MemoryWatch
    from trainkit.recipes.config import method_config
    from trainkit.recipes.runner import run
    from trainkit.system import malloc_used
    from trainkit.train.trainer import Trainer

    facts, save, start = {}, Trainer.save_model, MemoryWatch.on_start

    def on_start(self, trainer, record):
        start(self, trainer, record)
        facts.update(before=self.before, kernels=self.report.beside["kernels"])
        facts["products"] = len(self.report.products)

    def save_model(self, name, kind):
        modules, used = {*sys.modules}, malloc_used()
        save(self, name, kind)
        facts.setdefault("modules", sorted({*sys.modules} - modules))
        facts.setdefault("bytes", (malloc_used() or 0) - (used or 0))

    MemoryWatch.on_start, Trainer.save_model = on_start, save_model
    run(
        method_config(
            {
                "name": "best",
                "runs_dir": str(folder),
                "data": dict(path="stdlib", max_chars=200_000, max_length=64),
                "tokenizer": dict(vocab_size=320),
                "model": dict(d_model=128, n_heads=2, n_layers=1, d_ff=256, max_seq_len=64),
                "sampling": dict(max_new_tokens=2),
                "train": dict(
                    max_steps=2,
                    per_device_train_batch_size=8,
                    eval_strategy="steps",
                    eval_steps=1,
                    save_strategy="steps",
                    save_steps=2,
                    sample_steps=0,
                    progress=False,
                ),
            }
        ),
        verbose=False,
    )
    print(json.dumps(facts))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_a_model_saved_between_steps_loads_nothing_new(tmp_path):
    """What its first save imports is there before the level that steps are measured from.

    Else 12 MB of modules fill the free blocks of the heap, and the next step takes new ones.
    Products that only an evaluation has are predicted as well.
    """
    from trainkit.memory.estimate import product_memory

    done = in_child(saves_best, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert [m for m in facts["modules"] if "transformers" in m or "tokenizers" in m] == []
    assert facts["bytes"] < 3e6, facts["modules"]
    if size := product_memory():
        assert facts["kernels"] > facts["products"] * 0.9 * size


def test_the_record_of_a_run_holds_both(tmp_path):
    "`run` predicts before the first step and measures in it; the two are close for big tensors."
    from trainkit.train.runs import read_run

    done = in_child(watched, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    predicted, measured = "step_memory_predicted_gib", "step_memory_measured_gib"
    logs = [
        r
        for r in read_run(tmp_path / "watched").records
        if r.get("event") in (None, "log") and predicted in r
    ]
    assert (
        logs
        and {r[predicted] for r in logs} == {logs[0][predicted]}
        and "predicted for a step of " in (tmp_path / "watched" / "log.txt").read_text()
    )
    assert logs[0][predicted] * 2**30 > 16 * 7e6, "parameters, gradients and two states"
    if sys.platform == "linux":
        assert 0.5 < logs[-1][measured] / logs[-1][predicted] < 1.5
    asked = [
        "data.max_length=64",
        "tokenizer.vocab_size=320",
        "model.d_model=384",
        "model.n_heads=2",
        "model.n_layers=4",
        "model.d_ff=1024",
        "model.max_seq_len=64",
        "train.max_steps=2",
        "optim.optim=adamw_torch_fused",
    ]
    foretold = json.loads(call("memory", "predict", *asked, "--json", cwd=tmp_path).stdout)
    assert (
        foretold["resident"]
        == foretold["peak"] + sum(foretold["beside"].values())
        > foretold["peak"]
    )
    assert abs(foretold["resident"] - logs[0][predicted] * 2**30) < 0.08 * foretold["resident"], (
        "a shell says what the run says before its first step"
    )


def test_memory_in_a_shell(tmp_path):
    shape = [
        "model.vocab_size=300",
        "model.d_model=64",
        "model.n_heads=2",
        "model.n_layers=1",
        "model.d_ff=128",
        "model.max_seq_len=128",
        "optim.optim=adamw_torch_fused",
        "--max-length",
        "64",
        "--batch-size",
        "4",
    ]
    done = call("memory", "predict", *shape, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (
        report["peak"] == predict_setup(TINY, Setup(4, 64, chunked_loss=True)).peak
        and report["fits"]["T4"]
    ), done.stderr
    lines = call("memory", "predict", *shape, cwd=tmp_path).stdout
    assert (
        "On this CPU: " in lines
        and " of main memory, the tensors and " in lines
        and " for the copy that a checkpoint is written from" in lines
    )
    assert 0 <= report["beside"]["checkpoint"] - 3 * report["parts"]["parameters"] < 1000, (
        "weights, both states of AdamW and its counts of steps"
    )
    never = json.loads(
        call("memory", "predict", *shape, "train.async_save=false", "--json", cwd=tmp_path).stdout
    )
    assert never["beside"]["checkpoint"] == 0 and never["peak"] == report["peak"]
    with patch("trainkit.progress.Clock.elapsed", lambda clock: 1.0):
        half = f"{report['peak'] // 2} B"
        done = call("memory", "plan", *shape, "--budget", half, cwd=tmp_path)
    assert done.returncode == 0 and "train.per_device_train_batch_size=" in done.stdout, done.stderr
    assert "Planning" not in done.stderr
    with patch("trainkit.progress.Clock.elapsed", lambda clock: 10.0):  # It takes long
        done = call("memory", "plan", *shape, "--budget", "10 B", cwd=tmp_path)
    assert "Planning" in done.stderr and "trying as asked" in done.stderr
    done = call("memory", "plan", *shape, "--machine", "T5", cwd=tmp_path)
    assert (
        done.returncode == 1
        and "'T5' is no amount of memory" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize(
    "method, tied, chat",
    [
        ("lora", True, False),
        ("lora", False, False),
        ("freeze", False, False),
        ("dpo", False, False),
        ("lora", False, True),
    ],
)
def test_tokens_of_a_new_chat_format_are_counted(tmp_path, method, tied, chat):
    """Embedding and head are then trained whole, with gradients and states.

    A base that has the tokens already needs no more than before.
    """
    from trainkit.tokenizer.chat import set_template
    from trainkit.interop.hf import save_pretrained
    from trainkit.recipes.config import method_config
    from trainkit.recipes.memory_commands import read_setup
    from trainkit.memory.planner import make_setup
    from trainkit.recipes.runner import prepare
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    rows = [
        dict(
            prompt=f"Say {n}.",
            **(dict(chosen="yes", rejected="no") if method == "dpo" else dict(completion="yes")),
        )
        for n in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = BPETokenizer.train(
        [row["prompt"] + " yes no" for row in rows], 260, special_tokens=["<|endoftext|>"]
    )
    tokenizer.eos_token = "<|endoftext|>"
    if chat:
        set_template(tokenizer, "chatml")
    model = Transformer(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=32,
            n_heads=2,
            n_layers=2,
            d_ff=64,
            max_seq_len=64,
            tie_embeddings=tied,
        )
    )
    save_pretrained(model, tokenizer, tmp_path / "base")
    config = method_config(
        dict(
            method=method,
            init_from=str(tmp_path / "base"),
            data=dict(path=str(tmp_path / "rows.jsonl"), max_length=32),
            lora=dict(r=2),
            sft=dict(trainable_layers=1, **({} if chat else dict(template="chatml"))),
            **(dict(use_lora=True) if method == "dpo" else {}),
        )
    )
    needs = read_setup(config)
    counted = make_setup(needs.model, needs.setup)

    def learned(net):
        return {name: p.shape for name, p in net.named_parameters() if p.requires_grad}

    assert learned(counted) == learned(prepare(config).model)
    assert any("embed_tokens" in name for name in learned(counted)) != chat


def held_by_steps(folder):
    "Predicted and measured bytes of a run in a process of its own, and by what it is for."
    import json
    import sys

    from trainkit.memory.estimate import MemoryWatch
    from trainkit.train.config import TrainConfig
    from trainkit.train.trainer import Trainer

    torch.set_num_threads(1)
    shape = ModelConfig(
        vocab_size=4096, d_model=192, n_heads=6, n_layers=4, d_ff=512, max_seq_len=256
    )
    ids = torch.randint(4096, (16, 256), generator=torch.Generator().manual_seed(0))
    watch = MemoryWatch(256)
    config = TrainConfig(max_steps=4, progress=False, per_device_train_batch_size=16)
    Trainer(
        Transformer(shape),
        lm_loss,
        [dict(input_ids=ids, labels=ids)] * 4,
        callbacks=[watch],
        config=config,
    ).train()
    print(
        json.dumps(
            dict(
                predicted=watch.predicted,
                measured=watch.measured,
                peak=watch.report.peak,
                beside=watch.report.beside,
            )
        )
    )
    sys.stdout.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_a_step_on_a_cpu_takes_what_was_predicted(tmp_path):
    "The tensors alone are two thirds of it; with what malloc keeps it is right."
    done = in_child(held_by_steps, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    # 3 % by the mean of many runs; equal runs of it differ by 5 %, and predictions by 2 %
    assert abs(report["predicted"] - report["measured"]) < 0.12 * report["measured"], report
    assert report["peak"] < 0.85 * report["measured"], "the tensors alone"
    assert report["beside"]["allocator"] > 0.1 * report["peak"] and "libraries" in report["beside"]


@pytest.mark.parametrize("kind", ["pairs", "kto", "masked", "grpo", "ppo"])
def test_a_step_of_every_objective_is_predicted(kind):
    """The peak of a real step with pairs, thumbs, masked answers and rollouts is predicted.

    Shapes that depend on data are taken from a batch.
    """
    from trainkit.data.dataloader import Batches
    from trainkit.align.dpo import dpo_objective
    from trainkit.memory.estimate import MemoryWatch, predict_run
    from trainkit.align.dpo import DPOConfig
    from trainkit.align.preference_data import PairBatches
    from trainkit.train.config import TrainConfig
    from trainkit.align.policy import ActorCritic
    from trainkit.align.reference import make_reference
    from trainkit.align.rl import RLConfig, rl_objective
    from trainkit.align.rollouts import Rollouts
    from trainkit.train.trainer import Trainer
    from trainkit.align.kto import UnpairedBatches, kto_objective

    model, objective = Transformer(TINY), lm_loss
    pair = dict(prompt=[1, 2, 3], chosen=[4, 5, 6, 7], rejected=[8, 9])
    if kind == "pairs":
        batches, objective = (
            PairBatches([pair] * 8, 4),
            dpo_objective(make_reference(model), DPOConfig()),
        )
    elif kind == "kto":
        rows = [
            dict(prompt=[1, 2], completion=[3, 4, 5], labels=[3, 4, 5], label=i % 2 == 0, length=5)
            for i in range(8)
        ]
        batches, objective = (
            UnpairedBatches(rows, 4),
            kto_objective(make_reference(model), DPOConfig(loss_type=["kto"])),
        )
    elif kind == "masked":
        batches = Batches([dict(input_ids=[1, 2, 3, 4, 5], labels=[-100, -100, 3, 4, 5])] * 8, 4)
    else:
        config = RLConfig(
            method=kind, num_prompts=2, num_generations=4, max_completion_length=6, rewards=[]
        )
        model = ActorCritic(model) if kind == "ppo" else model
        batches = Rollouts(
            model,
            None,
            [[1, 2, 3], [4, 5]],
            lambda completions, **_: [float(c[0]) for c in completions],
            config,
            4,
        )
        objective = rl_objective(config)
    watch = MemoryWatch()
    trainer = Trainer(
        model,
        objective,
        batches,
        callbacks=[watch],
        config=TrainConfig(max_steps=2, progress=False, per_device_train_batch_size=4),
    )
    trainer.train()
    assert watch.predicted and not watch.why, watch.why
    assert predict_run(trainer, batch=batches.largest()).peak >= 16 * sum(
        p.numel() for p in model.parameters()
    )
    assert "predicted for a step of " in str(watch) and "not predicted" not in str(watch)


@pytest.mark.parametrize("rows", [9, 100_000, 10**6])
def test_a_batch_that_cannot_fit_is_refused_before_the_first_step(rows, monkeypatch):
    "The error names the knob, and predicts without all of its rows; `free` alone is a note."
    from trainkit.data.dataloader import Batches
    from trainkit.memory import estimate

    # Above the tensors of the small step, and below what a process takes for it
    total = {9: 5 * 2**20, 100_000: 2**33, 10**6: 2**33}[rows]
    messages, asked = [], []
    texts = [dict(input_ids=[5] * 64, labels=[5] * 64)]
    batches = Batches(texts * 9, 9) if rows == 9 else Batches(Many(rows), rows, shuffle=False)
    trainer = Trainer(
        Transformer(TINY),
        lm_loss,
        batches,
        config=TrainConfig(max_steps=2, progress=False, per_device_train_batch_size=rows),
    )
    predict = estimate.predict_run
    monkeypatch.setattr(
        estimate,
        "predict_run",
        lambda trainer, rows=1, tokens=2, *args, **more: (
            asked.append(rows),
            predict(trainer, rows, tokens, *args, **more),
        )[1],
    )
    monkeypatch.setattr(estimate, "available_memory", lambda: (total, total))
    trainer.callbacks.append(MemoryWatch(64, messages.append))
    with pytest.raises(
        MemoryError,
        match=(
            "needs .*, as predicted, and this machine has .*per_device_train_batch_size = "
            ".*watch_memory"
        ),
    ):
        trainer.train()
    assert trainer.state.step == 0 and max(asked) <= 2048
    monkeypatch.setattr(estimate, "available_memory", lambda: (2**60, 0))
    if rows == 9:
        trainer.train()
        assert "are free on this machine" in messages[0] and trainer.state.step == 2


class Many:
    "Rows of a file: none of them is in memory."

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        return dict(input_ids=[5] * 64, labels=[5] * 64)


def test_batches_of_other_sizes_leave_gaps_that_a_step_of_several_is_predicted_with():
    """With pairs of several widths in a step, the peak is that of the largest batch.

    Tensors and products are, too, and no batch is drawn before the run.
    """
    from trainkit.align.dpo import DPOConfig, dpo_objective
    from trainkit.align.preference_data import PairBatches
    from trainkit.align.reference import make_reference
    from trainkit.memory.estimate import OTHERS, _others, computed_tokens, predict_run

    pairs = [dict(prompt=[1, 2, 3], chosen=[4] * n, rejected=[8, 9]) for n in range(2, 34)]
    model, peaks = Transformer(TINY), {}
    for count in (1, 8):
        batches = PairBatches(pairs, 2)
        plan, trainer = (
            batches._plan,
            Trainer(
                model,
                dpo_objective(make_reference(model), DPOConfig()),
                batches,
                config=TrainConfig(max_steps=4, gradient_accumulation_steps=count, progress=False),
            ),
        )
        others = _others(trainer, batches.largest())
        assert batches._plan is plan and len(others) == (0 if count == 1 else OTHERS)
        peaks[count] = predict_run(trainer, batch=batches.largest())
        tensors = predict_run(trainer, batch=batches.largest(), resident=False)
        assert (peaks[count].peak, peaks[count].parts, peaks[count].products) == (
            tensors.peak,
            tensors.parts,
            tensors.products,
        )
    assert not _others(trainer, None)
    trainer.config.gradient_accumulation_steps = 1
    trainer.total_steps = 24  # A step for each of its first batches, where there are enough steps
    others = _others(trainer, batches.largest())
    assert batches._plan is plan and len({*map(computed_tokens, others)}) == len(others) == 3


def test_the_largest_batch_of_pairs_is_the_one_with_the_most_tokens():
    """Pairs are computed without padding: one long answer among short ones is a small batch.

    The batch that is predicted at the end of a run came in it, and no other took more memory."""
    from trainkit.align.dpo import DPOConfig, dpo_objective
    from trainkit.align.preference_data import collate_pairs
    from trainkit.align.reference import make_reference
    from trainkit.memory.estimate import batch_size, computed_tokens

    long = dict(prompt=[1] * 8, chosen=[4] * 24, rejected=[5] * 24)
    short = dict(prompt=[1] * 8, chosen=[4], rejected=[5, 6])
    wide, full = [dict(long, chosen=[4] * 30), short, short, short], [long] * 4
    batches = [collate_pairs(rows) for rows in (wide, full)]
    sizes = [(batch_size(batch), computed_tokens(batch)) for batch in batches]
    assert sizes == [((4, 62), 62 + 3 * 11), ((4, 56), 4 * 56)]
    plain = dict(input_ids=torch.ones(3, 5, dtype=torch.long))
    assert computed_tokens(plain) == 15
    watch, model = MemoryWatch(), Transformer(TINY)
    Trainer(
        model,
        dpo_objective(make_reference(model), DPOConfig()),
        batches,
        callbacks=[watch],
        config=TrainConfig(max_steps=2, progress=False),
    ).train()
    assert watch.largest == (4, 56) and watch.known.keys() == {(4, 56, 224)}


@pytest.mark.parametrize("method", ["pretrain", "sft", "dpo", "reward", "kto", "grpo"])
def test_a_plan_as_knobs_is_read_back_as_the_same_setup(method):
    "A batch that is halved and stays larger than 1 is halved in the config too."
    from dataclasses import replace

    from trainkit.recipes.config import method_config
    from trainkit.recipes.memory_commands import plan_knobs, read_setup

    shape = dict(d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=64)
    train = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2)
    known = dict(method=method, model=shape, data=dict(max_length=64), train=train)
    config = method_config(known)
    old = read_setup(config).setup
    assert plan_knobs(planner.Plan(1, old, 1, []), config) == {}
    new = replace(
        old,
        batch_size=old.batch_size // 2,
        accumulation=4,
        mixed_precision="bf16",
        checkpointing=True,
        optim="adamw_8bit",
        offload=True,
        seq_len=32,
    )
    knobs = plan_knobs(planner.Plan(1, new, 1, []), config)
    assert knobs["train.per_device_train_batch_size"] == 4
    changed = method_config(known, [f"{k}={json.dumps(v)}" for k, v in knobs.items()])
    assert read_setup(changed).setup == new


@pytest.mark.parametrize(
    "predicted, measured, largest, why, line",
    [
        (2e9, 1.5e9, (4, 64), "", "2 GB predicted for a step of 4 x 64 tokens, 1.5 GB measured"),
        (2e9, None, (0, 0), "", "2 GB predicted for a step, unknown measured"),
        (None, 1.5e9, (0, 0), "", "1.5 GB measured for a step; not predicted"),
        (
            None,
            None,
            (4, 64),
            "x",
            "unknown measured for a step of 4 x 64 tokens; not predicted: x",
        ),
    ],
)
def test_the_line_of_a_watch_has_what_is_known(predicted, measured, largest, why, line):
    watch = MemoryWatch()
    watch.predicted, watch.measured, watch.largest, watch.why = predicted, measured, largest, why
    assert str(watch) == f"Memory     {line}"
