"Where a demo resumes, what it expects to take, and how large its models are."

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from trainkit.config import dump_config
from trainkit.memory import estimate
from trainkit.recipes import demo, evaluation
from trainkit.recipes.config import method_config
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer


def finished(folder, status="complete", model=True, metrics=True):
    (folder / "model").mkdir(parents=True)
    if model:
        (folder / "model" / "config.json").write_text("{}")
    events = [dict(event="start", time="2026-01-01 10:00:00", step=0)]
    if status:
        events.append(dict(event="end", time="2026-01-01 10:00:09", step=3, reason=status))
    if metrics:
        text = "".join(json.dumps(record) + "\n" for record in events)
        (folder / "metrics.jsonl").write_text(text)
    return demo.is_done(folder)


def test_a_part_is_done_when_it_has_ended_and_left_a_model(tmp_path):
    assert finished(tmp_path / "a") and finished(tmp_path / "b", "max_steps")
    assert not finished(tmp_path / "c", None) and not finished(tmp_path / "d", "interrupted")
    assert not finished(tmp_path / "e", "terminated") and not finished(tmp_path / "f", model=False)
    assert not finished(tmp_path / "g", metrics=False)


def test_a_demo_resumes_in_the_last_folder_with_its_own_knobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, knobs = method_config({}, ["name=d"]), demo.DemoConfig()
    first = config.folder
    assert demo.find_demo(config, knobs) is None

    def begin(number, **notes):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config))
        (folder / "demo.json").write_text(json.dumps(notes))
        return folder

    one = begin(1)
    assert demo.find_demo(config, knobs) == one
    two = begin(2, demo=vars(knobs))
    assert demo.find_demo(config, knobs) == two
    begin(4, finished=True)  # A gap ends the search
    assert demo.find_demo(config, knobs) == two
    begin(3, finished=True)
    assert demo.find_demo(config, knobs) is None
    five = begin(5)
    assert demo.find_demo(config, knobs) == five
    assert demo.find_demo(method_config({}, ["name=d", "seed=9"]), knobs) is None
    begin(6, demo=dict(vars(knobs), seed="other"))
    assert demo.find_demo(config, knobs) is None


@pytest.mark.parametrize(
    "done, phase, minutes",
    [
        ({}, "pretrain", None),
        ({"other": 5}, "pretrain", None),
        ({"pretrain": 100}, "sft", (10 * 16 * 32 / 160 + 20 * 16 * 64 * 4 / 3 / 160 + 24) / 60),
        ({"pretrain": 100, "sft": 60}, "dpo", (20 * 16 * 64 * 4 / 3 * 160 / 21120 + 16) / 60),
        ({"pretrain": 100}, "compare", 8 / 60),
    ],
)
def test_the_minutes_that_are_left(done, phase, minutes):
    "By the tokens of each part: 100 x 4 x 40 first, then 10 and 20 steps of 16 rows."
    config = SimpleNamespace(
        model=SimpleNamespace(max_seq_len=64),
        train=SimpleNamespace(max_steps=100, per_device_train_batch_size=4),
        data=SimpleNamespace(max_length=40),
    )
    knobs = SimpleNamespace(tuning_steps=10, preference_steps=20)
    left = demo.minutes_left(config, knobs, done, phase)
    assert left == (None if minutes is None else pytest.approx(minutes))


def test_a_weight_that_two_layers_share_is_counted_once():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4))
    assert demo.model_bytes(model) == 64 + 64 + 16
    model[1].weight = model[0].weight
    assert demo.model_bytes(model) == 64 + 16


