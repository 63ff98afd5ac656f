"A chat with models behind a server: the kit's own, and servers that misbehave."

import json
import logging
import pickle
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.tokenizer.chat import set_template

pytest.importorskip("ipywidgets")
for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package)

from trainkit.engine.scheduler import BatchEngine, Scheduler  # noqa: E402
from trainkit.engine.server import ChatServer, ServerConfig, running  # noqa: E402
from trainkit.widgets.chat_compare import (  # noqa: E402
    ChatCompare,
    ChatCompareState,
    RemoteModel,
    ServerError,
    chat_html,
    remote_models,
)

KEY = "sesame-open-2718"


def make_model(length=256):
    torch.manual_seed(0)
    text = "hello you, how are you? I am a small model. " * 4
    tokenizer = BPETokenizer.train([text], 280, special_tokens=["<|endoftext|>"], progress=False)
    shape = dict(vocab_size=280, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=length)
    model = Transformer(ModelConfig(**shape)).eval()
    set_template(tokenizer, "chatml", model)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model, tokenizer


@pytest.fixture(scope="module")
def served():
    server = ChatServer(
        BatchEngine(Scheduler(*make_model(), rows=3)), "small", ServerConfig(port=0, api_key=KEY)
    )
    with running(server) as url:
        yield server, url


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("TRAINKIT_API_KEY", KEY)


def idle(server):
    event = threading.Event()
    return any(server.engine.load == (0, 0) or event.wait(0.01) for _ in range(2000))


def test_a_served_model_answers_as_the_same_model_here(served, key):
    "The same words, and nearly the same probabilities, next to each other in one chat."
    state = ChatCompareState(
        dict(here=make_model(), there=RemoteModel(served[1])), max_new_tokens=12, seed=5,
        temperature=0.7, system="Be brief.",
    )  # fmt: skip
    for question in ("hello", "how are you?"):
        *_, turn = state.ask(question)
        here, there = turn.answers["here"], turn.answers["there"]
        assert here.text == there.text and here.ended == there.ended and there.text
        assert len(there.log_probs) == len(here.log_probs) == len(there.pieces)
        assert torch.allclose(
            torch.tensor(here.log_probs), torch.tensor(there.log_probs), atol=1e-3
        )
        assert there.kl == () and there.ids == ()
    assert state.messages("there", state.turns)[0]["role"] == "system" and len(state.turns) == 2
    page = str(chat_html(state))
    assert "there" in page and KEY not in page
    *_, again = state.again()
    assert (again.seed, again.answers["here"].text) == (6, again.answers["there"].text)


def test_the_page_lists_the_models_of_a_server(served, key, caplog, monkeypatch):
    "Streamed into the page; the key is in no object, on no page and in no log."
    caplog.set_level(logging.DEBUG)
    chat = ChatCompare(base_url=served[1], key="remote", max_new_tokens=64)
    assert [*chat.sources] == ["small"]
    seen = []
    chat.chat.observe(lambda change: seen.append(change["new"]), names="value")
    chat.every, scheduler = 0.0, served[0].scheduler
    step, few = scheduler.step, scheduler.tokens_written + 8

    def wait_for_the_page():
        "After some tokens the server writes on only when the page has shown them."
        deadline = time.monotonic() + 30
        while scheduler.tokens_written >= few and len(seen) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return step()

    monkeypatch.setattr(scheduler, "step", wait_for_the_page)
    turn = chat.ask("hello")
    assert turn.answers["small"].text and len(seen) > 2, "it is shown while it is written"
    chat.xray_button.click()
    assert "on a server" in chat.page.alert.value
    kept = [repr(vars(chat)), repr(chat.sources), str(chat._html()), caplog.text, *seen]
    assert not any(KEY in text for text in kept)
    assert KEY.encode() not in pickle.dumps(chat.sources)
    chat.page.worker, chat.question.value = threading.current_thread(), ""  # It writes
    chat.send_button.click()  # A second press, after the first has emptied the field
    assert "question first" not in chat.page.alert.value
    chat.page.worker = None
    chat.send_button.click()
    assert "question first" in chat.page.alert.value
    both = ChatCompare(dict(small=make_model()), base_url=served[1], key="remote")
    assert [*both.sources] == ["small", "small (server)"]
    both.close()
    by_address = ChatCompare(dict(there=served[1]), key="remote", max_new_tokens=4)
    assert by_address.ask("hello").answers["there"].pieces
    by_address.close()


