"RL compared with TRL's trainers, and on models of transformers."

import asyncio
import copy
import random
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.processes import await_here

from trainkit.align.episodes import Answer, Episode
from trainkit.align.rl import _averaging, _metrics, clipped_surrogate, clipped_value_loss, discount
from trainkit.align.rl import gae, group_relative, leave_one_out, masked_mean, whiten
from trainkit.align.rl import zero_std_groups
from trainkit.data.dataloader import Batches
from trainkit.model.generation import generate
from trainkit.eval.stats import compare
from trainkit.lora.inject import add_lora
from trainkit.lora.merge import merged_lora
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import lm_loss
from trainkit.train.optim import OptimConfig, hidden_matrices
from trainkit.align.policy import ActorCritic, _LogProbFromHidden, token_scores
from trainkit.align.rewards import answer_value, passes_tests, right_answer, right_length
from trainkit.align.rewards import same_answer, score
from trainkit.align.rl import METHODS, RLConfig, rl_objective
from trainkit.align.rollouts import Rollouts, pack_answers
from trainkit.eval.code_eval import run_code
from trainkit.lora.inject import LoRAConfig
from trainkit.train.config import TrainConfig
from trainkit.train.step import NothingToLearn, count_window
from trainkit.train.trainer import Trainer
from trainkit.interop.trl import SETTINGS, as_trl_reward

SIGNS = "0123456789+ ."


class Signs:
    "A tokenizer of thirteen signs, of which the point ends an answer."

    eos_token_id, eos_token = 12, "."

    def encode(self, text):
        return [SIGNS.index(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(SIGNS[i] for i in ids if i != 12 or not skip_special_tokens)


def llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def answers(pad=0):
    "Questions and answers of many lengths, as ours and as TRL's trainers want them."
    torch.manual_seed(1)
    prompts = [torch.randint(3, 40, (n,)).tolist() for n in (3, 3, 5, 5, 2, 2, 4, 4)]
    replies = [torch.randint(3, 40, (n,)).tolist() for n in (6, 1, 3, 5, 2, 2, 4, 6)]

    def pad_to(rows, n, left):
        return torch.tensor(
            [[pad] * (n - len(r)) * left + r + [pad] * (n - len(r)) * (not left) for r in rows]
        )

    def ones(rows):
        return [[1] * len(r) for r in rows]

    theirs = dict(
        prompt_ids=pad_to(prompts, 5, True),
        prompt_mask=pad_to(ones(prompts), 5, True),
        completion_ids=pad_to(replies, 6, False),
        completion_mask=pad_to(ones(replies), 6, False),
    )
    return pack_answers(prompts, replies), theirs


def spread(theirs, values, labels):
    "Numbers at TRL's places, put where ours are."
    return torch.zeros(labels.shape).masked_scatter(
        labels != -100, values[theirs["completion_mask"].bool()]
    )


def trl_trainer(kind, folder, **knobs):
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=2,
        max_completion_length=10,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **knobs,
    )
    llama().save_pretrained(folder / "model")  # The trainer opens it again as its reference
    model = LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([dict(prompt="w5 w6")] * 8),
        processing_class=tokenizer,
    )


def gradient(model, loss):
    return torch.cat(
        [
            g.flatten()
            for g in torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        ]
    )


REWARDS = torch.tensor([1.0, 0.0, 0.3, 0.9, 2.0, -1.0, 0.0, 0.5])
GRPO = [
    dict(loss_type="grpo"),
    dict(loss_type="dapo", epsilon_high=0.28),
    dict(loss_type="dr_grpo", beta=0.1),
    dict(loss_type="grpo", beta=0.04, importance_sampling_level="sequence", epsilon=0.01),
]


def test_grpo_is_trls(tmp_path):
    pytest.importorskip("trl")
    ours, theirs = answers()
    labels = ours["labels"]
    torch.manual_seed(2)
    now = token_scores(llama(), ours).log_probs.detach()
    here = (labels != -100).float()
    noise = torch.randn(8, 6)
    old, ref = (
        now + 0.2 * spread(theirs, noise, labels),
        now + 0.3 * spread(theirs, noise.flip(0), labels),
    )

    def back(x):
        return torch.zeros(8, 6).masked_scatter(theirs["completion_mask"].bool(), x[labels != -100])

    trainer = trl_trainer("GRPO", tmp_path, beta=0.1)
    model = trainer.model.train()
    for knobs in GRPO:
        config = RLConfig(num_generations=2, max_completion_length=10, **knobs)
        advantages = group_relative(REWARDS, 2)
        loss_of_ours = rl_objective(config)(
            model, {**ours, "advantages": advantages, "old_log_probs": old, "ref_log_probs": ref}
        ).total
        trainer.beta, trainer.loss_type, trainer.importance_sampling_level = (
            config.beta,
            config.loss_type,
            config.importance_sampling_level,
        )
        trainer.epsilon_low, trainer.epsilon_high = (
            config.epsilon,
            config.epsilon_high or config.epsilon,
        )
        trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation = 1, 1
        wanted = trainer._compute_loss(
            model,
            {
                **theirs,
                "advantages": advantages,
                "old_per_token_logps": back(old),
                "ref_per_token_logps": back(ref),
                "num_items_in_batch": here.sum(),
            },
        )
        assert abs(loss_of_ours - wanted) < 1e-5 and abs(loss_of_ours) > 1e-3, knobs
        mine, other = gradient(model, loss_of_ours), gradient(model, wanted)
        assert (mine - other).norm() < 1e-5 * other.norm(), knobs


