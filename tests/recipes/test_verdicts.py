"What a run says of its model: answers, pairs, thumbs, and what a rehearsal would cost."

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainkit import system
from trainkit.recipes import evaluation, memory_commands, runner, saving
from trainkit.recipes.config import method_config
from trainkit.recipes.evaluation import AnswerEvaluator, ModelAnswer, PairEvaluator, ask
from trainkit.recipes.runner import Rehearsal


class Echo:
    "Speaks numbers; 0 ends an answer."

    eos_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return " " + " ".join(str(i) for i in ids if i) + " "


def test_an_answer_has_half_as_many_tokens_again_as_the_expected_one(monkeypatch):
    "But fits into the context; it has ended where it says so itself."
    calls = []

    def generate(model, rows, room, temperature, tokenizer):
        calls.append((len(rows), room, temperature))
        return [[*row, 7, *([0] if len(row) % 2 else [8])] for row in rows]

    monkeypatch.setattr(evaluation, "generate", generate)
    monkeypatch.setattr(evaluation, "context_length", lambda model: 20)
    questions = [dict(ids=[1] * n, tokens=t) for n, t in ((3, 2), (2, 5), (5, 3), (19, 9), (20, 9))]
    answers = ask(None, Echo(), questions, batch_size=2)
    assert answers == ["7", "7 8", "7", "7", "7 8"]
    assert [a.ended for a in answers] == [True, False, True, True, False]
    assert calls == [(2, 7, 0), (2, 1, 0), (1, 1, 0)]


def judged(ended, count=4):
    questions = [dict(prompt=f"q{i}", expected=f" a{i}") for i in range(count)]
    judge = SimpleNamespace(
        inputs=SimpleNamespace(
            model=None,
            tokenizer=None,
            questions=questions,
            config=SimpleNamespace(sft=SimpleNamespace(samples=0)),
        ),
        before=["a0", *["no"] * (count - 1)],
    )
    answers = [ModelAnswer(f"a{i} " if i < 3 else "no") for i in range(count)]
    for i, answer in enumerate(answers):
        answer.ended = i < ended
    return judge, answers


@pytest.mark.parametrize("ended, cut", [(0, True), (1, True), (2, False), (4, False)])
def test_what_is_said_of_held_out_answers(ended, cut, monkeypatch):
    "Where most of them never ended, the message advises what to do."
    judge, answers = judged(ended)
    monkeypatch.setattr(evaluation, "ask", lambda *_: answers)
    monkeypatch.setattr(
        evaluation.TextEvaluator, "end", lambda self, record: ({"eval_loss": 2.0}, ["Loss: 2.000"])
    )
    judge = type("Judge", (AnswerEvaluator,), dict(__init__=lambda self, **kw: None))()
    made, _ = judged(ended)
    judge.inputs, judge.before = made.inputs, made.before
    metrics, words = judge.end({"eval_loss": 2.0})
    assert metrics == dict(eval_loss=2.0, base_exact_match=0.25, exact_match=0.75, ended=ended / 4)
    assert words[0] == (
        "Loss: 2.000. Of 4 held-out questions the base model answers 25.0% exactly right, "
        f"the tuned one 75.0%; it ended {ended} of its answers by itself"
    )
    assert (len(words) == 2) is cut and ("cut off at the limit" in words[-1]) is cut


def test_the_accuracy_on_pairs_is_drawn_in_percent(monkeypatch):
    drawn = []
    monkeypatch.setattr(evaluation, "draw_svg", lambda chart, *a, **k: drawn.append(a) or "svg")
    run = SimpleNamespace(keys=lambda: ["rewards/chosen", "loss"], series=lambda key: key)
    judge = SimpleNamespace(inputs=SimpleNamespace(pairs=[]), before=(0.25, 0), after=(0.75, 0))
    headings = [heading for heading, _ in PairEvaluator.sections(judge, run)]
    assert headings == ["Held-out pairs", "Rewards"]
    assert drawn[0] == ({"before": 25.0, "after": 75.0}, "Accuracy", "%")
    assert drawn[1][0] == {"chosen": "rewards/chosen"}
    judge.before, judge.inputs.pairs = None, SimpleNamespace(report=None)
    assert len(PairEvaluator.sections(judge)) == 1
    assert drawn[2] == ({"before": 0, "after": 75.0}, "Accuracy", "%")
    judge.after = None
    assert PairEvaluator.sections(judge) == []


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_how_often_a_liked_answer_is_likelier(batch_size, monkeypatch):
    "By the token, over all twos; a tie counts half."
    rows = [
        dict(label=label, sum=total, count=count)
        for label, total, count in (
            (True, -2.0, 2),
            (False, -3.0, 1),
            (True, -6.0, 2),
            (False, -1.0, 1),
            (True, -0.5, 0),
        )
    ]

    def collate(part):
        pad = [*part, part[-1]]
        return dict(
            liked=torch.tensor([r["label"] for r in pad]),
            totals=torch.tensor([r["sum"] for r in pad]),
            counts=torch.tensor([r["count"] for r in pad]),
        )

    def log_probs(model, batch):
        assert {*batch} == {"totals", "counts"}
        return batch["totals"], batch["counts"]

    monkeypatch.setattr(evaluation, "collate_unpaired", collate)
    monkeypatch.setattr(evaluation, "sequence_log_probs", log_probs)
    model = torch.nn.Linear(1, 1)
    auc = evaluation.pairwise_auc(model, rows, batch_size)
    assert auc == (1 + 0.5 + 0.5 + 0 + 1 + 1) / 6
    assert math.isnan(evaluation.pairwise_auc(model, rows[::2], batch_size))


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (119.4, "119 s"),
        (120.0, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2.0 h"),
        (9000.0, "2.5 h"),
    ],
)
def test_what_a_rehearsal_says(seconds, shown):
    plan = Rehearsal(["Method  lora"], 1, 12345, 2, 0.12345, seconds, 3.0, 3_000_000, ["a note"])
    assert str(plan).splitlines() == [
        "Method  lora",
        "Batch      2 rows in a step; 12,345 tokens at most in 1 step",
        "Memory     3 MB at the peak of a step, predicted",
        f"Time       {shown}: 0.123 s a step, measured here; evaluations and samples come on top",
        "Note       a note",
    ]
    plan.memory = None
    assert "Memory     could not be predicted" in str(plan)
    plan.step_seconds = None
    assert str(plan).splitlines() == ["Method  lora", "Note       a note"]


