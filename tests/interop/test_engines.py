"The same run by two engines: with equal rows, order and start, TRL's losses are ours."

import copy
import json
import re
import warnings

import numpy as np
import pytest
import torch
import transformers
from support.processes import call, shell
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trainkit.data.dataloader import Batches
from trainkit.align.dpo import DPOConfig, dpo_objective
from trainkit.lora.inject import LoRAConfig
from trainkit.lora.inject import add_lora
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import lm_loss
from trainkit.train.optim import OptimConfig
from trainkit.train.config import Control, TrainConfig
from trainkit.align.preference_data import PairBatches
from trainkit.quant.quantize import QuantConfig, quantize_model
from trainkit.align.reference import make_reference
from trainkit.align.reward_model import RewardModel, reward_objective
from trainkit.align.rl import RLConfig
from trainkit.train.trainer import Trainer

warnings.filterwarnings("ignore")
pytest.importorskip("trl"), pytest.importorskip("peft")
WORDS = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")),
    pad_token="t0",
    eos_token="t1",
)


def small(**knobs):
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(
            **{
                "vocab_size": 96,
                "d_model": 64,
                "n_heads": 4,
                "n_kv_heads": 2,
                "n_layers": 2,
                "d_ff": 128,
                "max_seq_len": 64,
                **knobs,
            }
        )
    )


def some_rows(n=30):
    rng, out = np.random.default_rng(0), []
    for length in rng.integers(6, 24, n):
        ids = rng.integers(2, 96, length)
        out.append(dict(input_ids=ids, labels=np.where(np.arange(length) < 3, -100, ids)))
    return out


def some_pairs(n=20):
    rng = np.random.default_rng(0)

    def draw(low, high):
        return [*rng.integers(3, 96, int(rng.integers(low, high))).tolist(), 1]

    return [
        {**p, "length": sum(map(len, p.values()))}
        for p in (
            dict(prompt=draw(3, 14), chosen=draw(2, 9), rejected=draw(2, 9)) for _ in range(n)
        )
    ]


def both(model, objective, batches, steps=20, kind="sft", settings=None, optim=None, **more):
    "Histories of our loop and of TRL's, from the same start; and the two trained models."
    from trainkit.interop.trl import TRLTrainer

    histories, models = [], (copy.deepcopy(model), copy.deepcopy(model))
    for engine, net in zip((Trainer, TRLTrainer), models, strict=True):
        extra = {} if engine is Trainer else dict(kind=kind, settings=settings, tokenizer=WORDS)
        config = TrainConfig(
            **{
                "max_steps": steps,
                "logging_steps": 1,
                "progress": False,
                "mixed_precision": "no",
                **more,
            }
        )
        optim = optim or OptimConfig(
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=3,
            weight_decay=0.1,
            optim="adamw_torch",
        )
        histories.append(
            engine(net, objective(net), batches(), config=config, optim=optim, **extra)
            .train()
            .history
        )
    return *histories, *models


def agree(ours, theirs, tolerance=1e-4):
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=tolerance), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3, abs=1e-4), (a, b)
        assert b["learning_rate"] == a["learning_rate"] and b["epoch"] == pytest.approx(a["epoch"])
    assert (
        len({round(a["loss"], 3) for a in ours}) > len(ours) / 2
    )  # it is no flat line that agrees


def same_weights(a, b, tolerance=2e-4):
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.allclose(x, y, atol=tolerance), name


SFT = dict(objective=lambda net: lm_loss, batches=lambda: Batches(some_rows(), 4, seed=3))
DPO = dict(batches=lambda: PairBatches(some_pairs(), 4, seed=3), kind="dpo")


QUICK_AND_WHOLE = pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])