def test_rloo_is_trls(tmp_path):
    pytest.importorskip("trl")
    ours, theirs = answers()
    labels = ours["labels"]
    trainer = trl_trainer("RLOO", tmp_path)
    model = trainer.model.train()
    torch.manual_seed(2)
    noise = 0.1 * torch.randn(8, 6) * theirs["completion_mask"]
    old = token_scores(model, ours).log_probs.detach() + spread(theirs, noise, labels)
    advantages = leave_one_out(REWARDS, 2)
    loss_of_ours = rl_objective(RLConfig("rloo", num_generations=2))(
        model, {**ours, "advantages": advantages, "old_log_probs": old}
    ).total
    wanted = trainer._compute_loss(
        model, {**theirs, "advantages": advantages, "old_logps": old.sum(1)}
    )
    assert abs(loss_of_ours - wanted) < 1e-5
    mine, other = gradient(model, loss_of_ours), gradient(model, wanted)
    assert (mine - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_models_of_transformers_learn_too(method):
    "A Llama of transformers, whole with a value head or by an adapter: ratio 1, rising reward."
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.div_(4)
    policy = add_lora(model, LoRAConfig(r=8)) if method == "grpo" else model
    before = copy.deepcopy(policy.state_dict())
    config = RLConfig(
        method,
        num_prompts=2,
        num_generations=16,
        max_completion_length=4,
        beta=0.001,
        kl_in_reward=method == "ppo",
        num_iterations=2,
    )

    def low(completion_ids, **columns):
        return [sum(i < 10 for i in ids) / 4 for ids in completion_ids]

    actor = ActorCritic(policy) if method == "ppo" else policy
    if method == "ppo":
        assert actor.value_head.out_features == 1, "one value for each token"
    rollouts = Rollouts(actor, None, [[3, 4], [5]], low, config)
    result = Trainer(
        actor,
        rl_objective(config),
        rollouts,
        config=TrainConfig(max_steps=60, logging_steps=1, progress=False),
        optim=OptimConfig(
            learning_rate=3e-3 if method == "ppo" else 2e-2,
            lr_scheduler_type="constant",
            weight_decay=0.0,
        ),
    ).train()
    first, last = result.history[0], result.history[-1]
    assert abs(first["ratio"] - 1) < 1e-6 and abs(result.history[1]["ratio"] - 1) > 1e-6
    assert first["reward"] < 0.4 and last["reward"] > first["reward"] + 0.15 and last["kl"] > 0.01
    changed = {n for n, p in policy.state_dict().items() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in n for n in changed) == (method == "grpo")


def test_many_rows_answer_with_rearranged_weights():
    torch.manual_seed(0)
    model, prompts = (
        Transformer(
            ModelConfig(vocab_size=40, d_model=32, n_heads=4, n_layers=2, d_ff=64, max_seq_len=64)
        ),
        [[1, 2, 3], [4, 5], [6]],
    )
    config = RLConfig(num_prompts=3, num_generations=4, max_completion_length=40)
    rollouts = Rollouts(
        model,
        None,
        prompts,
        lambda completion_ids, **columns: [float(ids[0]) for ids in completion_ids],
        config,
    )
    assert rollouts._weights_copy(8, model) is None and rollouts._weights_copy(12, model) == (
        "packed" if torch.backends.mkldnn.is_available() else None
    )
    batch = rollouts.collect([0, 1, 2], 5)
    asked = [p for p in prompts for _ in range(4)]
    plain = generate(model, asked, 40, eos_token_id=(), seed=5)
    assert [s["completion"] for s in rollouts.samples] == [
        row[len(p) :] for row, p in zip(plain, asked, strict=True)
    ]
    with torch.no_grad():
        batch["old_log_probs"] = token_scores(
            model, batch
        ).log_probs  # Another way than with a gradient
    assert abs(rl_objective(config)(model, batch).metrics["ratio"][0] / 480 - 1) < 1e-6


def test_an_adapter_answers_folded_in(monkeypatch):
    """Generating with the adapter folded in gives the same text, and then the same policy.

    The plain layers' weights are rearranged meanwhile; afterwards the policy has its old bits.
    """
    from trainkit.align import rollouts

    torch.manual_seed(0)
    model = add_lora(
        Transformer(
            ModelConfig(
                vocab_size=40,
                d_model=32,
                n_heads=4,
                n_layers=2,
                d_ff=64,
                max_seq_len=64,
                tie_embeddings=False,
            )
        ),
        LoRAConfig(r=2, target_modules="all-linear", modules_to_save=["embed_tokens"]),
    )
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.2 if "lora_" in name else 1.0)
    before, config, prompts = (
        copy.deepcopy(model.state_dict()),
        RLConfig(num_prompts=3, num_generations=4, max_completion_length=40),
        [[1, 2, 3], [4, 5], [6]],
    )
    plain = generate(model, [p for p in prompts for _ in range(4)], 40, eos_token_id=(), seed=5)
    asked, calls = rollouts.sample_answers, []

    def listen(policy, prompts, budgets, sampling, eos, weights, *more):
        calls.append((rollouts.unsupported_reason(policy.eval()), weights))
        return asked(policy, prompts, budgets, sampling, eos, weights, *more)

    monkeypatch.setattr(rollouts, "sample_answers", listen)
    batch_source = Rollouts(
        model.train(),
        None,
        prompts,
        lambda completion_ids, **columns: [float(ids[0]) for ids in completion_ids],
        config,
    )
    batch_source.collect([0, 1, 2], 5)
    assert calls == [("", "packed" if torch.backends.mkldnn.is_available() else None)]
    assert [s["completion"] for s in batch_source.samples] == [
        row[len(p) :] for row, p in zip(plain, [p for p in prompts for _ in range(4)], strict=True)
    ]
    after = model.state_dict()
    assert list(after) == list(before) and all(
        torch.equal(after[name], old) for name, old in before.items()
    )
    with pytest.raises(ZeroDivisionError), merged_lora(model):
        _ = 1 / 0
    assert list(model.state_dict()) == list(before)


def test_code_is_rewarded_by_running_it():
    good, bad, hang = "def f(x):\n    return x + 1", "def f(x): return x", "while True: pass"
    quick = passes_tests(
        lambda code, tests: run_code(code, tests, timeout=0.5 if hang in code else 60)
    )
    assert quick(completions=[good, bad, hang], test=["assert f(1) == 2"] * 3) == [1.0, 0.0, 0.0]
    assert quick(completions=[good, bad], test=[["assert f(1) == 2", "assert f(2) == 3"]] * 2) == [
        1.0,
        0.0,
    ]  # As text, the list would be true


def test_out_of_memory_cuts_rollouts_as_any_batch():
    "Half the rows at a time give the same step."
    from trainkit.train.step import split_rows

    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=13, d_model=32, n_heads=4, n_layers=1, d_ff=64, max_seq_len=16)
    )
    for method in ("grpo", "ppo"):
        actor = ActorCritic(model) if method == "ppo" else model
        config = RLConfig(
            method,
            num_prompts=2,
            num_generations=3,
            max_completion_length=4,
            num_iterations=2,
            **(dict(loss_type="dapo") if method == "grpo" else {}),
        )
        batch = next(
            iter(
                Rollouts(
                    actor,
                    Signs(),
                    ["1+1", "2+10"],
                    lambda completion_ids, **_: [float(sum(i)) for i in completion_ids],
                    config,
                )
            )
        )
        goal, parts = rl_objective(config), split_rows(batch, 2)
        assert len(parts) == 2
        n = sum(goal.counts(part)["policy_loss"] for part in parts)
        whole, halves = goal(actor, batch), [goal(actor, part) for part in parts]
        name = "policy_loss"
        assert (
            abs(
                sum(h.terms[name][0] for h in halves) / n
                - whole.terms[name][0] / whole.terms[name][1]
            )
            < 1e-6
        )