def test_stop_hangs_up(served, key):
    server, url = served
    state = ChatCompareState(dict(a=RemoteModel(url)), max_new_tokens=150, seed=1)
    written = server.scheduler.tokens_written
    for turn in state.ask("hello"):
        if turn.answers["a"].pieces:
            state.stopping.set()
    assert len(state.turns) == 1 and len(turn.answers["a"].pieces) < 150
    assert idle(server) and server.scheduler.tokens_written - written < 150


def test_the_oldest_turns_are_left_out(served, key):
    state = ChatCompareState(dict(a=RemoteModel(served[1])), max_new_tokens=4)
    for _ in range(6):
        *_, turn = state.ask("hello you, " * 6)
    assert len(state.turns) == 6 and turn.answers["a"].pieces
    with pytest.raises(ServerError, match="a: .*tokens"):
        [*state.ask("how " * 400)]
    assert len(state.turns) == 6


def test_errors_are_sentences(served, monkeypatch):
    url = served[1]
    messages = [dict(role="user", content="hello")]

    def wrong(text, base_url=url, **more):
        with pytest.raises(ServerError) as caught:
            [*RemoteModel(base_url, **more).stream(messages, max_tokens=2)]
        assert text in str(caught.value) and KEY not in str(caught.value), str(caught.value)

    monkeypatch.delenv("TRAINKIT_API_KEY", raising=False)
    wrong("wants an API key: set the environment variable TRAINKIT_API_KEY")
    monkeypatch.setenv("TRAINKIT_API_KEY", "wrong")
    wrong("does not accept the API key of TRAINKIT_API_KEY")
    monkeypatch.setenv("TRAINKIT_API_KEY", "two\nlines")
    wrong("does not hold an API key")
    monkeypatch.setenv("TRAINKIT_API_KEY", KEY)
    wrong("there is no model 'gpt'", model="gpt")
    wrong("wants an API key: set the environment variable OTHER_KEY", api_key_env="OTHER_KEY")
    wrong("GET /v2/models", url + "/v2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wrong("nothing answers at http://127.0.0.1", f"http://127.0.0.1:{port}")
    for address in ("127.0.0.1:8000", "ftp://a", "http://", "http://me:secret@a/v1"):
        with pytest.raises(ValueError, match="base_url") as caught:
            RemoteModel(address)
        assert "secret" not in str(caught.value)
    with pytest.raises(ServerError, match="nothing answers"):
        ChatCompare(base_url=f"http://127.0.0.1:{port}", key="remote")
    with pytest.raises(ValueError, match="thinking_budget cannot be set"):
        [*ChatCompareState(dict(a=RemoteModel(url)), thinking_budget=3).ask("hello")]
    chat = ChatCompare(dict(a=RemoteModel(url, "gpt")), key="remote")
    chat.question.value = "hello"
    chat.send_button.click()
    chat.page.wait()
    assert "there is no model" in chat.page.alert.value and chat.question.value == "hello"
    assert chat.state.turns == []
    chat.close()


def test_no_key_goes_to_another_server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    assert RemoteModel("http://127.0.0.1:1/v1").key_name == "TRAINKIT_API_KEY"
    assert RemoteModel("https://api.openai.com/v1").key_name == "OPENAI_API_KEY"
    assert RemoteModel("https://api.openai.com.evil.example").key_name == "TRAINKIT_API_KEY"


@contextmanager
def stranger(answer):
    "A server of a few lines: `answer(handler, body)` writes the response."
    heard = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append((body, dict(self.headers)))
            answer(self, body)

        def do_GET(self):
            names = [dict(id=f"m{i}") for i in range(7)]
            write(self, 200, dict(data=names))

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", heard
    finally:
        server.shutdown()
        server.server_close()


def write(handler, status, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def events(*deltas, end=b"data: [DONE]\n\n"):
    reason = [None] * (len(deltas) - 1) + ["stop"]
    lines = [
        b"data: "
        + json.dumps(dict(choices=[dict(delta=d, finish_reason=r)])).encode()
        + b"\r\n\r\n"
        for d, r in zip(deltas, reason, strict=True)
    ]
    return b": ping\n\n" + b"".join(lines) + end


def test_other_servers(key):
    "No probabilities, a thought apart, another name of max_tokens: the answer is shown."

    def picky(handler, body):
        for field in ("logprobs", "seed"):
            if field in body:
                return write(handler, 400, dict(error=dict(message=f"{field} is unknown")))
        if "max_tokens" in body:
            text = "Use 'max_completion_tokens' instead."
            return write(handler, 400, dict(error=dict(message=text)))
        deltas = [dict(reasoning="h"), dict(reasoning="m"), dict(content="<b>y"), dict(content="s")]
        write(handler, 200, events(*deltas))

    with stranger(picky) as (url, heard):
        state = ChatCompareState(dict(a=RemoteModel(url, "m3")), max_new_tokens=9)
        *_, turn = state.ask("hello")
        answer = turn.answers["a"]
        assert (answer.pieces, answer.thinks, answer.ended) == (("h", "m", "<b>y", "s"), 2, True)
        wanted = dict(role="assistant", content="<b>ys", reasoning_content="hm")
        assert answer.message() == wanted and answer.log_probs == ()
        assert heard[-1][0]["max_completion_tokens"] == 9 and heard[-1][0]["model"] == "m3"
        page = str(chat_html(state))
        assert "Thought, 2 pieces" in page and "<b>y" not in page and "&lt;b&gt;y" in page
        [*state.ask("more")]
        assert "hm" not in str(heard[-1][0]["messages"])
        with pytest.raises(ValueError, match="has 7 models, and one to four .* m0, m1"):
            remote_models(url)


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, b"<html>hello</html>", "broken off"),
        (200, b"data: {oops\n\n", "does not stream its answers"),
        (200, events(dict(content="a"), dict(content="b"))[:60], "does not stream|broken off"),
        (200, b'data: {"error": {"message": "the model fell over"}}\n\n', "the model fell over"),
        (500, b"<html>", "an error with the status 500"),
        (429, dict(error=dict(message="too many wait")), "too many wait"),
        (401, dict(error=dict(message=f"not {KEY}")), "does not accept the API key"),
        (400, dict(error=dict(message=f"what is {KEY}?")), "what is …"),
        (404, b"", "ends with /v1"),
        (302, b"", "elsewhere"),
    ],
)
def test_servers_that_misbehave(key, status, body, text):
    def answer(handler, _):
        write(handler, status, body, Location="http://127.0.0.1:9/steal")

    with stranger(answer) as (url, heard):
        state = ChatCompareState(dict(a=RemoteModel(url, "m1")))
        with pytest.raises(ServerError, match=text) as caught:
            [*state.ask("hello")]
        assert KEY not in repr(caught.value) and len(heard) == 1
        assert heard[0][1]["Authorization"] == f"Bearer {KEY}"


def test_a_silent_server_is_given_up(key):
    hold = threading.Event()
    with stranger(lambda handler, _: hold.wait(5)) as (url, _):
        state = ChatCompareState(dict(a=RemoteModel(url, "m1", timeout=0.2)))
        with pytest.raises(ServerError, match="not answered in time"):
            [*state.ask("hello")]
        hold.set()


def test_the_chat_of_the_studio_takes_an_address(served, key):
    from trainkit.widgets.studio import ChatPage

    page = ChatPage("remote studio")
    page.other.value = f" {served[1]} "
    page.open_button.click()
    chat = page.chat
    assert page.chosen == {} and [*chat.sources] == ["small"]
    chat.page.wait()
    chat.length.value = 4
    assert chat.ask("hello").answers["small"].pieces and page.page.alert.value == ""
    page.other.value = "http://127.0.0.1:1/v1"
    page.open_button.click()
    assert "nothing answers" in page.page.alert.value
    page.close()
