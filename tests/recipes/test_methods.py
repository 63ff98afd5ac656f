"Preferences, reward models and rewards from one config, in Python and a shell, with LoRA too."

import json
import math
import shutil
import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.processes import call, shell

from trainkit.cli import check_start
from trainkit.config import load_config, save_config
from trainkit.data.dataset import load_splits
from trainkit.data.shards import tokenize_to_disk
from trainkit.align.dpo import dpo_objective
from trainkit.interop.hf import load_pretrained, save_pretrained
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import Loss, lm_loss, objective
from trainkit.align.policy import token_scores
from trainkit.align.preference_data import PairBatches, tokenize_pairs
from trainkit.recipes.config import RunConfig, method_config
from trainkit.recipes import preparation, runner
from trainkit.recipes.runner import prepare, run
from trainkit.align.reference import make_reference
from trainkit.recipes.saving import load_reward_model, score_answers
from trainkit.lora.adapters import adapters_off, load_adapter
from trainkit.lora.inject import eva_init
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.train.trainer import Trainer
from trainkit.align.kto import UnpairedBatches, kto_objective, tokenize_unpaired

NAMES = "zero one two three four five six seven eight nine".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A tiny model, pairs and questions."
    folder = tmp_path_factory.mktemp("align")
    rows = [
        dict(prompt=f"Spell {n}.", chosen=NAMES[n], rejected=NAMES[(n + k) % 10])
        for n in range(10)
        for k in (1, 3, 4)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "asked.jsonl").write_text(
        "\n".join(
            json.dumps(dict(prompt=f"Spell {n}.", answer=name)) for n, name in enumerate(NAMES)
        )
    )
    (folder / "qa.jsonl").write_text(
        "\n".join(json.dumps(dict(prompt=r["prompt"], completion=r["chosen"])) for r in rows)
    )
    (folder / "text.jsonl").write_text(
        "\n".join(json.dumps(dict(text=f"{a} and {b} are numbers.")) for a in NAMES for b in NAMES)
    )
    tokenizer = BPETokenizer.train(
        [f"{r['prompt']} {r['chosen']}" for r in rows] * 3,
        290,
        special_tokens=["<|endoftext|>", "<|pad|>"],
    )
    tokenizer.eos_token, tokenizer.pad_token = "<|endoftext|>", "<|pad|>"
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=32,
            n_heads=2,
            n_layers=2,
            d_ff=64,
            max_seq_len=64,
        )
    )
    save_pretrained(model, tokenizer, folder / "base")
    return folder


FILES = {m: "pairs.jsonl" for m in ("dpo", "reward", "kto")} | {"pretrain": "text.jsonl"}


def config(home, method, name, changes=None, **train):
    rl = {
        "num_prompts": 2,
        "num_generations": 1 if method in ("ppo", "reinforce") else 4,
        "max_completion_length": 6,
        "beta": 0.05,
    }
    return load_config(
        RunConfig,
        {
            "method": method,
            "name": name,
            "runs_dir": str(home / "runs"),
            "watch_memory": False,
            "init_from": str(home / "base"),
            "optim": {"learning_rate": 3e-3},
            "data": {
                "path": str(home / FILES.get(method, "asked.jsonl")),
                "eval_fraction": 0.2,
                "max_length": 32,
            },
            "train": {
                "max_steps": 4,
                "per_device_train_batch_size": 4,
                "save_strategy": "no",
                "logging_steps": 1,
                "progress": False,
                "eval_strategy": "epoch",
                **train,
            },
            **({"rl": rl} if method in ("grpo", "rloo", "ppo", "reinforce") else {}),
            "sampling": {"max_new_tokens": 4},
            **(changes or {}),
        },
    )


def logged(folder, name="loss"):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r[name] for r in records if r.get("event") == "log" and name in r]


ADAPTER = {"use_lora": True, "lora": {"r": 2, "lora_dropout": 0.1}}


@pytest.mark.parametrize(
    "method, more",
    [
        ("dpo", {}),
        ("dpo", {"dpo": {"precompute_ref_log_probs": True}}),
        ("dpo", {"dpo": {"loss_type": ["kto"]}}),
        ("reward", {}),
        ("grpo", {}),
        ("ppo", {}),
    ],
)
def test_every_method_trains_with_nothing_held_out(home, method, more):
    unpaired = "kto" in more.get("dpo", {}).get("loss_type", [])
    if unpaired:
        rows = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
        (home / "thumbs.jsonl").write_text(
            "\n".join(
                json.dumps(dict(prompt=r["prompt"], completion=r[side], label=side == "chosen"))
                for r in rows
                for side in ("chosen", "rejected")
            )
        )
    data = {
        "path": str(
            home
            / (
                "thumbs.jsonl"
                if unpaired
                else "pairs.jsonl"
                if method in ("dpo", "reward")
                else "asked.jsonl"
            )
        ),
        "eval_fraction": 0,
        "max_length": 32,
    }
    done = run(
        config(home, method, f"all-{method}-{len(str(more))}", {**more, "data": data}, max_steps=2),
        verbose=False,
    )
    assert (
        done.steps == 2
        and done.metrics == {}
        and "Nothing is held out" in (done.folder / "log.txt").read_text()
    )


def test_convergence_needs_something_held_out(home):
    wanted = config(
        home,
        "dpo",
        "blind",
        {
            "dpo": {"converged_patience": 1},
            "data": {"path": str(home / "pairs.jsonl"), "eval_fraction": 0},
        },
    )
    with pytest.raises(ValueError, match="dpo.converged_patience = 1 needs rows to evaluate on"):
        run(wanted, verbose=False)


@pytest.mark.parametrize(
    "more, reference", [({}, "a frozen copy"), (ADAPTER, "the model with its adapter off")]
)
def test_dpo_is_the_trainer_put_together_by_hand(home, more, reference, real_curves):
    wanted = config(home, "dpo", f"dpo-{len(more)}", {**more, "dpo": {"beta": 0.3}})
    done = run(wanted, verbose=False)
    model, tokenizer = load_pretrained(home / "base", dtype=torch.float32)
    parts = prepare(wanted) if more else None
    train = load_splits(wanted.data)[0]["train"]
    pairs = tokenize_pairs(train, tokenizer, 32, 512, "prompt")
    net = parts.model if parts else model.train()
    heard = []

    class Hear:
        def on_log(self, trainer, record):
            heard.append(record["loss"])

    Trainer(
        net,
        dpo_objective(make_reference(net), wanted.dpo),
        PairBatches(pairs, 4, 42, pad_id=tokenizer.pad_token_id),
        config=wanted.train,
        eval_batches=PairBatches(pairs, 4),
        optim=wanted.optim,
        callbacks=[Hear()],
    ).train()
    assert logged(done.folder) == heard and abs(heard[0] - 0.693147) < 1e-5
    assert done.reward_margin == done.metrics["reward_margin"] and {
        "base_accuracy",
        "accuracy",
        "reward_accuracy",
    } <= {*done.metrics}
    assert {
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "kl/sampled",
    } <= {
        k
        for line in (done.folder / "metrics.jsonl").read_text().splitlines()
        for k in json.loads(line)
    }
    report, log = done.report.read_text(), (done.folder / "log.txt").read_text()
    assert (
        "Rewards of held-out answers, and their margin" in report
        and f"reference: {reference}" in log
        and "ngine " in log
    )
    with torch.no_grad():
        assert load_pretrained(done.model_path)[0](torch.tensor([[5, 6]])).logits.isfinite().all()
    assert (done.folder / "adapter" / "adapter_config.json").exists() == bool(more)