@pytest.mark.parametrize("length", [8, 64])
def test_the_bits_of_a_text_are_those_of_each_token_after_the_one_before(length):
    "However long the rows are; and a token of a chat format, which no text contains, costs none."
    tokenizer = BPETokenizer.train(
        ["some words, some more"], vocab_size=266, special_tokens=["<|end|>"]
    )
    size, texts = tokenizer.vocab_size, [{"text": "some é words"}, {"text": "more, some more"}]
    table = torch.randn(size + 3, size + 3, generator=torch.Generator().manual_seed(0))
    table[:, size:] = 20.0

    class Bigrams(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(table)

        def forward(self, ids):
            return SimpleNamespace(logits=self.table[ids])

    ids = [tokenizer.eos_token_id]
    for row in texts:
        ids += [*tokenizer.encode(row["text"]), tokenizer.eos_token_id]
    chances = torch.log_softmax(table[:, :size], -1)
    nats = -sum(float(chances[a, b]) for a, b in itertools.pairwise(ids))
    bits = nats / math.log(2) / sum(len(row["text"].encode()) for row in texts)
    assert demo.text_bits(Bigrams(), tokenizer, texts, length) == pytest.approx(bits, rel=1e-5)


def test_the_report_shows_the_share_of_right_answers_in_percent(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(evaluation, "draw_svg", lambda chart, *given, **_: drawn.append(given))
    for name, value in (("read_run", None), ("run_sections", [("Curves", "")])):
        monkeypatch.setattr(evaluation, name, lambda _, value=value: value)
    monkeypatch.setattr(evaluation, "write_report", lambda folder, name, sections: sections)
    folder, shares = SimpleNamespace(path=tmp_path), {"base_exact_match": 0.25, "exact_match": 0.5}
    page = evaluation.write_run_report(folder, "x", shares, {"training": 3.0}, [("More", "text")])
    assert [heading for heading, _ in page] == ["Curves", "Held-out questions", "More"]
    bits = {"bits_per_byte": 2.5, "gzip": 3.5, "eval_loss": 9.0, "perplexity": 8.0}
    evaluation.write_run_report(folder, "x", bits, {})
    times = ({"training": 3.0}, "Seconds for each part", "s")
    assert drawn[:2] == [({"base": 25.0, "tuned": 50.0}, "Exact match", "%"), times]
    assert drawn[2] == ({"this model": 2.5, "gzip": 3.5}, "Bits per byte", "bits")


@pytest.mark.parametrize("before, count", [(10, 10), (10, 3), (0, 10), (3, 10)])
def test_a_report_shows_eight_answers(before, count, monkeypatch):
    "Those of the model before stand next to them, where it was asked."
    monkeypatch.setattr(evaluation, "table", lambda rows: rows)
    questions = [dict(prompt=f"q{i}", expected=f"e{i}") for i in range(10)]
    judge = SimpleNamespace(
        inputs=SimpleNamespace(questions=questions),
        before=[f"b{i}" for i in range(before)],
        after=[f"a{i}" for i in range(count)],
        sampled={},
    )
    ((heading, rows),) = evaluation.PromptEvaluator.sections(judge)
    shown = min(8, count, before or 8)
    words = [
        dict(asked=f"q{i}", expected=f"e{i}", before=f"b{i}" if before else "", after=f"a{i}")
        for i in range(shown)
    ]
    assert heading == "Answers" and rows == str(words)


@pytest.mark.parametrize(
    "highest, copied, count, wanted",
    [
        (None, 50, 3, dict(checkpoint=50, kernels=600, allocator=0)),
        (700, 50, 3, dict(checkpoint=50, kernels=600, allocator=50)),  # 1000 + 700 - 1000 more
        (60, 50, 3, dict(checkpoint=50, kernels=600, allocator=0)),
        (60, 0, 0, dict(checkpoint=0, kernels=0, allocator=60)),
    ],
)
def test_what_a_process_takes_beside_the_tensors(highest, copied, count, wanted, monkeypatch):
    asked = []
    monkeypatch.setattr(estimate, "product_memory", lambda: 200)
    monkeypatch.setattr(
        estimate, "heap_peak", lambda steps, **knobs: asked.append((steps, knobs)) or highest
    )
    steps = [(0, 8), (1, 8), (0, -8)]
    assert estimate._beside(1000, 1000, steps, copied, count) == wanted
    sizes = [200, 204] if count else [0]  # Of a product's code; the mean of two is taken
    assert asked == [
        (estimate._with_code(steps, count, size), dict(kept=True, thread=False)) for size in sizes
    ]


def test_the_code_of_products_lies_between_the_tensors():
    steps = [(0, 8), (1, 8), (0, -8), (5, 4)]
    assert estimate._with_code(steps, 0, 10) == steps and estimate._with_code([], 3, 10) == []
    assert estimate._with_code(steps, 2, 10) == [
        *steps[:2],
        *[(6, 5), (7, 5)],
        *steps[2:],
        *[(8, 5), (9, 5)],
    ]
    assert len(estimate._with_code(steps, 4, 10)) == 12
    assert estimate._with_code(steps, 4, 10)[:3] == [(0, 8), (6, 5), (7, 5)]


def test_the_oldest_code_is_replaced_where_a_run_has_more_products_than_are_kept():
    "The event (-1 - n, 0) is the use of product n."
    steps = [(0, 8), (-1, 0), (-2, 0), (-1, 0), (1, 4), (-3, 0), (-2, 0)]
    assert estimate._with_code(steps, 3, 10) == estimate._with_code([(0, 8), (1, 4)], 3, 10)
    assert estimate._with_code(steps, 2, 100) == [
        (0, 8),
        *[(2, 47), (2, 0), (2, 47), (3, 47), (4, 6)],  # A buffer is tried first
        *[(5, 47), (5, 0), (5, 47), (6, 47), (7, 6)],
        (1, 4),
        # Product 0 was used after product 1, which is released between the two buffers
        *[(8, 47), (8, 0), (8, 47), (5, 0), (6, 0), (7, 0), (9, 47), (10, 6)],
        *[(11, 47), (11, 0), (11, 47), (2, 0), (3, 0), (4, 0), (12, 47), (13, 6)],
    ]


def test_a_long_run_is_played_with_its_batches_of_other_sizes():
    "Gradients, states, a step, its update, then a step with another batch; -1 is a product."
    states, step, other = [(1, 8)], [(2, 4), (-1, 0), (2, 0)], [(3, 6), (-2, 0), (3, 0)]
    events = [*states, *step, *other]
    for count, played in ((7, 7), (2, 5)):
        steps = estimate._several_steps(events, [0, 0, 1, 4, 4], False, [], [7], count)
        assert [size for _, size in steps if size].count(8) == 1
        products = [name for name, _ in steps if name < 0]
        assert products == ([-1, -2] * 4)[:played]