@pytest.mark.slow
def test_grpo_sorts_better_than_examples_taught():
    """GRPO on a model of the tour's size solves more unseen strings than instruction tuning did.

    The difference is larger than chance.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    signs, draw = Signs(), random.Random(0)
    every = ["".join(draw.choices("0123456789", k=6)) for _ in range(6400)]
    held, train = every[:400], [p for p in every[400:] if p not in every[:400]]

    def right(p):
        return "".join(sorted(p.strip()))

    rows = []
    for p in train[:2000]:
        a, b = signs.encode(p + " "), signs.encode(right(p) + ".")
        rows.append(dict(input_ids=np.array(a + b), labels=np.array([-100] * len(a) + b)))
    model = Transformer(
        ModelConfig(vocab_size=13, d_model=128, n_heads=4, n_layers=2, d_ff=352, max_seq_len=16)
    )

    def solved():
        answers = generate(
            model, [signs.encode(p + " ") for p in held], 8, temperature=0, eos_token_id=12
        )
        return [
            float(signs.decode(ids[7:]) == right(p)) for ids, p in zip(answers, held, strict=True)
        ]

    def reward(prompts, completions, **columns):  # All of it, and a little for each place
        return [
            float(c == right(p))
            + 0.5 * sum(a == b for a, b in zip(c.ljust(6, "x"), right(p), strict=False)) / 6
            for p, c in zip(prompts, completions, strict=True)
        ]

    Trainer(
        model,
        lm_loss,
        Batches(rows, 64, seed=0),
        config=TrainConfig(max_steps=50, progress=False),
        optim=OptimConfig(learning_rate=3e-3),
    ).train()
    before = solved()
    assert 0.2 < np.mean(before) < 0.6
    config = RLConfig("grpo", num_prompts=32, num_generations=16, max_completion_length=8)
    rollouts = Rollouts(model, signs, [dict(prompt=p + " ") for p in train[2000:]], reward, config)
    Trainer(
        model,
        rl_objective(config),
        rollouts,
        config=TrainConfig(max_steps=80, progress=False),
        optim=OptimConfig(learning_rate=3e-4, weight_decay=0.0, adam_beta2=0.99, warmup_steps=10),
    ).train()
    comparison = compare(before, solved(), ("examples", "grpo"))
    assert comparison.better == "b" and comparison.difference.low > 0, comparison


COLUMNS = dict(
    completions=["a", "x", "c"],
    prompts=["p"] * 3,
    completion_ids=[[1], [2], [3]],
    answer=["a", "b", None],
)


@pytest.mark.parametrize(
    "value, words",
    [
        (None, "odd gave None: a list"),
        (1.0, "odd gave 1.0: a list"),
        ({"a": 1}, "a list is needed"),
        (["1", "2", "3"], "odd gave '1' for the completion 'a'"),
        ([1.0, 1e40, 1.0], "odd gave 1e.40 for"),
        ([[1.0], 2.0, 3.0], "a finite number"),
        ([1.0], "odd gave 1 rewards for 3"),
    ],
)
def test_a_reward_function_that_gives_something_else_is_named(value, words):
    def odd(completions, **columns):
        return value

    with pytest.raises(ValueError, match=words):
        score([odd], None, COLUMNS)


def test_a_reward_function_that_wants_other_columns_is_named():
    def strict(prompts, completions):
        return [0.0] * 3

    def lacks(completions, solution, **columns):
        return [0.0] * 3

    def fails(completions, **columns):
        raise TypeError("mine")

    with pytest.raises(
        ValueError, match=r"strict cannot be called: .*completion_ids.*and \*\*columns"
    ):
        score([strict], None, COLUMNS)
    with pytest.raises(
        ValueError,
        match="lacks cannot be called: .*'solution'.*completions, prompts, completion_ids, answer",
    ):
        score([lacks], None, COLUMNS)
    with pytest.raises(TypeError, match="^mine") as caught:
        score([fails], None, COLUMNS)  # Its own error is its own, with what it was given
    assert "completions are texts here" in caught.value.__notes__[0]


def test_rewards_may_be_async_inside_a_loop_too():
    async def late(completions, **columns):
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    async def notebook():
        return score([late], [2.0], COLUMNS)[0].tolist()

    assert score([late], None, COLUMNS)[0].tolist() == [1.0, 1.0, 1.0]
    assert await_here(notebook()) == [2.0, 2.0, 2.0]
    assert as_trl_reward(late)(
        completions=[[dict(role="assistant", content="four")]], prompts=["p"], trainer_state=None
    ) == [4.0]


def test_rows_without_an_answer_or_a_test_are_not_judged():
    assert right_answer()(**COLUMNS) == [1.0, 0.0, None]
    assert passes_tests(lambda program, tests: True)(
        completions=["x = 1"] * 3, test=["assert x", None, ""]
    ) == [1.0, None, None]
    assert right_answer(r"= (\d+)|is (\d+)")(completions=["is 5", "= 5", "5"], answer=[5] * 3) == [
        1.0,
        1.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="parentheses"):
        right_answer(r"\d+")
    with pytest.raises(ValueError, match="cache = 0"):
        right_length(10, 0)


@pytest.mark.parametrize("method", METHODS)
def test_answers_that_nobody_judges_teach_nothing(method):
    "As in TRL, an unjudged answer has advantage 0 and does not enter the others' baseline."

    def even(prompts, **columns):
        return [
            None if int(p[0]) % 2 else float(sum(ids))
            for p, ids in zip(prompts, columns["completion_ids"], strict=True)
        ]

    def nobody(completions, **columns):
        return [None] * len(completions)

    size = 1 if method in ("ppo", "reinforce") else 4
    knobs = RLConfig(
        method,
        num_prompts=4,
        num_generations=size,
        max_completion_length=5,
        beta=0.1,
        whiten_advantages=method == "ppo",
        whiten_rewards=method == "ppo",
    )
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=13, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=32)
    )
    net = ActorCritic(model) if method == "ppo" else model
    prompts = [f"{a}+{a}" for a in (1, 2, 3, 4)]
    rollouts = Rollouts(net, Signs(), prompts, even, knobs)
    with pytest.warns(
        UserWarning,
        match=(
            f"{2 * size} of {4 * size} answers were judged by no reward function, "
            "the first to .*1.1"
        ),
    ):
        batch = rollouts.collect([0, 1, 2, 3], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Once is enough
        again = rollouts.collect([0, 2], 2)  # Nobody judges any of these
    odd = torch.tensor([True, False, True, False]).repeat_interleave(size)
    assert (
        batch["reward"].isnan().tolist() == odd.tolist()
        and not batch["advantages"][odd].any()
        and not again["advantages"].any()
    )
    assert batch["advantages"][~odd].any() and all(
        x["advantages"].isfinite().all() for x in (batch, again)
    )
    if method == "ppo":
        assert torch.equal(
            batch["returns"][odd], batch["values"][odd] * (batch["labels"][odd] != -100)
        )
    alone = Rollouts(net, Signs(), prompts, even, knobs)
    with torch.no_grad():
        known = alone.compare(
            {k: v[~odd] for k, v in batch.items()},
            (batch["labels"][~odd] != -100).float(),
            batch["reward"][~odd],
            torch.zeros_like(batch["labels"][~odd], dtype=torch.float),
        )
    if method == "grpo":
        assert torch.allclose(
            known["advantages"], batch["advantages"][~odd], atol=1e-6
        )  # Others pay for the divergence in their reward
    loss = rl_objective(knobs)(net, batch)
    assert (
        loss.total.isfinite()
        and loss.metrics["rewards/unjudged"] == (2 * size, 4 * size)
        and loss.metrics["reward"][1] == 2 * size
    )
    with pytest.raises(ValueError, match="no reward function scores any of the 4 prompts"):
        Rollouts(net, Signs(), prompts, nobody, knobs).collect([0, 1], 1)


def test_reinforce_expects_a_moving_average_of_the_rewards():
    "Rewards that stay the same give no advantage; after a change the average follows them."
    net = Transformer(
        ModelConfig(vocab_size=13, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=32)
    )
    knobs = RLConfig("reinforce", num_generations=1, max_completion_length=4, baseline_decay=0.75)
    rollouts = Rollouts(net, Signs(), ["1+1"], lambda completion_ids, **columns: [0.0], knobs)
    advantages = [
        rollouts.compare({}, torch.ones(1, 1), torch.tensor([reward]), torch.zeros(1, 1))
        for reward in (4.0, 4.0, 8.0, 8.0, 4.0)
    ]
    assert [float(a["advantages"]) for a in advantages] == [0, 0, 4, 3, -1.75]


def test_reinforce_expects_the_same_after_a_rescue(tmp_path):
    "A failed step had sampled answers already, and its baseline had seen their rewards."
    knobs = RLConfig("reinforce", num_prompts=2, num_generations=1, max_completion_length=5)

    def train(folder, ends=0, resume=None):
        calls = iter(range(1, 100))

        def heavy(completion_ids, **columns):
            if next(calls) == ends:
                raise OSError("the judge is not there")
            return [float(sum(ids)) for ids in completion_ids]

        torch.manual_seed(0)
        model = Transformer(
            ModelConfig(vocab_size=13, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=32)
        )
        rollouts = Rollouts(
            model, Signs(), [f"{a}+{a}" for a in range(9)], heavy, knobs, batch_size=2
        )
        plan = TrainConfig(
            output_dir=str(tmp_path / folder),
            max_steps=4,
            gradient_accumulation_steps=3,
            progress=False,
            save_strategy="no",
            logging_steps=1,
        )
        trainer = Trainer(
            model,
            rl_objective(knobs),
            rollouts,
            config=plan,
            optim=OptimConfig(learning_rate=1e-2),
            save_model=lambda model, folder: None,
        )
        return model, trainer.train(resume)

    whole, result = train("whole")
    with pytest.raises(OSError, match="not there") as error:
        train("again", ends=8)  # The last round of the third step
    assert "step 2 is in" in error.value.__notes__[0]
    again, _ = train("again", resume=True)
    assert result.steps == 4 and all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_what_trls_trainers_cannot_do_is_refused():
    assert (
        SETTINGS["grpo"](RLConfig(entropy_coef=0.01, use_bias_correction_kl=False)).items()
        >= dict(entropy_coef=0.01, use_bias_correction_kl=False).items()
    )
    for kind, knobs, words in (
        ("grpo", dict(kl_in_reward=True, beta=0.1), "rl.kl_in_reward"),
        ("grpo", dict(kl_estimator="k2", beta=0.1), "rl.kl_estimator"),
        ("rloo", dict(kl_in_reward=False, beta=0.1), "rl.kl_in_reward"),
        ("rloo", dict(entropy_coef=0.1), "rl.entropy_coef"),
    ):
        with pytest.raises(ValueError, match=words):
            SETTINGS[kind](RLConfig(method=kind, **knobs))


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("knobs", [{}, dict(temperature=1.3), dict(learn_entropy=True)])
def test_a_model_in_float64_is_scored_in_float64(critic, knobs):
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=50, d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=16)
    ).double()
    ids = torch.randint(50, (2, 8))
    batch = dict(input_ids=ids, labels=ids.masked_fill(torch.arange(8) < 3, -100))
    scores = token_scores(ActorCritic(model).double() if critic else model, batch, **knobs)
    every = (model(ids).logits / knobs.get("temperature", 1.0)).log_softmax(-1)[:, 2:-1]
    torch.testing.assert_close(
        scores.log_probs[:, 3:], every.gather(-1, ids[:, 3:, None])[..., 0], rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        scores.entropy[:, 3:], -(every.exp() * every).sum(-1), rtol=0, atol=1e-13
    )
    assert (scores.values is not None) == critic and (
        not critic or scores.values.dtype == torch.float64
    )
    assert (
        torch.autograd.grad(scores.log_probs.sum(), model.get_output_embeddings().weight)[0]
        .abs()
        .sum()
        > 0
    )


def test_a_loss_in_float64_keeps_its_digits():
    "Of a module that takes no labels, too."
    head = torch.nn.Linear(8, 50).double()

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(50, 8).double(), head

        def forward(self, input_ids):
            return self.head(self.table(input_ids))

    model, ids = Plain(), torch.randint(50, (2, 8))
    wanted = torch.nn.functional.cross_entropy(
        model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert abs(lm_loss(model, dict(input_ids=ids, labels=ids)).total.item() - wanted.item()) < 1e-14


READ = dict(
    epsilon=0.01,
    epsilon_high=0.01,
    loss_type="dapo",
    importance_sampling_level="sequence",
    scale_rewards="none",
    gamma=0.5,
    lam=0.5,
    vf_coef=0.7,
    cliprange_value=1e-4,
    whiten_rewards=True,
    whiten_advantages=True,
    baseline_decay=0.5,
    kl_estimator="k2",
    use_bias_correction_kl=False,
)


@pytest.mark.parametrize("method", METHODS)
def test_a_knob_without_effect_is_refused(method):
    "And one that is not refused changes the loss of a batch."
    from trainkit.config import ConfigError

    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=13, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=32)
    )
    actor = ActorCritic(model) if method == "ppo" else model

    def first(completion_ids, **columns):
        return [float(sum(ids[:2])) for ids in completion_ids]

    def loss(config):
        rounds = Rollouts(
            actor, Signs(), ["1+1", "2+2", "3+3", "4+4"], first, config, batch_size=64
        )
        for seed in range(3):
            batch = rounds.collect([0, 1, 2, 3], seed)  # The first has no average yet
        noise = torch.randn(batch["labels"].shape, generator=torch.Generator().manual_seed(0))
        batch["old_log_probs"] = batch["old_log_probs"] + noise
        batch["ref_log_probs"] = batch["ref_log_probs"] - noise
        if method == "ppo":
            batch["values"] = batch["values"] + noise
        total = rl_objective(config)(actor, batch).total
        return [
            total,
            *torch.autograd.grad(
                total, [p for p in actor.parameters() if p.requires_grad], allow_unused=True
            ),
        ]

    def make(**more):
        return RLConfig(
            method,
            num_prompts=4,
            num_generations=4,
            max_completion_length=5,
            num_iterations=2,
            beta=0.1,
            **more,
        )

    usual = loss(make())
    for name, value in READ.items():
        config = make()
        setattr(config, name, value)  # Nothing is checked here
        loss_value = loss(config)
        same = all(
            (a is None and b is None) or torch.equal(a, b)
            for a, b in zip(usual, loss_value, strict=True)
        )
        if same:
            with pytest.raises(ConfigError, match=f"{name} = .*has no effect"):
                make(**{name: value})
        else:
            make(**{name: value})
    assert make(kl_in_reward=False, kl_estimator="k2").method == method


@pytest.mark.parametrize(
    "method, knobs",
    [("grpo", {}), ("grpo", {"epsilon_high": 0.5}), ("reinforce", {}), ("rloo", {})],
)
def test_what_is_logged_follows_from_its_formulas(method, knobs):
    "Ratio, clipped share, distance and rewards, from differences of log-probabilities set here."
    model, batch = llama(), answers()[0]
    mask = batch["labels"] != -100
    shape, count = mask.shape, int(mask.sum())
    scores = token_scores(model, batch)
    moved = (
        torch.tensor([0.0, 0.3, -0.3, 0.1]).repeat(mask.numel())[: mask.numel()].view(shape) * mask
    )
    apart = torch.tensor([0.5, -0.25, 0.0]).repeat(mask.numel())[: mask.numel()].view(shape)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.0, 1.0])
    rewards = torch.tensor([1.0, float("nan"), 3.0, 0.0, 0.0, 2.0, 0.0, 1.0])
    log_probs = scores.log_probs.detach()
    loss = rl_objective(RLConfig(method, num_generations=2, beta=0.1, kl_in_reward=False, **knobs))(
        model,
        batch
        | dict(advantages=advantages, rewards=rewards, old_log_probs=log_probs - moved)
        | dict(ref_log_probs=log_probs - apart),
    )
    high = knobs.get("epsilon_high", 0.2)
    if method == "rloo":  # One ratio for a whole answer
        moved = moved.sum(1, keepdim=True).expand(shape)
    gained = (moved.exp() > 1 + high) & (advantages[:, None] > 0)
    clipped = gained | (moved.exp() < 0.8) & (advantages[:, None] < 0)
    wanted = dict(
        ratio=(moved.exp() * mask).sum() / count,
        clip_fraction=(clipped & mask).sum() / count,
        kl=(((-apart).exp() + apart - 1) * mask).sum() / count,
        entropy=(scores.entropy * mask).sum() / count,
        completion_length=count / 8,
        rewards=1.0,  # Of the seven to which it applies
    )
    logged = {name: float(total / number) for name, (total, number) in loss.metrics.items()}
    assert logged == pytest.approx({k: float(v) for k, v in wanted.items()}, abs=1e-5)
    assert 0 < logged["clip_fraction"] < 1


def test_a_prompt_leaves_room_for_its_answer():
    "Sixty tokens and four of an answer are the context of 64; the message names what is left."
    config = RLConfig("reinforce", num_prompts=1, max_completion_length=4)
    Rollouts(llama(), None, [[3] * 60], lambda **_: [], config)
    with pytest.raises(ValueError, match="prompt 1 has 61 tokens.*room for 60"):
        Rollouts(llama(), None, [[3], [3] * 61], lambda **_: [], config)


@pytest.mark.parametrize("shift", [True, False])
def test_whitened_numbers_by_hand(shift):
    "Standard deviation 1 within the mask, with one number less in its divisor; 0 outside."
    from trainkit.align.rl import whiten

    x = torch.tensor([[1.0, 2.0, 9.0], [3.0, 6.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    inside = torch.tensor([1.0, 2.0, 3.0, 6.0])
    wanted = (inside - 3) / inside.std() + (0 if shift else 3)
    white = whiten(x, mask, shift)
    assert torch.allclose(white[mask.bool()], wanted, atol=1e-5) and not white[:, 2].any()
    alone = whiten(torch.tensor([[5.0, 7.0]]), torch.tensor([[1, 0]]), shift)
    assert alone.tolist() == [[0.0 if shift else 5.0, 0.0]]


def test_scores_of_a_model_that_computes_in_bfloat16_by_itself():
    "accelerate switches mixed precision on inside of the model, and not where it is scored."
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=40, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=16)
    model = Transformer(config).eval()
    ids = torch.randint(0, 40, (2, 9))
    labels = ids.clone()
    labels[:, 0] = -100
    batch = dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))
    with torch.no_grad():
        exact = token_scores(model, batch, 1.0).log_probs
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        rounded = token_scores(model, batch, 1.0).log_probs
    assert rounded.dtype == torch.float32 and 0 < (rounded - exact).abs().max() < 0.05


@pytest.mark.parametrize("impossible", [False, True])
def test_the_scores_of_logits_are_those_of_a_distribution(impossible):
    "Also where some tokens cannot be drawn; the gradient is that of the log-probability."
    from trainkit.align.policy import _LogProb

    torch.manual_seed(0)
    logits = torch.randn(6, 9, dtype=torch.float64)
    ids = torch.randint(0, 9, (6,))
    if impossible:
        logits[torch.arange(6), (ids + 1) % 9] = -torch.inf
    given = logits.clone().requires_grad_()
    log_probs, entropy = _LogProb.apply(given, ids)
    theirs = logits.clone().requires_grad_()
    wanted = torch.log_softmax(theirs, -1).gather(-1, ids[:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, wanted, rtol=0, atol=1e-13)
    nats = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    torch.testing.assert_close(entropy, nats, rtol=0, atol=1e-12)
    (log_probs * torch.arange(6)).sum().backward()
    (wanted * torch.arange(6)).sum().backward()
    torch.testing.assert_close(given.grad, theirs.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("80779853377", "80779853376", False),
        ("12345678901234567891", 12345678901234567890, False),
        ("1,234,567", 1234567, True),
        ("12,3", "1,23", False),
        ("1,2,3", "123", False),
        ("(1, 23)", "(12, 3)", False),
        ("Paris, France.", "paris france", True),
        ("0.3333333333", "0.33333333333", True),
        ("4.0", 4, True),
        ("1e3", "1000", True),
        ("nan", "NaN", True),
        ("inf", "Infinity", True),
        ("seven", "7", False),
    ],
)
def test_answers_are_the_same_number_or_the_same_words(answer, expected, same):
    assert same_answer(answer, expected) is same


def test_numbers_beyond_a_float_are_counted_apart():
    assert answer_value("9007199254740993") != answer_value("9007199254740992.0")
    assert answer_value("1,200") == 1200.0


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "dr_grpo"])
def test_a_step_of_answers_that_were_all_cut_off_moves_nothing(loss_type):
    config = RLConfig(loss_type=loss_type, mask_truncated_completions=True)
    model = llama()
    batch = dict(
        input_ids=torch.tensor([[1, 2, 3], [1, 2, 4]]),
        labels=torch.full((2, 3), -100),
        attention_mask=torch.ones(2, 3, dtype=torch.long),
        advantages=torch.tensor([1.0, -1.0]),
    )
    trainer = Trainer(
        model,
        rl_objective(config),
        [batch],
        config=TrainConfig(max_steps=1, progress=False, mixed_precision="no"),
        optim=OptimConfig(weight_decay=0.0),
    )
    before = {name: w.clone() for name, w in model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    if loss_type == "dapo":  # Where no answer may be left out, it is an error as it was
        with pytest.raises(NothingToLearn):
            count_window(rl_objective(RLConfig(loss_type=loss_type)), [batch])


@pytest.mark.parametrize("whiten", [{}, {"whiten_advantages": True, "whiten_rewards": True}])
def test_a_round_of_ppo_whose_answers_were_all_cut_off_moves_nothing(whiten):
    "Nothing ends within four tokens, so no answer is learned; the run continues."

    class Numbers(Signs):
        def decode(self, ids, skip_special_tokens=True):
            return " ".join(map(str, ids))

    model = ActorCritic(llama())
    config = RLConfig(
        "ppo",
        num_prompts=2,
        num_generations=2,
        max_completion_length=4,
        mask_truncated_completions=True,
        **whiten,
    )

    def reward(completion_ids, **_):
        assert all(12 not in ids for ids in completion_ids)
        return [1.0, 0.0] * 2

    rollouts = Rollouts(model, Numbers(), ["1+", "3"], reward, config)
    settings = TrainConfig(max_steps=2, logging_steps=1, progress=False, mixed_precision="no")
    before = {name: w.clone() for name, w in model.state_dict().items()}
    done = Trainer(
        model,
        rl_objective(config),
        rollouts,
        config=settings,
        optim=OptimConfig(weight_decay=0.0),
    ).train()
    assert [record["loss"] for record in done.history] == [0.0, 0.0]
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


@pytest.mark.parametrize("reference", ["copy", "adapter"])
@pytest.mark.parametrize("mixed", ["bf16", "fp16"])
def test_a_model_that_has_not_moved_is_its_own_reference_in_half_precision(mixed, reference):
    "Old, new and reference log-probabilities are rounded alike, so ratios are exactly 1."
    torch.manual_seed(0)
    shape = dict(vocab_size=40, d_model=32, n_heads=4, n_layers=2, d_ff=64, max_seq_len=64)
    model = Transformer(ModelConfig(**shape, init_std=0.3))
    if reference == "adapter":
        model = add_lora(model, LoRAConfig(r=2))
    config = RLConfig(
        num_prompts=1, num_generations=4, max_completion_length=8, beta=0.1, num_iterations=2
    )
    rollouts = Rollouts(
        model,
        None,
        [[1, 2], [3]],
        lambda completion_ids, **_: [1.0, 0.0] * 2,
        config,
        reference=reference,
    )
    done = Trainer(
        model,
        rl_objective(config),
        rollouts,
        config=TrainConfig(max_steps=3, logging_steps=1, progress=False, mixed_precision=mixed),
        optim=OptimConfig(learning_rate=0.0, weight_decay=0.0, lr_scheduler_type="constant"),
    ).train()
    for record in done.history:
        assert (record["ratio"], record["kl"], record["clip_fraction"]) == (1.0, 0.0, 0.0)


def test_the_head_of_the_values_is_no_hidden_matrix():
    "Muon, which gives each update one length, leaves it to AdamW."
    names = hidden_matrices(ActorCritic(llama()))
    assert names and "value_head.weight" not in names


def test_the_terms_of_ppo_have_their_weights():
    critic = ActorCritic(llama())
    ids = torch.tensor([[1, 2, 3, 4]])
    labels = torch.tensor([[-100, -100, 3, 4]])
    batch = dict(
        input_ids=ids,
        labels=labels,
        attention_mask=torch.ones_like(ids),
        advantages=torch.tensor([[0.0, 0.0, 1.0, -0.5]]),
        values=torch.zeros(1, 4),
        returns=torch.ones(1, 4),
        old_log_probs=torch.full((1, 4), -2.0),
    )
    terms = rl_objective(RLConfig(method="ppo", vf_coef=0.25))(critic, batch).terms
    assert {name: weight for name, (_, _, weight) in terms.items()} == {
        "policy_loss": 1.0,
        "value_loss": 0.25,
    }


# --- the formulas of reinforcement learning, number by number


def random_mask(rows=6, length=9):
    "Answers with questions before them and between them, one of a single token, one of none."
    mask = torch.zeros(rows, length)
    for row, places in enumerate(((1, 2, 3), (4,), (), (2, 3, 6, 7, 8), (0, 8), (5, 6, 7))):
        mask[row, list(places)] = 1
    return mask


def test_advantages_within_a_group_by_hand():
    nan = float("nan")
    rewards = torch.tensor([1.0, 4, 2, 0.5, 0.5, 0.5, nan, 3, 5, nan, nan, 7])
    groups, taught = rewards.view(4, 3).tolist(), []
    relative, alone, known = [], [], [r for r in rewards.tolist() if r == r]
    for group in groups:
        judged = [r for r in group if r == r]
        mean = sum(judged) / len(judged)
        for r in group:
            relative.append(r - mean if r == r else 0)
            others = sum(judged) - r if r == r else 0
            alone.append(r - others / (len(judged) - 1) if r == r and len(judged) > 1 else 0)
            taught.append(len({*judged}) == 1)
    assert group_relative(rewards, 3, "none").tolist() == pytest.approx(relative)
    spread = float(np.std(known, ddof=1)) + 1e-4
    batch = [r / spread for r in relative]
    assert group_relative(rewards, 3, "batch").tolist() == pytest.approx(batch, rel=1e-5)
    own = []
    for i, group in enumerate(groups):
        judged = [r for r in group if r == r]
        std = float(np.std(judged, ddof=1)) if len(judged) > 1 else 1
        own += [r / (std + 1e-4) for r in relative[3 * i : 3 * i + 3]]
    assert group_relative(rewards, 3).tolist() == pytest.approx(own, rel=1e-5)
    small = group_relative(torch.tensor([0.0, 2e-4]), 2).tolist()  # 1e-4 counts beside its 1.4e-4
    assert small == pytest.approx([-1 / (2**0.5 + 1), 1 / (2**0.5 + 1)], rel=1e-5)
    assert leave_one_out(rewards, 3).tolist() == pytest.approx(alone)
    assert zero_std_groups(rewards, 3).tolist() == taught


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_returns_and_advantages_by_hand(gamma, lam):
    "Each answer's tokens in a row, whatever stands between them."
    torch.manual_seed(0)
    mask, rewards = random_mask(), torch.randn(6, 9)
    values = torch.randn(6, 9)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    discounted = discount(rewards, mask, gamma)
    expected, sums = torch.zeros(6, 9), torch.zeros(6, 9)
    for row in range(6):
        places = mask[row].nonzero().flatten().tolist()
        for i, t in enumerate(places):
            for n, later in enumerate(places[i:]):
                after = values[row, places[i + n + 1]] if i + n + 1 < len(places) else 0
                delta = rewards[row, later] + gamma * after - values[row, later]
                expected[row, t] += (gamma * lam) ** n * delta
                sums[row, t] += gamma**n * rewards[row, later]
    assert torch.allclose(advantages, expected, atol=1e-5)
    assert torch.allclose(returns, expected + values * mask, atol=1e-5)
    assert torch.allclose(discounted, sums, atol=1e-5)


def test_means_and_averages_over_tokens_and_answers():
    torch.manual_seed(0)
    x, mask = torch.randn(6, 9), random_mask()
    chosen = x[mask.bool()]
    assert torch.allclose(masked_mean(x, mask), chosen.mean(), atol=1e-6)
    assert masked_mean(x, mask * 0) == 0
    one = torch.zeros(6, 9)
    one[2, 3] = 1
    assert torch.allclose(masked_mean(x, one), x[2, 3])
    for shift in (True, False):
        single = whiten(x, one, shift)
        assert torch.allclose(single, one * 0 if shift else x * one, atol=1e-6)
        assert whiten(x, mask * 0, shift).abs().sum() == 0
        pair = torch.tensor([[3.0, 3.0002, 9.0]])
        white = whiten(pair, torch.tensor([[1.0, 1, 0]]), shift)  # 1e-8 beside a variance of 2e-8
        bound = 1e-4 / (3e-8) ** 0.5
        rest = 0 if shift else 3.0001
        assert white[0].tolist() == pytest.approx([rest - bound, rest + bound, 0], abs=0.01)
    batch = dict(labels=torch.where(mask.bool(), 5, -100))
    rows = [x[i][mask[i].bool()] for i in range(6)]
    for loss_type, total, count in (
        ("grpo", sum(row.mean() for row in rows if len(row)), 6),
        ("dapo", chosen.sum(), 14),
        ("cispo", chosen.sum(), 14),
        ("dr_grpo", chosen.sum() / 12, 6),
    ):
        add, counting = _averaging(SimpleNamespace(max_completion_length=12, loss_type=loss_type))
        assert torch.allclose(add(x, mask), total, atol=1e-5) and counting(batch) == count


def test_clipped_losses_by_hand():
    numbers = (-0.9, -0.3, -0.1, 0.0, 0.1, 0.25, 0.8)
    for log_ratio in numbers:
        for advantage in (-2.0, 0.0, 3.0):
            for low, high in ((0.2, None), (0.2, 0.3), (0.1, 0.0)):
                ratio = np.exp(log_ratio)
                bounded = min(max(ratio, 1 - low), 1 + (low if high is None else high))
                expected = max(-ratio * advantage, -bounded * advantage)
                found = clipped_surrogate(
                    torch.tensor([[log_ratio]]), torch.tensor([[advantage]]), low, high
                )
                assert float(found) == pytest.approx(expected, rel=1e-5)
    for value in numbers:
        for old in (-0.5, 0.0, 0.4):
            for bound in (0, 0.2, 0.7):
                moved = old + min(max(value - old, -bound), bound) if bound else value
                expected = max((value - 1) ** 2, (moved - 1) ** 2) / 2
                found = clipped_value_loss(*map(torch.tensor, (value, old, 1.0)), bound)
                assert float(found) == pytest.approx(expected, rel=1e-5)
    assert float(clipped_surrogate(torch.tensor(0.5), torch.tensor(1.0))) == pytest.approx(-1.2)
    assert float(clipped_value_loss(*map(torch.tensor, (1.0, 0.0, 1.0)))) == pytest.approx(0.32)


@pytest.mark.parametrize("loss_type, epsilon", [("grpo", 0.0), ("cispo", 1.0)])
def test_a_ratio_on_the_border_is_not_clipped(loss_type, epsilon):
    "Nor is a token without advantage."
    labels = torch.tensor([[-100, 5, 5], [-100, 5, 5], [-100, 5, 5]])
    config = RLConfig("grpo", loss_type=loss_type, epsilon=epsilon, epsilon_high=epsilon)
    scores = SimpleNamespace(entropy=torch.ones(3, 3) * (labels != -100))
    batch = dict(labels=labels, advantages=torch.tensor([-1.0, 1.0, 0.0]))
    for log_ratio, clipped in ((0.0, 0), (0.5, 2), (-0.5, 0 if loss_type == "cispo" else 2)):
        found = _metrics(batch, scores, torch.full((3, 3), log_ratio), config)
        assert tuple(map(int, found["clip_fraction"])) == (clipped, 6)
        assert float(found["ratio"][0]) == pytest.approx(6 * np.exp(log_ratio))
        assert tuple(map(int, found["completion_length"])) == (6, 3)


# --- rounds of answers and their batches


def small(**knobs):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=13, d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=64)
    return Transformer(config.replace(**knobs) if knobs else config)


def rounds(prompts=7, reward=lambda completion_ids, **_: [0.0] * len(completion_ids), **knobs):
    "Prompt i is i + 1 tokens long."
    batch_size = knobs.pop("batch_size", None)
    config = RLConfig(**{"method": "grpo", "max_completion_length": 5, **knobs})
    model = ActorCritic(small()) if config.method == "ppo" else small()
    ids = [[i] * (i + 1) for i in range(prompts)]
    return Rollouts(model, None, ids, reward, config, batch_size)


def test_an_epoch_takes_each_prompt_once_and_each_answer_once_an_iteration(monkeypatch):
    source = rounds(num_prompts=3, num_generations=2, num_iterations=2, batch_size=4)
    assert source.sizes() == [4, 4, 2] and len(source) == 10
    order = source.order(0)
    assert [len(part) for part in order] == [3, 3, 1] and order != source.order(1)
    assert sorted(sum(order, [])) == [*range(7)]

    def collect(which, seed):
        assert which == source.order(source.epoch)[len(asked) % 3]
        asked.append(seed)
        rows = torch.tensor([[i, k] for i in which for k in range(2)])
        return dict(labels=rows, attention_mask=torch.ones_like(rows))

    asked = []
    monkeypatch.setattr(source, "collect", collect)
    for epoch in range(2):
        batches = [[tuple(row) for row in batch["labels"].tolist()] for batch in source]
        assert [*map(len, batches)] == [4, 2, 4, 2, 4, 2, 4, 2, 2, 2]
        start = 0
        for part in source.order(epoch):
            every = sorted((i, k) for i in part for k in range(2))
            count = -(-len(every) // 4)
            first, second = batches[start : start + count], batches[start + count :][:count]
            assert sorted(sum(first, [])) == sorted(sum(second, [])) == every
            assert len(every) == 2 or first != second
            start += 2 * count
        assert (source.epoch, source.index) == (epoch + 1, 0)
    assert len({*asked}) == 6


def test_the_largest_batch_is_of_the_longest_prompts_and_answers():
    source = rounds(num_prompts=2, num_generations=3, batch_size=5)
    batch = source.largest()
    assert batch["input_ids"].shape == (5, 7 + 5) and len(source.largest(2)["labels"]) == 2
    lengths = (batch["labels"] == -100).sum(1) - (~batch["attention_mask"].bool()).sum(1)
    assert lengths.tolist() == [7, 7, 7, 6, 6] and len(source.largest(99)["labels"]) == 5
    assert {*batch} == {
        *("input_ids", "labels", "attention_mask", "reward", "advantages", "old_log_probs")
    }
    assert batch["advantages"].shape == (5,)
    few = rounds(2, num_prompts=4, num_generations=3).largest()
    assert len(few["labels"]) == 6 and "old_log_probs" not in few
    plain = rounds(num_prompts=2, num_generations=3, top_p=0.9, beta=0.1).largest()
    assert plain["kept"].shape == (6, 12, 2) and plain["ref_log_probs"].shape == (6, 12)
    assert rounds(num_prompts=1, num_generations=2, top_k=5).largest()["kept"].min() == 255
    critic = rounds(method="ppo", num_prompts=2, num_generations=1).largest()
    assert critic["advantages"].shape == critic["values"].shape == critic["returns"].shape


@pytest.mark.parametrize(
    "knobs, answers, needed",
    [
        ({}, 8, False),
        ({}, 9, True),
        (dict(num_iterations=2), 8, True),
        (dict(old_log_probs="sampler"), 8, True),
        (dict(method="ppo", num_generations=1), 1, True),
        (dict(beta=0.1), 8, False),
        (dict(beta=0.1, method="rloo"), 8, True),  # The divergence is paid out of the reward
    ],
)
def test_when_the_log_probabilities_before_the_step_are_computed(knobs, answers, needed):
    assert rounds(batch_size=8, **knobs)._needs_old_log_probs(answers) is needed


@pytest.mark.parametrize("rows, longest, packed", [(8, 32, False), (9, 32, True), (9, 31, False)])
def test_from_how_many_rows_and_tokens_weights_are_rearranged(rows, longest, packed):
    source = rounds(max_completion_length=longest)
    usable = torch.backends.mkldnn.is_available()
    assert source._weights_copy(rows, source.policy) == ("packed" if packed and usable else None)
    assert source.widths(1) == {(source.batch_size, n + 1 + longest) for n in range(7)}
    few = rounds(max_completion_length=longest, batch_size=2)
    assert few.widths(2) == {(2, n + 1 + longest) for n in range(4)}


def test_the_memory_of_a_round_is_taken_with_its_number_of_rows(monkeypatch):
    from trainkit.align import rollouts

    def decode(policy, prompts, sampling, fast):
        asked.append((len(prompts), len(prompts[0]), sampling.max_new_tokens, fast))
        for token in range(5):
            taken.append(token)
            yield token

    asked, taken = [], []
    monkeypatch.setattr(rollouts, "decode_rows", decode)
    source = rounds(num_prompts=3, num_generations=2)
    source.begin(source.model, source.largest())
    rounds(2, num_prompts=3, num_generations=2).begin(source.model, pack_answers([[1]], [[2, 3]]))
    assert asked == [(6, 7, 5, False), (4, 1, 2, False)] and taken == [0, 1, 0, 1]


@pytest.mark.parametrize("most", range(3))
def test_questions_that_teach_nothing_are_replaced_in_their_place(most, monkeypatch):
    "Answers to even prompts are all alike; those that come instead stand where the others stood."

    def reward(completion_ids, **_):
        return [float(ids[0] % 2 * ids[1]) for ids in completion_ids]

    source = rounds(20, reward, num_prompts=4, num_generations=3, dynamic_sampling=most)
    asked = []

    def play(rows, seed):
        asked.append(rows[::3])
        episodes = [Episode([*source.prompt_ids[i]]) for i in rows]
        for k, (episode, row) in enumerate(zip(episodes, rows, strict=True)):
            episode.write(Answer([row % 12, k % 3], [0.0] * 2, []))
        return episodes

    monkeypatch.setattr(source, "_play", play)
    first = [1, 2, 4, 3]
    source.collect(first, 7)
    everything = sum(asked, [])
    assert len({*everything}) == len(everything)  # None is asked twice
    expected = [*first]
    for more in asked[1:]:
        places = [i for i, prompt in enumerate(expected) if prompt % 2 == 0]
        assert len(more) == len(places) and len(asked) <= most + 1
        good = [prompt for prompt in more if prompt % 2]
        for place, prompt in zip(places, good, strict=False):
            expected[place] = prompt
    assert [len(sample["prompt"]) - 1 for sample in source.samples] == [
        prompt for prompt in expected for _ in range(3)
    ]
    assert [sample["reward"] for sample in source.samples] == [
        float(prompt % 2 * k) for prompt in expected for k in range(3)
    ]
    assert most == 0 or len(asked) > 1


@pytest.mark.parametrize("whitened", [False, True])
def test_rewards_of_ppo_are_paid_at_the_last_token(whitened):
    "The price of the divergence where it is, the rewards of an environment at each answer."
    torch.manual_seed(0)
    source = rounds(
        method="ppo",
        num_generations=1,
        gamma=0.9,
        lam=0.8,
        whiten_rewards=whitened,
        whiten_advantages=whitened,
    )
    mask, values = random_mask(), torch.randn(6, 9)
    price, steps = torch.randn(6, 9) * mask, torch.randn(6, 9) * mask
    rewards = torch.tensor([1.0, -2, 3, 4, float("nan"), 6])
    for paid in (None, steps):
        found = source.compare(dict(values=values * mask), mask, rewards, price, paid)
        judged = mask.clone()
        judged[4] = 0
        tokens = -price.clone()
        for row in (0, 1, 3, 5):
            last = int(mask[row].nonzero().max())
            tokens[row, last] += rewards[row] - (0 if paid is None else paid[row].sum())
            tokens[row] += 0 if paid is None else paid[row] * mask[row]
        if whitened:
            tokens = whiten(tokens, judged, shift=False)
        advantages, returns = gae(tokens, values * mask, judged, 0.9, 0.8)
        if whitened:
            advantages = whiten(advantages, judged)
        returns[4] = values[4] * mask[4]
        assert torch.allclose(found["advantages"], advantages, atol=1e-5)
        assert torch.allclose(found["returns"], returns, atol=1e-5)


@pytest.mark.parametrize("start, index, baseline, left", [(0, 5, 3.0, 3), (0, 4, 2.0, 1)])
def test_a_place_before_the_last_round_has_the_baseline_of_then(start, index, baseline, left):
    source = rounds(method="reinforce", num_prompts=1, num_generations=1)
    source.baselines = [(0, 0, 1.0), (0, 3, 2.0), (0, 5, 2.5)]
    source.baseline, source.index = 3.0, index
    state = source.state_dict()
    fresh = rounds(method="reinforce", num_prompts=1, num_generations=1)
    fresh.load_state_dict(state)
    assert (fresh.baseline, len(fresh.baselines), fresh.index) == (baseline, left, index)


def test_no_room_for_a_prompt_is_an_error():
    model = small()
    with pytest.raises(ValueError, match="takes the whole context of the model"):
        Rollouts(model, None, [[1]], lambda **_: [], RLConfig(max_completion_length=64))
    Rollouts(model, None, [[1]], lambda **_: [], RLConfig(max_completion_length=63))
    with pytest.raises(ValueError, match="there are no prompts"):
        Rollouts(model, None, [], lambda **_: [])


@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_answers_of_another_sampler_weigh_what_they_are_likelier_here_up_to_a_cap(method):
    "RLOO weights an answer as a whole, by exp(0.3 + 0.1) or the cap 1.2; GRPO each token."
    model = llama()
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 4, 3]])
    labels = ids.masked_fill(torch.tensor([True, True, False, False]), -100)
    mask = labels != -100
    gap = torch.tensor([[0.0, 0.0, 0.3, 0.1], [0.0, 0.0, -0.2, 0.1]])
    batch = dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))
    log_probs = token_scores(model, batch).log_probs.detach()
    batch |= dict(advantages=torch.tensor([1.0, -2.0]), old_log_probs=log_probs)
    batch |= dict(sampling_log_probs=log_probs - gap * mask)
    config = RLConfig(
        method,
        num_generations=2,
        importance_sampling_cap=1.2,
        sampler_weights="q8_0",
        entropy_coef=0.5,
        beta=0.0,
    )
    terms = rl_objective(config)(model, batch).terms
    if method == "rloo":  # -(1.2·1 + exp(-0.1)·(-2)), of two answers
        wanted, n = -1.2 + 2 * np.exp(-0.1), 2
    else:  # Means over the tokens of each answer
        wanted, n = -(1.2 + np.exp(0.1)) / 2 + 2 * (np.exp(-0.2) + np.exp(0.1)) / 2, 2
    assert float(terms["policy_loss"][0]) == pytest.approx(wanted, rel=1e-5)
    assert int(terms["policy_loss"][1]) == n
    total, tokens, weight = terms["entropy_loss"]
    entropy = token_scores(model, batch).entropy[mask].sum()
    assert float(total) == pytest.approx(-float(entropy)) and (int(tokens), weight) == (4, 0.5)


def test_on_a_cpu_a_round_takes_the_memory_of_merged_weights(monkeypatch):
    "And of a copy of all of them where they are rearranged."
    from trainkit.align import rollouts

    merged, copied = [], []
    real = torch.empty_like

    def merge(policy):
        merged.append(policy)
        return nullcontext()

    def copy_of(p):
        copied.append(p)
        return real(p)

    monkeypatch.setattr(rollouts, "decode_rows", lambda *_, **__: (i for i in range(5)))
    monkeypatch.setattr(rollouts, "merged_lora", merge)
    source = rounds(num_prompts=3, num_generations=2)
    monkeypatch.setattr(source, "_weights_copy", lambda count, policy: count == 6)
    monkeypatch.setattr(torch, "empty_like", copy_of)
    source.begin(source.model, source.largest())
    assert merged == [source.model] and len(copied) == len({*source.model.parameters()})


@pytest.mark.parametrize("learn", [True, False])
def test_scores_of_a_large_vocabulary_are_computed_64_tokens_at_a_time(learn):
    "100 tokens of 8,192 words in two parts: the values and gradients of the whole matrix."
    torch.manual_seed(0)
    hidden = torch.randn(100, 4, requires_grad=True)
    weight = torch.randn(8192, 4, requires_grad=True)
    ids = torch.randint(8192, (100,))
    with warnings.catch_warnings(), torch.set_grad_enabled(learn):
        warnings.simplefilter("error")
        found = _LogProbFromHidden.apply(hidden, weight, ids, 0.7, learn)
        every = (hidden @ weight.T / 0.7).log_softmax(-1)
    log_probs = every.gather(1, ids[:, None])[:, 0]
    for ours, exact in zip(found, (log_probs, -(every.exp() * every).sum(1)), strict=True):
        assert torch.allclose(ours, exact, atol=1e-4)
    if learn:
        slopes = [
            torch.autograd.grad(x.square().sum(), (hidden, weight), retain_graph=True)
            for x in (found[0], log_probs)
        ]
        for ours, exact in zip(*slopes, strict=True):
            assert torch.allclose(ours, exact, atol=1e-2, rtol=1e-3)