@pytest.mark.parametrize("more", [{}, ADAPTER])
def test_thumbs_are_learned_without_pairs(home, more):
    "Labelled rows with method kto train as with a Trainer that is put together by hand."
    rows = [
        dict(prompt=f"Spell {n}.", completion=NAMES[n if up else (n + 1) % 10], label=up)
        for n in range(10)
        for up in ((True,), (False,), (True, False))[n % 3]
    ]
    (home / "thumbs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wanted = config(
        home, "kto", f"kto-{len(more)}", {**more, "dpo": {"beta": 0.3, "desirable_weight": 1.5}}
    )
    wanted.data.path = str(home / "thumbs.jsonl")
    done = run(wanted, verbose=False)
    model, tokenizer = load_pretrained(home / "base", dtype=torch.float32)
    net = prepare(wanted).model if more else model.train()
    train, heard = tokenize_unpaired(load_splits(wanted.data)[0]["train"], tokenizer, 32), []

    class Hear:
        def on_log(self, trainer, record):
            heard.append(record["loss"])

    Trainer(
        net,
        kto_objective(make_reference(net), wanted.dpo),
        UnpairedBatches(train, 4, 42, pad_id=tokenizer.pad_token_id),
        config=wanted.train,
        eval_batches=UnpairedBatches(train, 4),
        optim=wanted.optim,
        callbacks=[Hear()],
    ).train()
    assert logged(done.folder) == heard and len({row["label"] for row in train}) == 2
    assert {"base_accuracy", "accuracy", "reward_margin"} <= {
        *done.metrics
    } and "without pairs" in (done.folder / "log.txt").read_text()
    assert logged(done.folder, "rewards/margins") and (
        done.folder / "adapter" / "adapter_config.json"
    ).exists() == bool(more)


def test_the_reference_is_written_down_in_the_run(home):
    plain = run(config(home, "dpo", "plain"), verbose=False)
    written = run(
        config(home, "dpo", "written", {"dpo": {"precompute_ref_log_probs": True}}), verbose=False
    )
    assert (written.folder / "reference.npz").is_file()
    assert torch.allclose(
        torch.tensor(logged(plain.folder)), torch.tensor(logged(written.folder)), atol=1e-5
    )


def test_a_flat_margin_ends_the_run(home):
    done = run(
        config(
            home,
            "dpo",
            "flat",
            {"dpo": {"converged_patience": 1, "converged_threshold": 1e6}},
            max_steps=30,
            eval_strategy="steps",
            eval_steps=1,
        ),
        verbose=False,
    )
    assert (done.stop_reason, done.exit_code) == ("converged", 0) and done.steps < 30


def test_a_reward_model_judges_a_run(home, real_curves):
    judge = run(config(home, "reward", "judge", max_steps=8), verbose=False)
    model, tokenizer = load_reward_model(judge.model_path)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    ours = score_answers(judge.model, judge.tokenizer, ["Spell 1."], ["one"])
    assert torch.allclose(
        torch.tensor(score_answers(model, tokenizer, ["Spell 1."], ["one"])),
        torch.tensor(ours),
        atol=1e-5,
    )
    assert {"base_accuracy", "accuracy", "reward_margin"} <= {*judge.metrics}
    lora = run(config(home, "reward", "judge-lora", ADAPTER, max_steps=2), verbose=False)
    assert torch.allclose(
        torch.tensor(score_answers(*load_reward_model(lora.model_path), ["Spell 1."], ["one"])),
        torch.tensor(score_answers(lora.model, lora.tokenizer, ["Spell 1."], ["one"])),
        atol=1e-5,
    )
    assert (
        json.loads((lora.folder / "adapter" / "adapter_config.json").read_text())["task_type"]
        == "SEQ_CLS"
        and (lora.folder / "adapter" / "adapter_model.safetensors").is_file()
    )
    scored = run(
        config(
            home,
            "grpo",
            "scored",
            {
                "rl": {
                    "num_prompts": 2,
                    "num_generations": 2,
                    "max_completion_length": 4,
                    "rewards": [str(judge.folder), "right_answer"],
                }
            },
            max_steps=2,
        ),
        verbose=False,
    )
    assert {"base_reward", "reward", "base_accuracy", "accuracy", "sampled_reward"} <= {
        *scored.metrics
    }
    assert len(logged(scored.folder, "reward_reward_model")) == 2


@pytest.mark.parametrize(
    "method, more", [("grpo", {}), ("rloo", ADAPTER), ("ppo", ADAPTER), ("reinforce", {})]
)
def test_scores_from_a_config(home, method, more):
    done = run(config(home, method, f"{method}-run", more), verbose=False)
    assert (
        done.steps == 4
        and len(logged(done.folder, "reward")) == 4
        and len(logged(done.folder, "kl")) == 4
    )
    assert {"base_accuracy", "accuracy", "kl"} <= {*done.metrics} and "Rewards    right_answer" in (
        done.folder / "log.txt"
    ).read_text()
    with torch.no_grad():
        assert load_pretrained(done.model_path)[0](torch.tensor([[5, 6]])).logits.isfinite().all()
    assert (done.folder / "adapter").exists() == bool(more)


def test_a_function_as_reward(home, real_curves):
    def longer(completions, **columns):
        return [float(len(text)) for text in completions]

    done = run(config(home, "grpo", "longer", max_steps=2), rewards=[longer], verbose=False)
    assert "Rewards    longer" in (done.folder / "log.txt").read_text() and "reward" in done.metrics
    with pytest.raises(ValueError, match="this is pretrain"):
        run(RunConfig(), rewards=[longer], verbose=False)