@pytest.mark.parametrize(
    "more",
    [
        dict(steps=6),
        pytest.param(
            dict(gradient_accumulation_steps=3, max_grad_norm=0.5), marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "accumulated"],
)
def test_sft_of_the_whole_model(more):
    ours, theirs, a, b = both(small(), **SFT, **more)
    agree(ours, theirs), same_weights(a, b)
    assert [r["tokens"] for r in ours] == [r["tokens"] for r in theirs]


@pytest.mark.parametrize(
    "lora",
    [
        dict(r=4),
        dict(r=4, modules_to_save=["embed_tokens"]),  # whose head shares its weight
        pytest.param(
            dict(
                r=4,
                use_dora=True,
                use_rslora=True,
                modules_to_save=["norm"],
                rank_pattern={"q_proj": 2},
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "tied", "dora"],
)
def test_sft_of_an_adapter(lora):
    ours, theirs, a, b = both(add_lora(small(), LoRAConfig(**lora)), **SFT)
    agree(ours, theirs), same_weights(a, b)


@QUICK_AND_WHOLE
def test_dpo_of_an_adapter(steps):
    settings = DPOConfig(beta=0.2)
    ours, theirs, a, b = both(
        add_lora(small(), LoRAConfig(r=4)),
        lambda net: dpo_objective(make_reference(net), settings),
        steps=steps,
        settings=settings,
        **DPO,
        optim=OptimConfig(learning_rate=1e-2, lr_scheduler_type="constant", optim="adamw_torch")
        if steps == 6
        else None,
    )
    agree(ours, theirs), same_weights(a, b)
    assert ours[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    for name in ("chosen", "rejected", "margins"):
        assert [r[f"rewards/{name}"] for r in theirs] == pytest.approx(
            [r[f"rewards/{name}"] for r in ours], abs=1e-3
        )


@QUICK_AND_WHOLE
def test_a_reward_model(steps):
    ours, theirs, a, b = both(
        RewardModel(small()),
        lambda net: reward_objective(0.01),
        steps=steps,
        settings=0.01,
        kind="reward",
        batches=DPO["batches"],
    )
    agree(ours, theirs), same_weights(a, b)
    assert [r["rewards/margins"] for r in theirs] == pytest.approx(
        [r["rewards/margins"] for r in ours], abs=1e-3
    )


@pytest.mark.slow
def test_a_frozen_part_stays_frozen_and_muon_is_ours():
    net = small().requires_grad_(False)
    net.model.layers[1].requires_grad_(True)
    ours, theirs, a, b = both(
        net,
        **SFT,
        steps=6,
        optim=OptimConfig(learning_rate=1e-3, optim="muon", lr_scheduler_type="constant"),
    )
    agree(ours, theirs), same_weights(a, b)
    assert torch.equal(b.model.layers[0].mlp.up_proj.weight, net.model.layers[0].mlp.up_proj.weight)


def test_a_token_that_pads_learns_as_input():
    "If a tokenizer pads with the end-of-text token, transformers gives it no gradient."
    from trainkit.interop.hf_bridge import to_peft_model

    ids = torch.tensor([[5, 7, 8, 7]])
    net = small()
    grads = []
    for model in (
        copy.deepcopy(net),
        to_peft_model(copy.deepcopy(net), eos_token_id=7, pad_token_id=7),
    ):
        model(ids).logits.square().mean().backward()
        grads.append(model.get_input_embeddings().weight.grad)
    assert torch.allclose(*grads, atol=1e-5) and grads[1][7].norm() > 0


@pytest.mark.parametrize(
    "make",
    [
        small,
        lambda: add_lora(small(), LoRAConfig(r=4, use_dora=True, modules_to_save=["norm"])),
        lambda: RewardModel(small()),
    ],
    ids=["whole", "adapter", "reward"],
)
def test_the_weights_are_in_memory_once(make):
    from trainkit.interop.hf_bridge import to_peft_model

    net = make()
    before = copy.deepcopy(net.state_dict())
    twin = to_peft_model(net, pad_token_id=0)
    assert {p.data_ptr() for p in twin.parameters()} == {p.data_ptr() for p in net.parameters()}
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())
    assert {p.dtype for p in twin.parameters()} == {torch.float32}


def test_a_reference_is_no_twin_of_the_model():
    "It is frozen where the model began, though the twin's weights lie in the model's memory."
    from trainkit.interop.trl import TRLTrainer

    net, settings = small(), DPOConfig(beta=0.2)
    begun = copy.deepcopy(net.state_dict())
    trainer = TRLTrainer(
        net,
        dpo_objective(make_reference(net), settings),
        PairBatches(some_pairs(), 4),
        kind="dpo",
        settings=settings,
        tokenizer=WORDS,
        config=TrainConfig(max_steps=2, progress=False, mixed_precision="no"),
        optim=OptimConfig(learning_rate=1e-2),
    )
    seen = {}

    class Look:
        def on_step(self, trainer, record):
            seen.update(copy.deepcopy(trainer.theirs.ref_model.state_dict()))

    trainer.callbacks.append(Look())
    trainer.train()
    assert all(torch.equal(seen[name], p) for name, p in begun.items())
    assert not torch.equal(net.model.norm.weight, begun["model.norm.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [["sigmoid"], ["ipo"], ["hinge", "sft"], ["apo_zero"], ["aot"]], ids="+".join
)
def test_dpo_of_the_whole_model(loss):
    settings = DPOConfig(beta=0.2, loss_type=loss)
    ours, theirs, a, b = both(
        small(),
        lambda net: dpo_objective(make_reference(net), settings),
        settings=settings,
        **DPO,
        optim=OptimConfig(learning_rate=3e-4, lr_scheduler_type="linear", optim="adamw_torch"),
    )
    agree(ours, theirs, 2e-4 if loss == ["ipo"] else 1e-4), same_weights(a, b, 1e-3)


@pytest.mark.slow
def test_four_bits_learn_the_same_and_evaluations_break_nothing():
    "Evaluate after every step, which breaks bitsandbytes' gradients on some processors."
    pytest.importorskip("bitsandbytes")
    net = add_lora(
        quantize_model(small(), QuantConfig(bits=4, double_quant=False)),
        LoRAConfig(r=4, target_modules=["q_proj", "down_proj"]),
    )
    from trainkit.interop.trl import TRLTrainer

    runs = []
    for engine, extra in ((Trainer, {}), (TRLTrainer, dict(kind="sft", tokenizer=WORDS))):
        config = TrainConfig(
            max_steps=12,
            logging_steps=1,
            progress=False,
            mixed_precision="no",
            eval_strategy="steps",
            eval_steps=1,
        )
        optim = OptimConfig(learning_rate=2e-3, lr_scheduler_type="constant", optim="adamw_torch")
        runs.append(
            engine(
                copy.deepcopy(net),
                lm_loss,
                Batches(some_rows(), 4, seed=3),
                Batches(some_rows(), 8, shuffle=False),
                config,
                optim=optim,
                **extra,
            )
            .train()
            .history
        )
    ours, theirs = ([r for r in run if "loss" in r] for run in runs)
    for a, b in zip(ours, theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-3) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], rel=0.05
        )
    assert [r["eval_loss"] for r in runs[1] if "eval_loss" in r] == pytest.approx(
        [r["eval_loss"] for r in runs[0] if "eval_loss" in r], abs=2e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_kto_learns(lora):
    from trainkit.interop.trl import TRLTrainer

    net = add_lora(small(), LoRAConfig(r=8)) if lora else small()
    settings = DPOConfig(loss_type=["kto"])
    done = TRLTrainer(
        net,
        dpo_objective(make_reference(net), settings),
        PairBatches(some_pairs(), 5, seed=1),
        kind="kto",
        settings=settings,
        tokenizer=WORDS,
        config=TrainConfig(max_steps=40, logging_steps=10, progress=False, mixed_precision="no"),
        optim=OptimConfig(learning_rate=3e-2 if lora else 5e-3, lr_scheduler_type="constant"),
    ).train()
    losses = [r["loss"] for r in done.history]
    assert losses[0] <= 0.55 and losses[-1] < losses[0] - (0.02 if lora else 0.1), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, beta, lora",
    [("grpo", 0.0, False), ("grpo", 0.05, False), ("grpo", 0.05, True), ("rloo", 0.05, False)],
)
def test_rewards_grow(kind, beta, lora):
    from trainkit.align.policy import disable_dropout
    from trainkit.align.rl import grpo_objective
    from trainkit.align.rollouts import Rollouts
    from trainkit.interop.trl import TRLTrainer

    net = small()
    if lora:
        add_lora(net, LoRAConfig(r=8))
    disable_dropout(net)
    asked = []

    def low(completions, completion_ids, tag, **kwargs):  # Likes small ids
        asked.extend(zip(completions, tag, strict=True))
        return [sum(i < 48 for i in ids) / len(ids) for ids in completion_ids]

    settings = RLConfig(
        method=kind, num_prompts=4, num_generations=4, max_completion_length=8, beta=beta
    )

    class Words:
        eos_token_id, eos_token, pad_token_id = 1, "t1", 0

        def encode(self, text):
            return [int(w[1:]) for w in text.split()]

        def decode(self, ids, **kwargs):
            return " ".join(f"t{i}" for i in ids)

    rollouts = Rollouts(
        net, Words(), [dict(prompt=f"t{5 + i} t{9 + i}", tag=i) for i in range(8)], low, settings
    )
    trainer = TRLTrainer(
        net,
        grpo_objective(settings),
        rollouts,
        kind=kind,
        settings=settings,
        tokenizer=WORDS,
        config=TrainConfig(max_steps=24, logging_steps=4, progress=False, mixed_precision="no"),
        optim=OptimConfig(learning_rate=3e-2 if lora else 3e-3, lr_scheduler_type="constant"),
    )
    rewards = [r["reward"] for r in trainer.train().history]
    assert rewards[-1] > rewards[0] + (0.02 if lora else 0.1), rewards
    assert isinstance(asked[0][0], str) and {tag for _, tag in asked} == set(range(8))


def run_in(folder, model, stop_at=None, **more):
    from trainkit.interop.trl import TRLTrainer

    events = []

    class Watch:
        def on_step(self, trainer, record):
            if record["step"] == stop_at:
                trainer.control.stop("interrupted")

        def on_save(self, trainer, record):
            events.append((record["kind"], record["step"]))

        def on_eval(self, trainer, record):
            events.append(("eval", record["step"]))

    config = TrainConfig(
        **{
            "output_dir": str(folder),
            "max_steps": 10,
            "save_strategy": "steps",
            "save_steps": 4,
            "logging_steps": 1,
            "progress": False,
            "mixed_precision": "no",
            **more,
        }
    )
    trainer = TRLTrainer(
        model,
        lm_loss,
        Batches(some_rows(), 4, seed=3),
        Batches(some_rows(9), 4, shuffle=False),
        config,
        [Watch()],
        OptimConfig(learning_rate=2e-3, optim="adamw_torch"),
        kind="sft",
        tokenizer=WORDS,
        control=Control(),
        facts={"data": "x"},
    )
    return trainer, events


def test_stopped_and_resumed_it_ends_the_same(tmp_path):
    whole = run_in(tmp_path / "whole", small())[0].train()
    stopped = run_in(tmp_path / "half", small(), stop_at=6)[0].train()
    assert (stopped.stop_reason, stopped.steps, stopped.exit_code) == ("interrupted", 6, 130)
    again, events = run_in(tmp_path / "half", small())
    net = again.model
    resumed = again.train("auto")
    assert [r["loss"] for r in resumed.history] == [
        r["loss"] for r in whole.history[6:]
    ] and resumed.tokens == whole.tokens
    assert ("checkpoint", 8) in events and ("final", 10) in events
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert all(torch.equal(saved[n], p) for n, p in net.state_dict().items() if n in saved)
    other = run_in(tmp_path / "half", small(), max_steps=20)[0]
    with pytest.raises(ValueError, match="another run: steps was 10 and is 20"):
        other.train("auto")
    with pytest.raises(FileNotFoundError, match="no checkpoint of engine: trl"):
        run_in(tmp_path / "none", small())[0].train(True)


@pytest.mark.slow
def test_the_best_weights_come_back_and_patience_ends(tmp_path):
    more = dict(
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        early_stopping_patience=2,
        save_strategy="no",
        max_steps=200,
    )
    trainer, events = run_in(tmp_path / "best", small(), **more)
    done = trainer.train()
    assert done.stop_reason == "early stopping" and 0 < trainer.state.best_step < done.steps
    assert trainer.evaluate()["eval_loss"] == pytest.approx(done.best_metric, abs=1e-6)
    assert not (tmp_path / "best" / "trl").is_dir() or not [
        *(tmp_path / "best" / "trl").glob("checkpoint-*")
    ]


def test_nothing_phones_home_and_no_row_is_lost(monkeypatch):
    import trl.trainer.base_trainer as base

    def phone(*args, **kwargs):
        raise AssertionError("telemetry")

    for name in ("send_telemetry", "_send_telemetry"):
        if hasattr(base, name):
            monkeypatch.setattr(base, name, phone)
    monkeypatch.delenv("CI", raising=False)
    from trainkit.interop.trl import TRLTrainer

    long = [dict(input_ids=np.full(n, 5), labels=np.full(n, 5)) for n in (3, 2000)]
    net = small(max_seq_len=2048)
    trainer = TRLTrainer(
        net,
        lm_loss,
        Batches(long, 1, shuffle=False),
        config=TrainConfig(num_train_epochs=1, progress=False, mixed_precision="no"),
        kind="sft",
        tokenizer=WORDS,
    )
    assert trainer.train().tokens == 2003


@pytest.mark.parametrize(
    "knobs, words",
    [
        (dict(z_loss=1e-4), "z_loss"),
        (dict(on_nan="skip"), "on_nan"),
        (dict(optimizer_in_backward=True, max_grad_norm=0.0), "optimizer_in_backward"),
    ],
)
def test_what_trl_cannot_do_is_refused(knobs, words):
    from trainkit.interop.trl import TRLTrainer

    with pytest.raises(ValueError, match=words):
        TRLTrainer(
            small(),
            lm_loss,
            Batches(some_rows(), 4),
            config=TrainConfig(**knobs),
            kind="sft",
            tokenizer=WORDS,
        )
    for loss in ("simpo", "orpo"):
        from trainkit.interop.trl import SETTINGS

        with pytest.raises(ValueError, match=loss):
            SETTINGS["dpo"](DPOConfig(loss_type=[loss]))
    with pytest.raises(ValueError, match="not 'ppo'"):
        TRLTrainer(small(), lm_loss, Batches(some_rows(), 4), kind="ppo", tokenizer=WORDS)


@pytest.mark.parametrize("name", ["trl", "peft", "datasets"])
def test_what_is_missing_is_said_in_a_line(monkeypatch, home, name):
    import trainkit.interop.trl
    from trainkit.recipes.runner import run
    from trainkit.recipes.runner import rehearse
    from trainkit.interop.trl import TRLTrainer

    real = trainkit.interop.trl.find_spec
    monkeypatch.setattr(
        trainkit.interop.trl, "find_spec", lambda asked: None if asked == name else real(asked)
    )
    config = config_of(home, "missing", "trl", "lora", "talks")
    for begin in (
        lambda: run(config),
        lambda: rehearse(config),
        lambda: TRLTrainer(small(), lm_loss, Batches(some_rows(), 4), tokenizer=WORDS),
    ):
        with pytest.raises(
            ImportError, match=rf"^engine: trl needs {name}: pip install 'trainkit-llm\[trl\]'"
        ):
            begin()
    assert not config.folder.exists()


# --- from a config


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A base model in a folder, questions, pairs and a config for each method."
    from trainkit.tokenizer.chat import set_template
    from trainkit.interop.hf import save_pretrained
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    folder = tmp_path_factory.mktemp("engines")
    names = "zero one two three four five six seven eight nine ten eleven".split()
    rows = [
        dict(prompt=ask.format(n), completion=name, chosen=name, rejected=names[n - 1], answer=name)
        for n, name in enumerate(names)
        for ask in ("Spell {}.", "What is {} in words?", "Write {}.", "{} in letters:")
    ]
    for file, keys in (
        ("talks", ("prompt", "completion")),
        ("pairs", ("prompt", "chosen", "rejected")),
        ("asks", ("prompt", "answer")),
    ):
        (folder / f"{file}.jsonl").write_text(
            "\n".join(json.dumps({k: row[k] for k in keys}) for row in rows)
        )
    tokenizer = BPETokenizer.train(
        [t for row in rows for t in (row["prompt"], row["completion"])],
        300,
        special_tokens=["<|endoftext|>"],
    )
    set_template(tokenizer, "chatml")
    save_pretrained(
        small(vocab_size=tokenizer.vocab_size, max_seq_len=128), tokenizer, folder / "base"
    )
    return folder


def config_of(home, name, engine, method, data, **groups):
    from trainkit.config import load_config
    from trainkit.recipes.config import RunConfig

    return load_config(
        RunConfig,
        {
            "name": name,
            "runs_dir": str(home / "runs"),
            "method": method,
            "engine": engine,
            "watch_memory": False,
            "init_from": str(home / "base"),
            "sft": {"questions": 2},
            "data": {
                "path": str(home / f"{data}.jsonl"),
                "eval_fraction": 0.25,
                **({"max_length": 64} if method in ("sft", "lora") else {}),
            },
            "lora": {"r": 4},
            "optim": {"learning_rate": 3e-3, "optim": "adamw_torch"},
            "train": {
                "max_steps": 6,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 1,
                "logging_steps": 1,
                "mixed_precision": "no",
                "progress": False,
                "save_strategy": "no",
                "eval_strategy": "steps",
                "eval_steps": 3,
            },
            **groups,
        },
    )


@pytest.mark.parametrize(
    "method, data, groups",
    [
        ("lora", "talks", {}),
        pytest.param(
            "sft", "talks", {"sft": {"packing": "best_fit", "questions": 0}}, marks=pytest.mark.slow
        ),
        pytest.param("dpo", "pairs", {"use_lora": True}, marks=pytest.mark.slow),
        pytest.param("dpo", "pairs", {"use_lora": False}, marks=pytest.mark.slow),
        pytest.param("reward", "pairs", {"use_lora": True}, marks=pytest.mark.slow),
        pytest.param("reward", "pairs", {"use_lora": False}, marks=pytest.mark.slow),
    ],
)
def test_one_config_and_two_engines(home, method, data, groups):
    from trainkit.recipes.runner import run
    from trainkit.train.runs import read_run

    done = [
        run(
            config_of(
                home, f"{method}-{data}-{len(str(groups))}-{engine}", engine, method, data, **groups
            ),
            verbose=False,
        )
        for engine in ("trainkit", "trl")
    ]
    ours, theirs = ([r for r in d.history if "loss" in r] for d in done)
    assert len(ours) == len(theirs) == 6
    for a, b in zip(ours, theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
    evals = [[r["eval_loss"] for r in d.history if "eval_loss" in r] for d in done]
    assert evals[0] == pytest.approx(evals[1], abs=1e-4) and done[0].metrics == pytest.approx(
        done[1].metrics, abs=1e-3
    )
    for d in done:
        assert (
            d.report.is_file()
            and d.model_path.is_dir()
            and {"start", "log", "eval", "end"} <= {r["event"] for r in read_run(d.folder).records}
        )
    assert sorted(p.name for p in done[0].folder.iterdir()) == sorted(
        p.name for p in done[1].folder.iterdir() if p.name != "trl"
    )
    assert "engine trl 1." in (done[1].folder / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_rewards_from_a_config(home, method):
    from trainkit.recipes.runner import run

    groups = {
        "use_lora": True,
        "rl": {
            "num_prompts": 2,
            "num_generations": 4,
            "max_completion_length": 6,
            "rewards": ["right_length(6, 6)"],
            "beta": 0.02,
        },
    }
    done = run(config_of(home, method, "trl", method, "asks", **groups), verbose=False)
    assert (
        len([r for r in done.history if "reward" in r]) >= 3
        and done.steps == 6
        and done.report.is_file()
    )


def test_a_config_is_written_down_where_its_engine_is_not(home, capsys):
    from trainkit.recipes.runner import run

    config = config_of(home, "elsewhere", "llamafactory", "lora", "talks")
    done = run(config)
    assert (
        done.stop_reason == "written for llamafactory-cli"
        and "llamafactory-cli train" in capsys.readouterr().out
    )
    assert (done.folder / "llamafactory" / "train.yaml").is_file() and (
        done.folder / "config.yaml"
    ).is_file()
    with pytest.raises(ValueError, match="TRL has no trainer"):
        run(config_of(home, "x", "trl", "ppo", "asks"))
    assert not (home / "runs" / "x").exists()


@pytest.mark.parametrize("engine", ["llamafactory", pytest.param("trl", marks=pytest.mark.slow)])
def test_a_dry_run_says_what_would_run(home, engine):
    from trainkit.recipes.runner import rehearse

    config = config_of(home, "dry", engine, "lora", "talks")
    tried = rehearse(config)
    output = str(tried)
    assert (
        tried.steps == 6
        and tried.effective_batch == 4
        and json.dumps(tried.to_dict())
        and not config.folder.exists()
    )
    if engine == "trl":
        assert "engine trl 1." in output and "SFTTrainer" in output and tried.step_seconds > 0
    else:
        assert (
            "llamafactory-cli train" in output
            and "finetuning_type: lora" in output
            and tried.seconds is None
        )
        assert sum(map(int, re.findall(r"json with (\d+) rows", output))) == 48
        assert str(config.folder / "llamafactory") in output


def test_the_shell_takes_an_engine(home):
    "The option and the knob are the same; a dry run lists what would run; wrong names are named."
    rows = (
        f"data.path={home / 'talks.jsonl'}",
        "train.max_steps=6",
        "train.mixed_precision=no",
        "train.progress=false",
        "data.max_length=64",
    )
    words = ("train", "--method", "lora", "--model", home / "base", *rows)
    for engine in (("--engine", "llamafactory"), ("engine=llamafactory",)):
        done = call(*words, *engine, "--dry-run", cwd=home)
        assert (
            done.returncode == 0
            and "llamafactory-cli train" in done.stdout
            and "stage: sft" in done.stdout
        ), done.stderr
    done = call(*words, "--engine", "tlr", cwd=home)
    assert (
        done.returncode == 1
        and "tlr" in done.stderr
        and "trl" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.slow
def test_the_shell_runs_trl(home):
    done = shell(
        "train",
        "--method",
        "lora",
        "--model",
        home / "base",
        "--engine",
        "trl",
        "--json",
        f"data.path={home / 'talks.jsonl'}",
        "name=shelled",
        "train.max_steps=4",
        "train.mixed_precision=no",
        "train.progress=false",
        "data.max_length=64",
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4


@pytest.mark.parametrize(
    "method, tied, words",
    [
        ("lora", True, dict(additional_target="embed_tokens")),
        ("lora", False, dict(additional_target="norm,embed_tokens,lm_head")),
        ("freeze", False, dict(freeze_extra_modules="embed_tokens,lm_head")),
        ("sft", True, {}),
        ("reward", True, None),
    ],
)
def test_llamafactory_learns_the_tokens_of_a_chat_format(home, tmp_path, method, tied, words):
    from trainkit.interop.hf import save_pretrained
    from trainkit.interop.llamafactory import llamafactory_arguments
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    tokenizer = BPETokenizer.train(
        ["zero one two three four five six seven eight nine"] * 3,
        262,
        special_tokens=["<|endoftext|>"],
    )
    tokenizer.eos_token = "<|endoftext|>"
    save_pretrained(
        small(vocab_size=tokenizer.vocab_size, tie_embeddings=tied), tokenizer, tmp_path / "base"
    )
    lora = {"lora": {"r": 4, "modules_to_save": ["norm"]}} if method == "lora" and not tied else {}
    arguments = llamafactory_arguments(
        config_of(
            home, "x", "llamafactory", method, "talks", init_from=str(tmp_path / "base"), **lora
        ),
        100,
    )
    ours = ("resize_vocab", "additional_target", "freeze_extra_modules")
    assert {k: arguments[k] for k in ours if k in arguments} == (
        {} if words is None else dict(resize_vocab=True, **words)
    )
    assert "resize_vocab" not in llamafactory_arguments(
        config_of(home, "x", "llamafactory", method, "talks"), 100
    )  # it knows them


def test_thumbs_are_written_as_llamafactory_reads_them(home, tmp_path):
    "Unpaired rows keep their label, in the column that kto_tag names."
    from trainkit.interop.llamafactory import to_llamafactory

    rows = [
        dict(prompt=f"Spell {n}.", completion=name, label=n % 2 == 0)
        for n in range(8)
        for name in ("one", "two")
    ]
    (home / "thumbs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    to_llamafactory(
        config_of(
            home, "x", "llamafactory", "dpo", "thumbs", dpo={"loss_type": ["kto"]}, use_lora=True
        ),
        tmp_path,
    )
    written = [
        row
        for name in ("train", "eval")
        for row in json.loads((tmp_path / f"{name}.json").read_text())
    ]
    written_rows = sorted(
        (row["messages"][0]["content"], row["messages"][1]["content"], row["label"])
        for row in written
    )
    assert written_rows == sorted((row["prompt"], row["completion"], row["label"]) for row in rows)
    about = json.loads((tmp_path / "dataset_info.json").read_text())["train"]
    assert about["columns"] == dict(messages="messages", kto_tag="label") and "ranking" not in about
    assert "stage: kto" in (tmp_path / "train.yaml").read_text()


@pytest.mark.parametrize(
    "knobs",
    [
        dict(lr_scheduler_type="warmup_stable_decay", min_lr_ratio=0.1, decay_ratio=0.5),
        dict(lr_scheduler_type="cosine", num_cycles=1.5),
        dict(lr_scheduler_type="cosine", min_lr_ratio=0.1),
        dict(lr_scheduler_type="cosine_with_min_lr"),
        dict(lr_scheduler_type="linear"),
        dict(lr_scheduler_type="polynomial", power=2.0, min_lr_ratio=0.1),
        dict(lr_scheduler_type="cosine_with_restarts", num_cycles=2),
    ],
)
def test_llamafactory_gets_the_whole_schedule(home, knobs):
    "What is written down is what transformers makes our rates of."
    from transformers import get_scheduler

    from trainkit.interop.llamafactory import llamafactory_arguments
    from trainkit.train.optim import make_schedule

    config = config_of(
        home,
        "x",
        "llamafactory",
        "sft",
        "talks",
        optim=dict(learning_rate=0.01, warmup_steps=4, **knobs),
        train=dict(max_steps=20, per_device_train_batch_size=4),
    )
    arguments, rates = llamafactory_arguments(config, 100), []
    for build in (
        lambda o: make_schedule(o, config.optim, 20),
        lambda o: get_scheduler(
            arguments["lr_scheduler_type"],
            o,
            arguments["warmup_steps"],
            20,
            arguments.get("lr_scheduler_kwargs"),
        ),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.01)
        schedule, series = build(optimizer), []
        for _ in range(20):
            series.append(optimizer.param_groups[0]["lr"])
            optimizer.step(), schedule.step()
        rates.append(series)
    assert rates[0] == pytest.approx(rates[1], abs=1e-12)


def test_llamafactory_refuses_a_floor_that_it_does_not_have(home):
    from trainkit.interop.llamafactory import llamafactory_arguments

    config = config_of(
        home,
        "x",
        "llamafactory",
        "sft",
        "talks",
        optim=dict(lr_scheduler_type="linear", min_lr_ratio=0.1),
    )
    with pytest.raises(ValueError, match="min_lr_ratio = 0.1.*ends linear at 0"):
        llamafactory_arguments(config, 100)


def test_llamafactory_starts_where_it_is(home, monkeypatch):
    from trainkit.recipes.runner import run

    tool = home / "bin" / "llamafactory-cli"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/sh\ntest "$1" = train || exit 3\nmkdir -p "$(dirname "$2")/output"\n'
        'echo \'{"current_steps": 5, "loss": 1.5, "lr": 1e-4, "epoch": '
        '1.0}\' > "$(dirname "$2")/output/trainer_log.jsonl"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    done = run(config_of(home, "there", "llamafactory", "dpo", "pairs", use_lora=True))
    assert (done.final_loss, done.steps, done.stop_reason) == (1.5, 5, "finished")
    tool.write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(RuntimeError, match="ended with code 7"):
        run(config_of(home, "broken", "llamafactory", "dpo", "pairs", use_lora=True))


@pytest.mark.slow
def test_llamafactory_knows_our_words(home, tmp_path):
    """Every argument that we write exists in the package's own source.

    It is downloaded and never imported.
    """
    import subprocess
    import sys

    from trainkit.interop.llamafactory import check_names, known_arguments, llamafactory_arguments

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-q",
            "-d",
            str(tmp_path),
            "llamafactory",
        ],
        capture_output=True,
    )
    wheels = [*tmp_path.glob("*.whl")]
    if done.returncode or not wheels:
        warnings.warn("NO LLAMAFACTORY: its names are not checked here", stacklevel=1)
        pytest.skip("llamafactory cannot be downloaded")
    known = known_arguments(wheels[0])
    assert {"pt", "sft", "rm", "ppo", "dpo", "kto"} <= known["stage"] and {
        "full",
        "freeze",
        "lora",
    } <= known["finetuning_type"]
    methods = [
        ("pretrain", {}),
        ("sft", {"sft": {"packing": "best_fit", "train_on": "last"}}),
        ("freeze", {}),
        ("lora", {"lora": {"r": 4, "use_dora": True, "modules_to_save": ["norm"]}}),
        ("qlora", {}),
        ("dpo", {"dpo": {"loss_type": ["sigmoid", "sft"], "ld_alpha": 0.5}}),
        ("dpo", {"dpo": {"loss_type": ["kto"]}, "use_lora": True}),
        ("reward", {}),
        ("ppo", {"rl": {"rewards": ["judge"]}}),
    ]
    for method, groups in methods:
        config = config_of(home, "x", "llamafactory", method, "talks", **groups)
        arguments = llamafactory_arguments(config, 100, ("train", "eval"))
        assert (
            check_names(
                {**arguments, "dataset_dir": "", "output_dir": "", "plot_loss": True}, known
            )
            == []
        ), method
    assert check_names(dict(lora_r=4, stage="orpo"), known) == [
        "lora_r is not known",
        "stage = 'orpo' is not among dpo, kto, ppo, pt, rm, sft",
    ]


def test_prompts_and_preferences_of_any_form_are_the_same_rows_for_llamafactory():
    "A prompt as text or as messages; an answer as text or as its one message; a system turn."
    from trainkit.interop.llamafactory import stage_rows

    asked = dict(role="user", content="Spell 1.")
    system = dict(role="system", content="Be brief.")
    for prompt in ("Spell 1.", [asked]):
        assert stage_rows("ppo", [dict(prompt=prompt)]) == [dict(instruction="Spell 1.", output="")]
    with pytest.raises(ValueError, match="row 0 has several messages"):
        stage_rows("ppo", [dict(prompt=[system, asked])])
    good, bad = (dict(role="assistant", content=word) for word in ("one", "two"))
    for prompt in ("Spell 1.", [asked]):
        for chosen, rejected in (("one", "two"), ([good], [bad])):
            row = dict(prompt=prompt, chosen=chosen, rejected=rejected)
            assert stage_rows("rm", [row]) == [dict(messages=[asked], chosen=good, rejected=bad)]
    row = dict(prompt=[system, asked], chosen=[good], rejected=[bad])
    assert stage_rows("rm", [row])[0]["messages"] == [system, asked]
    with pytest.raises(ValueError, match="row 0: the chosen answer has 2 messages"):
        stage_rows("rm", [row | dict(chosen=[good, good])])


def test_a_conversation_that_llamafactory_would_skip_is_named():
    from trainkit.interop.llamafactory import stage_rows

    asked, said = (dict(role=role, content="one") for role in ("user", "assistant"))
    with pytest.raises(ValueError, match="row 1 goes user: .* in turns and ending with an answer$"):
        stage_rows("sft", [dict(messages=[asked, said]), dict(messages=[asked])])
    with pytest.raises(ValueError, match="row 0 goes user assistant: .* user assistant, in turns$"):
        stage_rows("ppo", [dict(prompt=[asked, said])])