@pytest.mark.parametrize("pad, batches", [(0, [2, 2, 1]), (None, [1] * 5)])
def test_a_reward_model_reads_the_end_of_a_long_prompt(pad, batches, monkeypatch):
    "The first token of a text stays; an answer loses its end only where it is too long alone."
    rows = [
        ([1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 5, 6], [7, 8]),
        ([9, 2, 3, 4, 5, 6], [7, 8]),
        ([1, 2, 3], [4, 5, 6, 7, 8, 9]),
        ([1, 2, 3], [4, 5, 6, 7]),
    ]
    tokenized = [
        dict(
            input_ids=np.array([*prompt, *answer, 0]),
            labels=np.array([*[-100] * len(prompt), *answer, -100]),
        )
        for prompt, answer in rows
    ]
    read, sizes = [], []

    class Judge(torch.nn.Linear):
        config = SimpleNamespace(pad_token_id=pad)

        def forward(self, ids, attention_mask):
            sizes.append(len(ids))
            for row, mask in zip(ids.tolist(), attention_mask.sum(1).tolist(), strict=True):
                read.append(row[:mask])
                assert not any(row[mask:])
            return SimpleNamespace(logits=ids.sum(1, keepdim=True))

    monkeypatch.setattr(saving, "tokenize_examples", lambda rows, tokenizer: tokenized)
    monkeypatch.setattr(saving, "context_length", lambda model: 5)
    tokenizer = SimpleNamespace(bos_token_id=1)
    with pytest.warns(UserWarning, match="4 of 5 texts are longer than the 5 tokens"):
        scores = saving.score_answers(Judge(1, 1), tokenizer, ["p"] * 5, ["c"] * 5, batch_size=2)
    assert read == [
        [1, 2, 3, 4, 5],
        [1, 5, 6, 7, 8],
        [4, 5, 6, 7, 8],
        [3, 4, 5, 6, 7],
        [3, 4, 5, 6, 7],
    ]
    assert scores == [sum(row) for row in read] and sizes == batches


@pytest.mark.parametrize(
    "train, saves",
    [
        ("async_save=false max_steps=9 save_steps=1", False),
        ("save_strategy=no max_steps=9", False),
        ("save_strategy=epoch max_steps=9", True),
        ("save_strategy=steps save_steps=8 max_steps=9", True),
        ("save_strategy=steps save_steps=9 max_steps=9", False),
        ("save_strategy=steps save_steps=9 max_steps=-1", True),
        ("save_strategy=steps save_steps=5 max_steps=1", False),
    ],
)
def test_whether_steps_are_taken_while_a_checkpoint_is_written(train, saves):
    words = [f"train.{word}" for word in train.split()]
    assert memory_commands._saves(method_config({"method": "sft"}, words)) is saves


@pytest.mark.parametrize(
    "method, steps, rows, kept",
    [
        ("pretrain", 3, 2, 10),
        ("sft", 3, 2, 60),
        ("sft", 1, 1, 10),
        ("sft", 50, 2, 640),
        ("sft", -1, 2, 640),
    ],
)
def test_how_many_products_keep_their_code(method, steps, rows, kept, monkeypatch):
    "Texts of other lengths ask for others, up to a bound."
    monkeypatch.setattr(system, "bound_kernels", lambda: 640)
    words = [f"train.max_steps={steps}", f"train.gradient_accumulation_steps={rows}"]
    config = method_config({"method": method}, words)
    assert memory_commands._products_kept(config, 10) == kept


@pytest.mark.parametrize(
    "method, new, words",
    [
        ("sft", 2, ""),
        ("lora", 0, ""),
        (
            "lora",
            1,
            "1 token that .* embedding and its head are trained too, and saved with the ad",
        ),
        ("reward", 2, "2 tokens that .* embedding is trained too, and saved with the adapter"),
        ("freeze", 2, "embedding and its head are trained too$"),
    ],
)
def test_new_tokens_are_trained_too(method, new, words):
    adapter = ["use_lora=true"] * (method == "reward")
    inputs = SimpleNamespace(new_tokens=new, config=method_config({"method": method}, adapter))
    lines = runner._new_tokens_note(inputs)
    assert len(lines) == bool(words) and (not words or re.search(words, lines[0]))


def test_a_rehearsal_of_another_program_counts_its_tokens(monkeypatch):
    monkeypatch.setattr(runner, "engine_line", lambda config: "llamafactory 1.0")
    monkeypatch.setattr(runner, "llamafactory_plan", lambda *_: (["one", "two", "three"], 50))
    words = ["train.per_device_train_batch_size=3", "train.gradient_accumulation_steps=2"]
    plan = runner._elsewhere(method_config({"method": "sft"}, [*words, "data.max_length=1000"]))
    assert (plan.steps, plan.tokens, plan.effective_batch) == (50, 300_000, 6)
    assert str(plan).splitlines() == [
        *("Engine     llamafactory 1.0", "one", "two"),
        "Training   50 steps of 6 rows of 1,000 tokens at most",
        *("three", "Note       memory and time cannot be predicted for a separate program"),
    ]