@pytest.mark.parametrize("own", [False, True])
def test_the_best_model_is_the_one_with_the_highest_rewards(home, own):
    "GRPO's loss is about 0 at any quality, and a custom loss need not know of rewards."

    @objective(counts=lambda batch: dict(mine=len(batch["labels"])))
    def mine(model, batch):
        return Loss(
            dict(
                mine=(
                    -(batch["advantages"] * token_scores(model, batch, 1.0).log_probs.sum(1)).sum(),
                    len(batch["labels"]),
                    1.0,
                )
            )
        )

    drawn = iter(range(10**6))

    def odd(completions, **columns):
        return [float((len(text) + next(drawn)) % 7) for text in completions]

    wanted = config(
        home,
        "grpo",
        f"best-{own}",
        {"rl": {"num_prompts": 2, "num_generations": 4, "max_completion_length": 6}},
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
    )
    done = run(wanted, rewards=[odd], objective=mine if own else None, verbose=False)
    evals = [
        r
        for line in (done.folder / "metrics.jsonl").read_text().splitlines()
        if (r := json.loads(line)).get("event") == "eval"
    ][:4]
    rewards = [r["eval_reward"] for r in evals]
    assert (
        len({*rewards}) > 1
        and done.best_metric == max(rewards)
        and wanted.train.metric_for_best_model == "reward"
    )
    assert [r["best"] for r in evals] == [
        r > max([float("-inf"), *rewards[:i]]) for i, r in enumerate(rewards)
    ]
    assert "Best by    eval_reward, of answers to" in (done.folder / "log.txt").read_text()
    assert (
        config(home, "rloo", "by-loss", metric_for_best_model="loss").train.metric_for_best_model
        == "loss"
    )


@pytest.mark.parametrize(
    ("rl", "message"),
    [
        (dict(environment="gues_number(1, 9)"), "Did you mean 'guess_number'"),
        (dict(environment="guess_number(9, 1)"), "take low < high"),
        (dict(rewards=["right_anser"]), "Did you mean 'right_answer'"),
    ],
)
def test_a_wrong_name_is_found_before_the_model_is_loaded(home, monkeypatch, rl, message):
    "Loading a large model takes minutes."
    monkeypatch.setattr(preparation, "open_trained", lambda config: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=message):
        prepare(config(home, "grpo", "named", {"rl": rl}))


def test_knobs_of_a_model_that_is_trained_already(home):
    "What does not depend on its weights is set, and the plan names the rest."
    stretched = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    wanted = {"attention": "eager", "dropout": 0.3, "attention_dropout": 0.2, "max_seq_len": 128}
    wanted |= {"gradient_checkpointing": True, "rope_scaling": stretched}
    asked = config(home, "dpo", "knobs", {"model": {**wanted, "d_model": 96, "n_layers": 2}})
    inputs = prepare(asked)
    shape = inputs.model.config
    assert {name: getattr(shape, name) for name in wanted} == wanted and shape.d_model == 32
    torch.manual_seed(0)
    built = Transformer(shape)
    built.load_state_dict(inputs.model.state_dict())
    ids = torch.arange(40)[None]
    for mode in (True, False):  # With the same dropout, and the same positions
        out = []
        for model in (built.train(mode), inputs.model.train(mode)):
            torch.manual_seed(1)
            out.append(model(ids).logits)
        assert torch.equal(*out)
    lines = runner.plan_lines(inputs, runner.make_trainer(inputs))
    (note,) = [line for line in lines if "without effect" in line]
    assert "model.d_model shapes a new model" in note and "n_layers" not in note
    asked.model.rope_scaling = None
    asked.model.max_seq_len = 128
    assert prepare(asked).model.config.max_seq_len == 64


def test_a_profile_shapes_new_models_only(home):
    "Its dropout is not one that somebody asked for."
    said = {"method": "sft", "init_from": str(home / "base")}
    assert load_config(RunConfig, said, profile="full").model == ModelConfig()
    assert load_config(RunConfig, {}, profile="full").model.dropout == 0.1


def test_knobs_of_a_model_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).train()
    wanted = ModelConfig(
        attention="eager",
        attention_dropout=0.5,
        gradient_checkpointing=True,
        d_model=32,
        n_layers=3,
        dropout=0.1,
    )
    preparation.set_model_knobs(model, wanted)
    assert model.model.layers[0].self_attn.attention_dropout == 0.5
    assert model.config._attn_implementation == "eager" and model.is_gradient_checkpointing
    unused = preparation.unused_model_knobs(RunConfig(init_from="x", model=wanted), model)
    assert unused == ["model.n_layers", "model.dropout"]


def test_no_title_stands_above_nothing():
    "A run in an environment has no prompts to continue."
    said = []
    runner._show_samples("After training:", [], lambda *lines: said.extend(lines))
    assert not said
    runner._show_samples("After training:", [("a", "b")], lambda *lines: said.extend(lines))
    assert said == ["", "After training:", "  a|b", ""]


@pytest.mark.parametrize("method", ["dpo", "reward", "grpo", "ppo"])
def test_tokens_of_a_new_chat_format_are_learned(home, method):
    "With the adapter off, which is what a reference asks, they are as they came."

    def longer(completions, **columns):
        return [float(i) for i, _ in enumerate(completions)]

    wanted = config(home, method, f"{method}-new", {**ADAPTER, "sft": {"template": "chatml"}})
    done = run(wanted, rewards=[longer] if method in ("grpo", "ppo") else (), verbose=False)
    net = getattr(done.model, "policy", done.model)
    start, end = (done.tokenizer.special_tokens[t] for t in ("<|im_start|>", "<|im_end|>"))

    def rows():
        return net.get_input_embeddings().weight[[start, end]]

    assert (
        not rows()[0].equal(rows()[1])
        and "The chat format adds 2 tokens" in (done.folder / "log.txt").read_text()
    )
    with adapters_off(net):
        assert rows()[0].equal(rows()[1])
    modules = json.loads((done.folder / "adapter" / "adapter_config.json").read_text())[
        "modules_to_save"
    ]
    assert sorted(modules) == (
        ["model.embed_tokens", "score"] if method == "reward" else ["lm_head", "model.embed_tokens"]
    )


def test_rows_that_nobody_judges_do_not_end_a_run(home):
    def some(completions, answer, **columns):
        return [
            float(len(text)) if word in judged else None
            for text, word in zip(completions, answer, strict=True)
        ]

    judged, wanted = NAMES, config(home, "grpo", "judged", max_steps=2)
    train = [row["answer"] for row in prepare(wanted).train_batches.rows]
    judged = train[:2]
    with pytest.warns(UserWarning, match="judged by no reward function"):
        done = run(wanted, rewards=[some], verbose=False)
    silent = logged(done.folder, "rewards/unjudged")
    assert silent == [0.75] * 2  # A step goes over the eight prompts once
    assert (
        done.best_metric is None and done.steps == 2
    )  # No held-out row is judged either: no evaluation is the best
    judged = []
    with pytest.raises(
        ValueError, match=f"no reward function scores any of the {len(train)} prompts"
    ):
        run(config(home, "grpo", "unjudged"), rewards=[some], verbose=False)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class StopAt:
    "Stops a run after its third step."

    def on_step(self, trainer, record):
        if trainer.state.step == 3:
            trainer.control.stop("interrupted")


QUANTIZED = {"quant": {"bits": 4}}


