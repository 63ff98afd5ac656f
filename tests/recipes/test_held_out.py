"Which part of a folder of shards is held out, and what a model may read and answer at once."

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainkit.eval import evaluator
from trainkit.memory.estimate import MemoryWatch
from trainkit.recipes import preparation
from trainkit.recipes.config import method_config


class Shards:
    "Ids in memory; 0 ends a document."

    folder, index = Path("shards"), {"shards": [dict(text_sha256="a", text_bytes=140)] * 2}

    def __init__(self, ids):
        self.ids = np.array(ids)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        return self.ids[place]

    def rows(self, length, start=0, stop=None):
        return SimpleNamespace(place=(length, start, stop), __len__=lambda: 3)


class Tokenizer:
    vocab_size, eos_token_id, eos_token = 50, 0, "|"

    def decode(self, ids):
        return "".join("|" if i == 0 else "日" for i in ids)

    def decode_bytes(self, ids, skip_special_tokens):
        return "".join("日" for i in ids if i).encode()


@pytest.fixture
def held_out(monkeypatch):
    "Where the rows to evaluate on begin; the facts of the data."

    def place(ids, share, most=1 << 20):
        made = {}

        def make_batches(config, train, test, tokenizer, tasks):
            made.update(train=train.place, test=test if test == [] else test.place)
            return SimpleNamespace(rows=[0] * 3), test

        monkeypatch.setattr(preparation, "open_shards", lambda path: Shards(ids))
        monkeypatch.setattr(preparation.BPETokenizer, "load", lambda folder: Tokenizer())
        monkeypatch.setattr(preparation, "make_batches", make_batches)
        monkeypatch.setattr(preparation, "_HELD_OUT", most)
        config = method_config({}, [f"data.eval_fraction={share}", "data.max_length=8"])
        model = SimpleNamespace(config=SimpleNamespace(vocab_size=50))
        inputs = preparation.prepare_shards(config, (model, Tokenizer()))
        return made, inputs

    return place


@pytest.mark.parametrize(
    "ends, share, cut",
    [
        ([], 0.1, 90),  # No document ends near: as many tokens as asked for
        ([], 0.0001, 98),  # Two at least
        ([85], 0.1, 85),
        ([79], 0.1, 90),  # Too far away
        ([80], 0.1, 80),
        ([81, 93], 0.1, 93),  # The nearest to 90
        ([84, 93], 0.1, 93),
        ([88, 93], 0.1, 88),
        ([99], 0.1, 90),  # The last document ends with the text
        ([98], 0.1, 98),
    ],
)
def test_whole_documents_are_held_out_where_that_is_possible(ends, share, cut, held_out):
    made, inputs = held_out([0 if i in ends else 1 for i in range(100)], share)
    assert made == dict(train=(8, 0, cut + 1), test=(8, cut, None))
    assert len(inputs.eval_ids) == 100 - cut and len(inputs.train_ids) == cut
    data = inputs.data
    assert data.eval_chars == sum(len(row["text"]) for row in inputs.eval_rows)
    assert data.eval_bytes == 3 * data.eval_chars and data.train_bytes == 280 - data.eval_bytes
    line = f": {data.train_bytes} bytes to train on, {data.eval_bytes} held out"
    assert line in inputs.plan[0] and "characters" not in " ".join(inputs.plan)


def test_no_more_is_held_out_than_there_is_a_use_for(held_out):
    made, inputs = held_out([1] * 100, 0.5, most=10)
    assert made["test"] == (8, 90, None) and len(inputs.train_ids) == 20
    made, inputs = held_out([1] * 100, 0.0)
    assert made == dict(train=(8, 0, 100), test=[]) and len(inputs.eval_ids) == 0


@pytest.mark.parametrize(
    "room, new",
    [(None, 13), (5, 5)],
)
def test_how_long_an_answer_may_be(room, new, monkeypatch):
    "Half as many again as expected and four more; `generate` ends where the context is full."
    asked = []

    def generate(model, heads, most, **knobs):
        asked.append((most, knobs))
        return [[*head, 5, 6] for head in heads]

    monkeypatch.setattr(evaluator, "generate", generate)
    model = SimpleNamespace(config=SimpleNamespace(max_seq_len=20))
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f" {ids} ")
    questions = [
        SimpleNamespace(head=[1] * head, ids=[1] * (head + answer))
        for head, answer in [(7, 6), (3, 2)]
    ]
    assert evaluator._answer(model, tokenizer, questions, room, None) == [("[5, 6]",) * 2] * 2
    assert asked == [(new, dict(temperature=0, tokenizer=tokenizer, thinking_budget=None))]


def test_the_peak_of_the_whole_process_is_kept():
    "A look at one step begins the system's count anew; the record keeps the higher number."
    watch = object.__new__(MemoryWatch)
    watch.predicted, watch.measured = None, 3 * 2**29
    for highest, kept in [(5 * 2**30, 5.0), (2**30, 2.0)]:
        watch.highest = highest
        record = dict(memory_peak_gib=2.0)
        watch.on_log(None, record)
        assert record == dict(memory_peak_gib=kept, step_memory_measured_gib=1.5)
    record = {}
    watch.on_log(None, record)
    assert record == dict(step_memory_measured_gib=1.5)


@pytest.mark.parametrize("most, measured", [(7, dict(step_memory_measured_gib=2.0)), (5, {})])
def test_memory_that_the_process_had_already_is_not_measured(monkeypatch, most, measured):
    from trainkit.memory import estimate

    monkeypatch.setattr(estimate, "peak_memory_used", lambda: most * 2**30)
    monkeypatch.setattr(estimate, "memory_used", lambda: 2**30)
    watch = object.__new__(MemoryWatch)
    watch.predicted, watch.measured, watch.before = None, None, 5 * 2**30
    device = SimpleNamespace(type="cpu")
    trainer = SimpleNamespace(step_batches=[], accelerator=SimpleNamespace(device=device))
    record = {}
    for _ in range(2):
        watch.on_step(trainer, {})
    watch.note(record)
    assert record == measured


def test_a_prompt_of_the_config_gets_an_answer_of_up_to_90_tokens(monkeypatch):
    "Half as many again as the 60 that are expected, or what the model can still read."
    from trainkit import BPETokenizer, ModelConfig, Transformer
    from trainkit.recipes import evaluation

    tokenizer = BPETokenizer.train(["a b"] * 9, 258, special_tokens=["<|end|>"], progress=False)
    rooms = []

    def nothing_said(model, rows, room, **_):
        rooms.append(room)
        return [torch.as_tensor(row) for row in rows]

    monkeypatch.setattr(evaluation, "generate", nothing_said)
    inputs = SimpleNamespace(
        tokenizer=tokenizer, config=SimpleNamespace(prompts=["a b"]), questions=[]
    )
    for longest in (200, 50):
        shape = dict(vocab_size=tokenizer.vocab_size, d_model=8, n_heads=1, n_layers=1, d_ff=8)
        model = Transformer(ModelConfig(**shape, max_seq_len=longest))
        assert evaluation.answering(inputs)(model, 0) == [("a b", "")]
        assert evaluation.answering(inputs)(model, 0, "b", "a") == [("b", ""), ("a", "")]
    assert rooms == [90, 90, 50 - len(tokenizer.encode("a b")), 49]
