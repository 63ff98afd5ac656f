"A chat without a model: what is asked, what is remembered, and what is left out."

from types import SimpleNamespace

import pytest
import torch

from trainkit.recipes import conversation
from trainkit.recipes.conversation import COMMANDS, Conversation
from trainkit.recipes.final_project import greedy_agreement
from trainkit.recipes.runner import _final_metrics
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.tokenizer.chat import set_template


@pytest.fixture
def chat(monkeypatch):
    "Makes a conversation that answers `1`, `2`, …; `calls` are what it asked the model."
    tokenizer = BPETokenizer.train(["a b c"], 258, special_tokens=["<|endoftext|>"], progress=False)
    set_template(tokenizer, "chatml")
    calls = []

    def stream(model, ids, **knobs):
        calls.append((model, tokenizer.decode(ids, skip_special_tokens=True), len(ids), knobs))
        yield from str(len(calls)) if model.answers else ""

    monkeypatch.setattr(conversation, "stream", stream)

    def make(room=1000, answers=True, base=None, **knobs):
        model = SimpleNamespace(config=SimpleNamespace(max_seq_len=room), answers=answers)
        pair = base and (SimpleNamespace(config=model.config, answers=True), tokenizer)
        return Conversation(model, tokenizer, base=pair, **knobs)

    make.calls, make.tokenizer = calls, tokenizer
    return make


def said(talk):
    return [message["content"] for message in talk.messages]


def test_another_answer_takes_the_place_of_the_last(chat):
    talk = chat(seed=5, system="be kind", temperature=0.5)
    with pytest.raises(ValueError, match="there is no answer yet to replace"):
        talk.again()
    assert [*talk.say("a")] == [("model", "1")] and [*talk.say("b")] == [("model", "2")]
    assert [*talk.again()] == [("model", "3")] and said(talk) == ["be kind", "a", "1", "b", "3"]
    assert [call[3]["seed"] for call in chat.calls] == [5, 5, 6]
    knobs = chat.calls[-1][3]
    assert knobs == dict(
        tokenizer=chat.tokenizer,
        weights=None,
        assistant_model=None,
        seed=6,
        temperature=0.5,
        max_new_tokens=200,
    )
    talk.reset()
    assert said(talk) == ["be kind"]
    talk.reset("")
    assert said(talk) == []


def test_a_question_without_an_answer_is_forgotten(chat):
    talk = chat(answers=False)
    assert [*talk.say("a")] == [] and said(talk) == []
    talk = chat()
    answer = talk.say("a")
    next(answer)
    answer.close()  # In the middle of the answer, what was said so far is kept
    assert said(talk) == ["a", "2"]


@pytest.mark.parametrize("more, first", [(0, "a"), (-1, "b")])
def test_the_oldest_turns_are_left_out_where_they_do_not_fit(chat, more, first):
    "A prompt that just fits stays whole; a token less, and a question with its answer goes."
    talk = chat(system="s")
    for text in ("a", "b", "c"):
        [*talk.say(text)]
    size = chat.calls[-1][2]
    talk = chat(room=size + 20 + more, system="s", max_new_tokens=20)
    for text in ("a", "b", "c"):
        [*talk.say(text)]
    _, prompt, length, knobs = chat.calls[-1]
    assert prompt.split("user\n")[1].startswith(first) and prompt.count("system") == 1
    assert knobs["max_new_tokens"] == 20 and length == (size if not more else length)
    assert length <= size + more


def test_half_of_a_small_context_is_for_the_answer(chat):
    talk = chat(room=201, max_new_tokens=500)
    [*talk.say("a")]
    assert chat.calls[-1][3]["max_new_tokens"] == 201 - chat.calls[-1][2]
    with pytest.raises(ValueError, match=r"\d+ tokens are more than the 101 that this model"):
        [*talk.say("a " * 200)]
    assert said(talk) == ["a", "1"]


def test_every_command_answers(chat):
    talk = chat(system="s", base=True)
    listed = "\n".join(f"{name:13} {what}" for name, what in COMMANDS.items())
    assert [talk.command(text) for text in ("/exit", "/quit ", "/help", "/rest", "/zzz")] == [
        None,
        None,
        listed,
        f"/rest is not a command. Did you mean '/reset'?\n{listed}",
        f"/zzz is not a command.\n{listed}",
    ]
    assert talk.command("/system  be brief ") == "System message: be brief"
    assert said(talk) == ["be brief"]
    assert talk.command("/compare") == "The base model answers too."
    assert [*talk.say("a")] == [("base", "1"), ("model", "2")] and said(talk)[-1] == "2"
    assert talk.command("/compare") == "The base model answers no longer."
    assert [*talk.say("a")] == [("model", "3")]
    assert talk.command("/reset") == "The conversation is forgotten." and said(talk) == ["be brief"]
    assert talk.command("/system") == "No system message." and said(talk) == []
    assert "no base model" in chat().command("/compare")


def test_a_tokenizer_without_a_chat_format_is_refused(chat):
    chat.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat format"):
        chat()


def test_agreement_is_the_share_of_equal_tokens():
    def model(shift):
        def logits(ids):
            return SimpleNamespace(logits=torch.eye(9)[(ids + shift * (ids > 5)) % 9])

        return logits

    assert greedy_agreement(model(0), model(1), [[1, 2, 3, 7], [6, 8]]) == 0.5
    assert greedy_agreement(model(0), model(1), []) == 0


@pytest.mark.parametrize("own, more", [(True, {"f1": 3}), (False, {})])
def test_own_metrics_join_those_of_the_judge(own, more):
    told = []
    trainer = SimpleNamespace(
        eval_batches=[1],
        evaluate=lambda: {"eval_loss": 1},
        notify=lambda event, **values: told.append((event, values)),
        history=[{"eval_f1": 0}, {"eval_loss": 1, "eval_f1": 3, "eval_bits": 4, "loss": 5}],
    )
    judge = SimpleNamespace(end=lambda values: ({"bits": 2 * values["eval_bits"]}, ["good"]))
    assert _final_metrics(trainer, judge, True, own) == ({"bits": 8, **more}, ["good"])
    assert told == [("on_eval", {"eval_loss": 1, "best": False})]
    assert _final_metrics(trainer, judge, False, False) == ({}, [])


def test_a_thought_is_apart_from_the_answer_and_read_again(chat, monkeypatch):
    told = []

    def stream(model, ids, **knobs):
        told.append((chat.tokenizer.decode(ids), knobs.get("thinking_budget")))
        yield from ("<thi", "nk>\nhm", "\n</thi", "nk>\n\n", "yes")

    monkeypatch.setattr(conversation, "stream", stream)
    talk = chat(thinking_budget=7)
    parts = {}
    for kind, piece in talk.say("a"):
        parts[kind] = parts.get(kind, "") + piece
    assert parts["model"] == "yes" and parts["model thinks"].strip() == "hm"
    assert talk.messages[-1] == dict(role="assistant", content="yes", reasoning_content="hm")
    set_template(chat.tokenizer, "qwen3")
    assert talk.command("/think off") == "The model answers without thinking."
    [*talk.say("b")]
    prompt, budget = told[-1]
    assert "hm" not in prompt and prompt.endswith("<think>\n\n</think>\n\n") and budget == 7
    assert "thinks before" in talk.command("/think on") and "trained" in talk.command("/think")
    quiet = chat(enable_thinking=False)
    [*quiet.say("a")]
    assert told[-1][1] == 0