@pytest.mark.parametrize(
    "method, more",
    [
        ("dpo", ADAPTER),
        ("dpo", {**ADAPTER, **QUANTIZED}),
        ("ppo", ADAPTER),
        ("grpo", {}),
        ("pretrain", {**ADAPTER, **QUANTIZED}),
    ],
)
def test_stopped_and_resumed_it_is_the_same_run(home, method, more):
    long = dict(max_steps=6, save_strategy="steps", eval_strategy="no")
    kind = f"{method}-{len(more)}"
    expected = run(config(home, method, f"{kind}-whole", more, **long), verbose=False)
    half = config(home, method, f"{kind}-half", more, **long)
    assert run(half, callbacks=[StopAt()], verbose=False).steps == 3
    resumed = run(half, resume=True, verbose=False)
    assert (
        torch.equal(weights(resumed.model), weights(expected.model))
        and resumed.metrics["eval_loss"] == expected.metrics["eval_loss"]
    )


def first_matrices(model):
    return [p.detach() for name, p in model.named_parameters() if ".lora_A." in name]


@pytest.mark.parametrize("method, path", [("lora", "qa"), ("dpo", "pairs"), ("reward", "pairs")])
def test_a_run_turns_its_adapter_to_the_data(home, method, path):
    "EVA gets rows of the run, each without padding, and moves nothing else."
    more = {"lora": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "eva"}}
    more["use_lora"] = method != "lora" or None
    more["data"] = {"path": str(home / f"{path}.jsonl"), "eval_fraction": 0.2, "max_length": 32}
    eva = config(home, method, f"eva-{method}", more)
    torch.manual_seed(5)
    inputs = prepare(eva)
    drawn = torch.rand(1)
    plain = {**more, "lora": {**more["lora"], "init_lora_weights": True}}
    other = prepare(config(home, method, f"noise-{method}", plain))
    assert torch.equal(torch.rand(1), drawn)
    for ours, theirs in zip(inputs.train_batches, other.train_batches, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for matrix, noise in zip(
        first_matrices(inputs.model), first_matrices(other.model), strict=True
    ):
        assert torch.allclose(matrix @ matrix.T, torch.eye(2), atol=1e-4)
        assert not torch.allclose(noise @ noise.T, torch.eye(2), atol=1e-2)
    if method == "lora":
        by_hand = prepare(config(home, method, "by-hand", plain))
        eva_init(
            by_hand.model,
            [
                dict(input_ids=torch.as_tensor(np.asarray(row["input_ids"]))[None])
                for row in by_hand.train_batches.rows
            ],
        )
        for ours, theirs in zip(
            first_matrices(inputs.model), first_matrices(by_hand.model), strict=True
        ):
            assert torch.allclose(ours.T @ ours, theirs.T @ theirs, atol=1e-4)


def test_a_resumed_run_takes_its_adapter_from_the_checkpoint(home, monkeypatch):
    more = {"use_lora": True, "lora": {"r": 2, "init_lora_weights": "eva"}}
    long = dict(max_steps=6, save_strategy="steps", eval_strategy="no")
    expected = run(config(home, "dpo", "eva-whole", more, **long), verbose=False)
    saved = json.loads((expected.folder / "adapter" / "adapter_config.json").read_text())
    assert saved["init_lora_weights"] == "eva"
    half = config(home, "dpo", "eva-half", more, **long)
    assert run(half, callbacks=[StopAt()], verbose=False).steps == 3
    monkeypatch.setattr(preparation, "eva_init", lambda *a: pytest.fail("once more"))
    resumed = run(half, resume=True, verbose=False)
    assert torch.equal(weights(resumed.model), weights(expected.model))


def test_answers_that_are_not_written_yet_have_no_directions(home):
    more = {"use_lora": True, "lora": {"r": 2, "init_lora_weights": "eva"}}
    with pytest.raises(ValueError, match="method = 'grpo' the model writes them itself"):
        prepare(config(home, "grpo", "eva-grpo", more))


@pytest.mark.parametrize(
    "method, file, words",
    [
        ("dpo", "qa.jsonl", "learns from pairs"),
        ("reward", "asked.jsonl", "learns from pairs"),
        ("grpo", "pairs.jsonl", "rl.rewards is empty"),
    ],
)
def test_data_of_the_wrong_kind_is_a_sentence(home, method, file, words, monkeypatch):
    if "learns from" in words:  # Said before a model is loaded, which takes time
        monkeypatch.setattr(
            preparation, "open_trained", lambda config: pytest.fail("it was loaded")
        )
    wrong = config(home, method, "wrong")
    wrong.data.path = str(home / file)
    with pytest.raises(ValueError, match=words):
        run(wrong, verbose=False)
    assert not (home / "runs" / "wrong").exists()


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_the_same_from_a_shell(home, method):
    "One YAML file, by Python and by the shell."
    wanted = config(home, method, f"{method}-shell", ADAPTER)
    save_config(wanted, home / f"{method}.yaml")
    done = shell("train", f"{method}.yaml", cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted.name += "-python"
    assert logged(run(wanted, verbose=False).folder) == logged(home / "runs" / f"{method}-shell")


def test_without_a_file_and_dry(home):
    words = [
        "train",
        "--method",
        "dpo",
        "--model",
        "base",
        "--dataset",
        "pairs.jsonl",
        "use_lora=true",
        "data.eval_fraction=0.2",
        "--dry-run",
    ]
    done = call(*words, cwd=home, TRAINKIT_PROFILE="quick")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("Pairs", "the model with its adapter off", "trainable%", "2 x 16 x 1 = 32 rows"):
        assert part in done.stdout, done.stdout
    assert not (home / "runs" / "run").exists()


@pytest.mark.parametrize("before", [["two", "three"], []])
def test_answers_of_a_run_are_shown_with_those_of_before_where_there_are_any(before):
    from types import SimpleNamespace

    from trainkit.recipes.evaluation import PromptEvaluator

    asked = [dict(prompt=f"Spell {n}.", expected=name) for n, name in enumerate(NAMES[:2])]
    judge = object.__new__(PromptEvaluator)
    judge.inputs = SimpleNamespace(questions=asked)  # type: ignore
    judge.before, judge.after = before, []
    assert judge.sections() == []
    judge.after = ["four", "five"]
    ((heading, page),) = judge.sections()
    assert heading == "Answers"
    for word in ("Spell 0.", "Spell 1.", "zero", "one", *before, *judge.after):
        assert word in page


def test_a_reward_model_is_no_damaged_model(home):
    run(config(home, "reward", "scores", max_steps=1), verbose=False)
    with pytest.raises(ValueError, match="is a reward model: it scores answers"):
        load_pretrained(home / "runs" / "scores" / "model")


def test_a_reward_of_ones_own_is_given_in_python(home):
    changed = config(home, "grpo", "own", {"rl": {"rewards": ["mine.py:short"]}})
    with pytest.raises(ValueError, match=r"given in Python: run\(config, rewards=\.\.\.\)"):
        prepare(changed)


def test_answers_as_long_as_the_context_leave_no_room(home):
    rl = {"rewards": ["right_answer"], "max_completion_length": 64}
    with pytest.raises(ValueError, match="rl.max_completion_length takes the whole context"):
        run(config(home, "grpo", "long", {"rl": rl}), verbose=False)


@pytest.mark.parametrize("more", [ADAPTER, {**ADAPTER, **QUANTIZED}], ids=["lora", "qlora"])
def test_a_checkpoint_of_adapters_leaves_the_base_out(home, tmp_path, more):
    shutil.copytree(home / "base", tmp_path / "base")
    half = config(home, "reward", f"small-{len(more)}", more, max_steps=6, eval_strategy="no")
    half.init_from = str(tmp_path / "base")
    stopped = run(half, callbacks=[StopAt()], verbose=False)
    held = load_file(Path(stopped.final_checkpoint) / "model.safetensors")
    learning = {name for name, p in stopped.model.named_parameters() if p.requires_grad}
    assert set(held) == learning and any("lora_A" in name for name in held)
    assert "score.weight" in {name.removeprefix("model.") for name in held}

    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.o_proj.weight"][0, 0] += 1
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match="o_proj.*load the base that the run began with"):
        run(half, resume=True, verbose=False)
    with pytest.warns(UserWarning, match="other frozen weights"):
        assert run(half, resume=True, force_resume=True, verbose=False).steps == 6


def last(completions, **columns):
    return [float(len(c)) for c in completions]


def own_loss(model, batch):
    return lm_loss(model, batch)


@pytest.mark.parametrize(
    "method, own", [("grpo", dict(rewards=[last])), ("sft", dict(objective=own_loss))]
)
def test_functions_of_a_run_are_needed_again(home, method, own, capsys):
    "A reward or a loss of your own is not in the config: resumed without it, it is another run."
    long = dict(max_steps=6, save_strategy="steps", eval_strategy="no")
    half = config(home, method, f"{method}-own-half", **long)
    if method == "sft":
        half.data.path = str(home / "qa.jsonl")
    assert run(half, callbacks=[StopAt()], **own, verbose=True).steps == 3
    [argument] = own
    words = "rewards=[last]" if method == "grpo" else "objective=own_loss"
    assert f"run(config, resume=True, {words})" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"{argument} given in Python: .* then, none now"):
        run(half, resume=True, verbose=False)
    done = run(half, resume=True, **own, verbose=False)
    # A loss of one's own need not be in nats a token
    assert done.steps == 6 and "perplexity" not in done.metrics


def test_a_reward_finds_the_columns_of_the_file():
    "Under their own names and under the usual ones; an answer of the row is not replaced."
    row = dict(prompt="2+2?", completion="It is 4. #### 4", answer="4")
    assert preparation.as_prompt(row, "prompt_completion", False)["answer"] == "4"
    solved = dict(prompt="2+2?", completion="4", level=1)
    found = preparation.as_prompt(solved, "prompt_completion", True, {"completion": "solution"})
    asked = [dict(role="user", content="2+2?")]
    assert found == dict(level=1, prompt=asked, answer="4", solution="4")
    assert preparation.as_prompt(dict(prompt="a", label="b"), "prompt", False)["label"] == "b"
    pair = dict(prompt="a", chosen="b", rejected="c", level=1)
    assert preparation.as_prompt(pair, "preference", False) == dict(prompt="a", level=1)


@pytest.mark.parametrize(
    "label, words",
    [("yes", "label must be true or false, and is 'yes'"), (None, "prompt, completion and label")],
)
def test_labels_that_kto_cannot_read_are_named(home, label, words, tmp_path):
    rows = [dict(prompt=f"Spell {n}.", completion=n) for n in NAMES]
    rows = [dict(row, label=label) for row in rows] if label else rows
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wrong = config(home, "kto", "labels")
    wrong.data.path = str(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=words):
        run(wrong, verbose=False)


def test_answers_of_one_sort_are_noted(home, tmp_path, capsys):
    rows = [dict(prompt=f"Spell {n} {m}.", completion=n, label=True) for n in NAMES for m in NAMES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    liked = config(home, "kto", "liked", max_steps=1)
    liked.data.path = str(tmp_path / "rows.jsonl")
    done = run(liked)
    out = capsys.readouterr().out
    assert "All answers are liked" in out and "all are of one sort" in out and "nan" not in out
    assert done.steps == 1


def test_a_loss_that_measures_no_margins(home):
    "The report leaves them out."
    done = run(config(home, "dpo", "plain", max_steps=1), objective=paired_loss, verbose=False)
    assert done.steps == 1 and math.isnan(done.metrics["reward_margin"])
    assert "reward margin" not in (done.folder / "report.html").read_text()


@objective(counts=lambda batch: {"pairs": len(batch["chosen_input_ids"])})
def paired_loss(model, batch):
    logits = model(batch["chosen_input_ids"]).logits if hasattr(model, "lm_head") else None
    logits = model(batch["chosen_input_ids"]) if logits is None else logits
    n = len(batch["chosen_input_ids"])
    return Loss({"pairs": (getattr(logits, "logits", logits).float().square().mean() * n, n, 1.0)})


def test_the_tokenizer_lies_beside_an_adapter_with_new_tokens(home):
    "So that PEFT makes room for them."
    peft = pytest.importorskip("peft")
    changes = {"sft": {"template": "chatml"}}
    tuned = config(home, "lora", "new-tokens", changes, max_steps=1)
    tuned.data.path = str(home / "qa.jsonl")
    done = run(tuned, verbose=False)
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(done.folder / "adapter").eval()
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        theirs, ours = opened(ids).logits, done.model.eval()(ids).logits
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


REWARD = """
import helper

def short(completions, **columns):
    return [helper.size(c) for c in completions]
"""


def test_a_reward_from_a_file(home, tmp_path, monkeypatch):
    "In a shell; the file may import its neighbours, and it is needed again to resume."
    (tmp_path / "helper.py").write_text("def size(text): return -float(len(text))")
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "broken.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "kinds.py").write_text("class Short:\n    pass\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    found = preparation.function_from_file(f"{tmp_path}/mine.py:short")
    assert found(completions=["ab"]) == [-2.0]
    for text, words in {
        "mine.short": "must be FILE.py:FUNCTION",
        "none.py:short": "there is no file none.py",
        f"{tmp_path}/mine.py:shrt": "has no function 'shrt'. Did you mean 'short'",
        f"{tmp_path}/broken.py:f": "broken.py, line 2: ZeroDivisionError",
        f"{tmp_path}/kinds.py:Short": r"is a class: make an instance .* short = Short\(\)",
    }.items():
        with pytest.raises(ValueError, match=words):
            preparation.function_from_file(text)
    half = config(home, "grpo", "from-file", max_steps=6, save_strategy="steps")
    stopped = run(half, callbacks=[StopAt()], rewards=[found], verbose=False)
    words = ["train", "--resume", str(stopped.folder)]
    alone = call(*words, cwd=tmp_path)
    assert alone.returncode == 1 and "rewards given in Python" in alone.stderr
    again = call(*words, "--reward", f"{tmp_path}/mine.py:short", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_kto_needs_another_row_to_compare_with(home, tmp_path):
    one_by_one = config(
        home, "dpo", "kto-1", {"dpo": {"loss_type": ["kto"]}}, per_device_train_batch_size=1
    )
    with pytest.raises(ValueError, match="per_device_train_batch_size = 1: kto compares"):
        prepare(one_by_one)
    rows = [dict(prompt=f"Spell {n}.", completion=NAMES[n], label=n % 2 == 0) for n in range(9)]
    (tmp_path / "nine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    nine = config(home, "kto", "kto-9")
    nine.data.path, nine.data.eval_fraction = str(tmp_path / "nine.jsonl"), 0.0
    batches = prepare(nine).train_batches
    assert [len(batch["liked"]) for batch in batches] == [4, 5] and len(batches) == 2
    with pytest.raises(ValueError, match="needs 2 rows at least"):
        batches.join(batches.rows[:1])
    (tmp_path / "one.jsonl").write_text(json.dumps(dict(rows[0], prompt="Spell it.")))
    nine.data.eval_file = str(tmp_path / "one.jsonl")
    with pytest.raises(ValueError, match="one row is set apart"):
        prepare(nine)


def test_one_row_at_a_time_where_none_is_compared(home, tmp_path):
    rows = [dict(prompt=f"Spell {n}.", completion=NAMES[n], label=n % 2 == 0) for n in range(9)]
    (tmp_path / "nine.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def alone(loss, name, **train):
        thumbs = config(home, "dpo", name, {"dpo": {"loss_type": [loss]}}, **train)
        thumbs.data.path, thumbs.data.eval_fraction = str(tmp_path / "nine.jsonl"), 0.3
        return thumbs

    one = dict(per_device_train_batch_size=1, per_device_eval_batch_size=1)
    with pytest.raises(ValueError, match="per_device_eval_batch_size = 1: kto compares"):
        prepare(alone("kto", "kto-eval-1", per_device_eval_batch_size=1))
    inputs = prepare(alone("apo_zero", "apo-1", **one))
    for batches in (inputs.train_batches, inputs.eval_batches):
        assert all(len(batch["liked"]) == 1 for batch in batches)
    assert run(alone("bco_pair", "bco-1", **one), verbose=False).steps == 4


def test_labelled_rows_and_another_engine(home, tmp_path):
    rows = [dict(prompt=f"Spell {n}.", completion=NAMES[n], label=True) for n in range(9)]
    (tmp_path / "nine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    thumbs = config(home, "dpo", "trl", {"engine": "trl", "dpo": {"loss_type": ["kto"]}})
    thumbs.data.path = str(tmp_path / "nine.jsonl")
    with pytest.raises(ValueError, match="engine: trainkit learns from labelled rows"):
        prepare(thumbs)


def test_labelled_rows_without_a_partner_are_counted(home, tmp_path):
    rows = [dict(prompt="Spell 1.", completion=name, label=name == "one") for name in NAMES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paired = config(home, "dpo", "paired")
    paired.data.path, paired.data.eval_fraction = str(tmp_path / "rows.jsonl"), 0.0
    assert "1 to train on" in (plan := prepare(paired).plan[0])
    assert plan.endswith("; 8 answers without one of the other sort to the same prompt")


def test_margins_that_some_pairs_lack_are_not_used(home, tmp_path):
    rows = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
    for count, kept in ((len(rows), True), (len(rows) - 1, False)):
        some = [dict(row, margin=2.0) if i < count else row for i, row in enumerate(rows)]
        (tmp_path / f"{count}.jsonl").write_text("\n".join(map(json.dumps, some)))
        judged = config(home, "reward", f"margins-{count}")
        judged.data.path, judged.data.eval_fraction = str(tmp_path / f"{count}.jsonl"), 0.0
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            batch = next(iter(prepare(judged).train_batches))
        assert ("margin" in batch) == kept
        assert any("1 of 30 pairs have no margin" in str(w.message) for w in heard) != kept


def test_a_system_prompt_in_its_own_column_begins_the_chat():
    row = dict(prompt="Ahoy?", system="You are a pirate.")
    turns = preparation.as_prompt(row, "prompt", True)["prompt"]
    assert [turn["role"] for turn in turns] == ["system", "user"]
    assert preparation.as_prompt(row, "prompt", False)["prompt"] == "Ahoy?"


@pytest.mark.parametrize("shards", [False, True])
def test_an_adapter_learns_text(home, shards):
    "The model that it is put on stays as it is; with the adapter merged it is what was trained."
    data = home / "text.jsonl"
    if shards:
        data = home / "shards"
        tokenizer = BPETokenizer.load(home / "base")
        tokenize_to_disk(home / "text.jsonl", tokenizer, data)
    more = {**ADAPTER, "data": {"path": str(data), "max_length": 32, "eval_fraction": 0.2}}
    asked = config(home, "pretrain", f"text-{shards}", more, max_steps=6)
    result = run(asked, verbose=False)
    assert asked.adapts and (result.folder / "adapter/adapter_model.safetensors").is_file()
    before, _ = load_pretrained(home / "base")
    adapted = load_adapter(load_pretrained(home / "base")[0], result.folder / "adapter")
    merged, _ = load_pretrained(result.folder / "model")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        first, one, two = (m.eval()(ids).logits for m in (before, adapted, merged))
    assert (first - one).abs().max() > 1e-3
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_text_needs_a_model(home, capsys):
    with pytest.raises(ValueError, match="with an adapter, adapts a trained model: set init_from"):
        run(config(home, "pretrain", "nothing", {**ADAPTER, "init_from": ""}), verbose=False)
    words = ["method=pretrain", "use_lora=true", f"data.path={home / 'text.txt'}"]
    with pytest.raises(ValueError, match="with an adapter, tunes a trained model, and none"):
        check_start(None, words)
    # Adapters are never implied for text: the config of each run names the group
    assert not method_config({"method": "pretrain", "lora": {"r": 2}}).adapts


@pytest.mark.parametrize(
    "method",
    [
        "sft",
        pytest.param("pretrain", marks=pytest.mark.slow),
        pytest.param("dpo", marks=pytest.mark.slow),
    ],
)
def test_each_dataset_of_a_mixture_is_evaluated(home, tmp_path, method):
    "Its loss is that of a run which holds out the same rows of it alone."
    file = {"pretrain": "text.jsonl", "sft": "qa.jsonl", "dpo": "pairs.jsonl"}[method]
    lines = (home / file).read_text().splitlines()
    for name, some in (("one", lines[:20]), ("two", lines[20:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    common = {"eval_fraction": 0.3, "max_length": 32, "split_by": None}
    paths = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    # No step changes the model, so all runs measure the same one
    more = {"data": {**common, "datasets": paths}, "optim": {"learning_rate": 0.0}}
    whole = run(config(home, method, f"mix-{method}", more, max_steps=1), verbose=False)
    for name, path in zip(("one", "two"), paths, strict=True):
        alone = {**more, "data": {**common, "path": path}}
        single = run(config(home, method, f"{name}-{method}", alone, max_steps=1), verbose=False)
        assert whole.metrics[f"eval_{name}_loss"] == pytest.approx(
            single.metrics["eval_loss"], rel=1e-5
        )


@pytest.fixture(scope="module")
def started(home):
    "A run that has trained an adapter, far enough to change the model."
    changes = {"lora": {"r": 2}, "optim": {"learning_rate": 3e-2}}
    changes["data"] = {"path": str(home / "qa.jsonl"), "eval_fraction": 0.0, "max_length": 32}
    result = run(config(home, "lora", "first-adapter", changes), verbose=False)
    return result.folder / "adapter"


@pytest.mark.parametrize("method", ["lora", "dpo", "kto", "reward", "grpo", "ppo"])
def test_an_adapter_is_trained_further(home, started, method):
    changes = {"init_from": str(started), "lora": {"r": 16, "lora_dropout": 0.1}}
    if method == "lora":
        changes["data"] = {"path": str(home / "qa.jsonl"), "max_length": 32}
    else:
        changes["use_lora"] = True
    plan = config(home, method, f"further-{method}", changes, max_steps=2)
    lengths = [lambda completions, **_: [float(len(c)) for c in completions]]
    result = run(plan, rewards=lengths if method in ("grpo", "ppo") else (), verbose=False)
    before, after = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (started, result.folder / "adapter")
    )
    if method == "reward":  # It has another head
        del before["base_model.model.lm_head.weight"]
    assert all(after[name].shape == old.shape for name, old in before.items())
    assert any(not torch.equal(after[name], old) for name, old in before.items())
    settings = json.loads((result.folder / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 2 and settings["lora_dropout"] == 0.1
    log = (result.folder / "log.txt").read_text()
    assert "lora.r shapes a new model or adapter: without effect" in log
    if method == "dpo":
        assert settings["base_model_name_or_path"] == str(home / "base")
        assert "the model with its adapter as it was" in log
        joined, _ = load_pretrained(result.folder / "adapter", dtype=torch.float32)
        for name, tensor in load_pretrained(result.model_path)[0].state_dict().items():
            torch.testing.assert_close(joined.state_dict()[name], tensor)


def test_the_copy_of_an_adapter_is_as_good_a_reference_as_that_of_a_model(home, started):
    "The losses of a run are equal to the last bit, with numbers computed before training too."
    losses = []
    for name, dpo in (
        ("small", {}),
        ("whole", {"reference": "copy"}),
        ("ahead", {"precompute_ref_log_probs": True}),
    ):
        changes = {"init_from": str(started), "use_lora": True, "dpo": dpo}
        losses.append(logged(run(config(home, "dpo", name, changes), verbose=False).folder))
    assert losses[0][0] == pytest.approx(math.log(2), abs=1e-6)  # It starts as its reference
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)


def test_a_run_that_trains_an_adapter_further_is_resumed(home, started):
    changes = {"init_from": str(started), "use_lora": True}
    whole = run(config(home, "dpo", "further-whole", changes), verbose=False)
    cut = config(home, "dpo", "further-cut", changes, save_strategy="steps", save_steps=2)
    assert run(cut, verbose=False, callbacks=[StopAt()]).steps == 3
    resumed = run(cut, resume=True, verbose=False)
    for name, tensor in load_file(whole.folder / "adapter" / "adapter_model.safetensors").items():
        again = load_file(resumed.folder / "adapter" / "adapter_model.safetensors")[name]
        assert torch.equal(tensor, again), name


def test_an_adapter_as_the_start_of_all_weights_and_over_4_bits(home, started):
    data = {"data": {"path": str(home / "qa.jsonl"), "max_length": 32}}
    whole = prepare(config(home, "sft", "merged-start", {"init_from": str(started)} | data))
    joined, _ = load_pretrained(started, dtype=torch.float32)
    ids = torch.arange(8)[None]
    assert all(p.requires_grad for p in whole.model.parameters())
    torch.testing.assert_close(whole.model(ids).logits, joined(ids).logits)
    few = {"init_from": str(started), "quant": {"bits": 4}} | data
    few = prepare(config(home, "qlora", "few-bits", few))
    layer = few.model.model.layers[0].self_attn.q_proj
    assert type(layer.base_layer).__name__ == "Linear4bit"
    saved = load_file(started / "adapter_model.safetensors")
    start = "base_model.model.model.layers.0.self_attn.q_proj"
    assert torch.equal(layer.lora_A["default"].weight, saved[f"{start}.lora_A.weight"])


def test_what_an_adapter_cannot_start(home, started, tmp_path):
    changes = {"init_from": str(started), "use_lora": True, "lora": {"init_lora_weights": "eva"}}
    with pytest.raises(ValueError, match="init_lora_weights = 'eva' says where a new adapter"):
        prepare(config(home, "dpo", "eva", changes))
    start = run(config(home, "dpo", "no-new", {"use_lora": True}), verbose=False).folder / "adapter"
    for adapter in (started, start):
        changes = {"init_from": str(adapter), "sft": {"template": "gemma"}}
        changes["data"] = {"path": str(home / "qa.jsonl"), "max_length": 32}
        with pytest.raises((TypeError, ValueError), match="merge the adapter first"):
            prepare(config(home, "lora", "new", changes))
    shutil.copytree(started, lost := tmp_path / "lost")
    (lost / "trainkit.json").unlink()
    for base, hint in ((str(tmp_path / "gone"), "cannot be opened"), (None, "does not name")):
        settings = json.loads((lost / "adapter_config.json").read_text())
        (lost / "adapter_config.json").write_text(
            json.dumps(settings | dict(base_model_name_or_path=base))
        )
        with pytest.raises((OSError, ValueError), match=f"{hint}.*set base_model_name_or_path in"):
            load_pretrained(lost)


def test_trl_trains_an_adapter_further_with_the_same_losses(home, started):
    more = {"use_lora": True, "lora": {"r": 2}, "optim": {"learning_rate": 3e-2}}
    start = run(config(home, "dpo", "first-of-pairs", more), verbose=False).folder / "adapter"
    losses = []
    for engine in ("trainkit", "trl"):
        changes = {"init_from": str(start), "use_lora": True, "engine": engine}
        result = run(config(home, "dpo", f"further-{engine}", changes), verbose=False)
        losses.append(logged(result.folder))
    with pytest.raises(ValueError, match="modules_to_save.*take engine: trainkit"):
        run(config(home, "dpo", "whole-trl", changes | {"init_from": str(started)}), verbose=False)
    assert losses[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)


@pytest.fixture(scope="module")
def corpora(home):
    "Two folders of shards with one tokenizer, and one with another."
    tokenizer = BPETokenizer.load(home / "base")
    tokenize_to_disk([f"{a} and {b}." for a in NAMES for b in NAMES], tokenizer, home / "words")
    tokenize_to_disk([f"{n}{n}{n}" for n in range(100, 160)], tokenizer, home / "digits")
    other = BPETokenizer.train("abab", 258, special_tokens=["<|endoftext|>"])
    tokenize_to_disk(["abab"] * 9, other, home / "foreign")
    return home


def mixed(home, name, entries, more=None, **train):
    data = {"datasets": entries, "eval_fraction": 0.1, "max_length": 16, **(more or {})}
    return config(home, "pretrain", name, {"data": data}, **train)


def test_several_folders_of_shards_train_together(corpora):
    "By their weights, in tokens; each is held out and evaluated by itself, and a resume is exact."
    entries = [
        dict(path=str(corpora / "words"), weight=1),
        dict(path=str(corpora / "digits"), weight=3),
    ]
    plan = mixed(corpora, "shards-mixed", entries)
    inputs = prepare(plan)
    parts = inputs.data.mixture.parts
    assert [part["share"] for part in parts.values()] == pytest.approx([0.25, 0.75], abs=0.02)
    eos = inputs.tokenizer.eos_token_id
    texts = [inputs.tokenizer.decode(row[row != eos]) for row in inputs.train_batches.rows]
    digits = sum(any(c.isdigit() for c in text) for text in texts)
    assert digits / len(texts) == pytest.approx(0.75, abs=0.02)
    held = {row["text"] for row in inputs.eval_rows}
    assert any("and" in text for text in held) and any(text.isdigit() for text in held)
    whole = run(plan, verbose=False)
    assert whole.metrics.keys() >= {"eval_words_loss", "eval_digits_loss"}
    half = mixed(corpora, "shards-half", entries, save_strategy="steps")
    assert run(half, verbose=False, callbacks=[StopAt()]).steps == 3
    assert torch.equal(weights(run(half, resume=True, verbose=False).model), weights(whole.model))


def test_folders_of_shards_by_size_and_what_does_not_go_together(corpora):
    words, digits, foreign = (str(corpora / name) for name in ("words", "digits", "foreign"))
    inputs = prepare(mixed(corpora, "by-size", [words, digits]))
    alone = [
        len(prepare(mixed(corpora, "one", [path])).train_batches.rows) for path in (words, digits)
    ]
    parts = [part["used"] for part in inputs.data.mixture.parts.values()]
    assert parts == alone and len(inputs.train_batches.rows) == sum(alone)
    text = str(corpora / "text.jsonl")
    for entries, more, message in (
        ([words, foreign], {}, "made with different tokenizers"),
        ([words, text], {}, "text.jsonl', which has none: encode it"),
        ([words, dict(path=digits, max_examples=3)], {}, "leave max_examples out"),
        ([words, digits], {"min_length": 4}, "cannot be filtered"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(mixed(corpora, "wrong", entries, more))


class Worse:
    "Of three evaluations the first is the best, and its checkpoint is lost before the end."

    def on_measure(self, trainer, record):
        record["eval_gain"] = -record["step"]

    def on_eval(self, trainer, record):
        if record["step"] == 1:
            state = trainer.model.state_dict()
            self.weights = {name: t.clone() for name, t in state.items()}
        trainer.flush_checkpoint()
        shutil.rmtree(trainer.folder / "checkpoints" / "checkpoint-1", ignore_errors=True)


@pytest.mark.parametrize(
    "method, adapts, init",
    [
        *product(("dpo", "reward", "ppo"), (False, True), ("true",)),
        ("dpo", True, "pissa"),
        ("reward", True, "pissa"),
    ],
)
def test_a_run_ends_with_its_best_model_although_that_checkpoint_is_gone(
    home, method, adapts, init
):
    "An adapter, a reward model and the policy of ppo are read from best_model."
    changes = dict(use_lora=adapts, lora=dict(init_lora_weights=init, use_dora=init == "true"))
    changes["quant"] = dict(bits=4 if adapts and method == "dpo" and init == "true" else None)
    wanted = config(
        home,
        method,
        f"gone-{method}-{adapts}-{init}",
        changes if adapts else {},
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        save_strategy="steps",
        save_total_limit=1,
        save_steps=1,
        max_steps=3,
        metric_for_best_model="gain",
    )
    watch = Worse()
    done = run(wanted, callbacks=[watch], verbose=False)
    assert not [note for note in done.notes if "best evaluation" in note]
    state = done.model.state_dict()
    same = {name: torch.equal(t, watch.weights[name]) for name, t in state.items()}
    assert {n for n, equal in same.items() if not equal} <= {
        "value_head.weight",
        "value_head.bias",
    }
    files = [(done.folder / name / "model.safetensors") for name in ("best_model", "model")]
    best, last = (load_file(file) for file in files)
    assert best.keys() == last.keys() and all(torch.equal(t, last[n]) for n, t in best.items())
    if adapts:  # It is there for PEFT, too, and is that of the best model
        files = [done.folder / name for name in ("best_model/adapter", "adapter")]
        of_best, of_last = (load_file(file / "adapter_model.safetensors") for file in files)
        assert all(torch.equal(t, of_last[name]) for name, t in of_best.items())
        if method == "reward":
            with pytest.raises(ValueError, match="the merged model is .*best_model$"):
                load_pretrained(files[0])
        elif not wanted.quant.bits:  # Else the base that is opened is not the rounded one
            for name, t in load_pretrained(files[0], dtype=torch.float32)[0].state_dict().items():
                torch.testing.assert_close(t, last.get(name, t), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", ["write_curves", "write_run_report"])
def test_a_page_that_finds_no_room_does_not_end_a_run_in_an_error(home, monkeypatch, page):
    "The model is saved and the numbers are known; the last lines say what is missing."

    def full(folder, *more):
        raise OSError(28, "Nothing was written to report.html: the disk is full")

    monkeypatch.setattr(runner, page, full)
    done = run(config(home, "sft", f"no-{page}"), verbose=False)
    assert done.report is None and "eval_loss" in done.metrics
    last = (done.folder / "log.txt").read_text().splitlines()[-2:]
    assert last[0].endswith(f"Model   {done.folder / 'model'}")
    assert last[1].endswith("Report  Nothing was written to report.html: the disk is full")
