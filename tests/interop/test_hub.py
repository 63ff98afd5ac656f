"The hub during whole runs: what it gets, when, and that nobody else gets the token."

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import transformers
from support.processes import shell
from huggingface_hub import constants

from trainkit.config import ConfigError
from trainkit.interop.hf import load_pretrained, save_pretrained
from trainkit.interop.hub import (
    HubConfig,
    HubPush,
    explain,
    fetch_model,
    find_model_files,
    open_repo,
)
from trainkit.recipes.config import method_config
from trainkit.recipes.runner import run

TOKEN = "hf_" + "NobodyMayReadThis" * 2
TINY = {
    "data": dict(path="stdlib", max_chars=40_000, max_length=64),
    "tokenizer": dict(vocab_size=320),
    "model": dict(d_model=32, n_heads=2, n_layers=1, d_ff=48, max_seq_len=64),
    "sampling": dict(max_new_tokens=2),
    "train": dict(
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="no",
        sample_steps=0,
        progress=False,
    ),
    "watch_memory": False,
}

WORDS = [
    f"{group}.{name}={str(value).lower()}"
    for group, knobs in TINY.items()
    if isinstance(knobs, dict)
    for name, value in knobs.items()
] + [
    "watch_memory=false",
    "hub.push_to_hub=true",
    "hub.hub_model_id=me/two",
    "hub.hub_strategy=checkpoint",
]


class Hub(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def say(self, data, code=200):
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.say({}, 403 if self.server.store["refuse"] == "create" else 200)

    def do_POST(self):
        store, body = (
            self.server.store,
            self.rfile.read(int(self.headers.get("Content-Length") or 0)),
        )
        store["tokens"].add(self.headers.get("Authorization"))
        if store["refuse"] and store["refuse"] in self.path:
            self.say({"error": "no"}, 403)
        elif self.path.endswith("/repos/create"):
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            store["repos"][name] = asked.get("visibility")
            self.say(dict(name=name, id=name, url=f"http://{self.headers['Host']}/{name}"))
        elif "/preupload/" in self.path:
            self.say(
                {
                    "files": [
                        dict(path=f["path"], uploadMode="regular", shouldIgnore=False)
                        for f in json.loads(body)["files"]
                    ]
                }
            )
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            store["commits"].append(
                sorted(line["value"]["path"] for line in lines if line["key"] == "file")
            )
            store["files"] |= {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.say(
                dict(
                    commitOid="b" * 40,
                    commitUrl=f"http://{self.headers['Host']}/me/run/commit/b",
                    hookOutput="",
                )
            )


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.store = dict(files={}, commits=[], tokens=set(), repos={}, refuse="")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in dict(
        ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HUB_OFFLINE=False
    ).items():
        monkeypatch.setattr(constants, name, value)
    for name, value in dict(HF_TOKEN=TOKEN, NO_PROXY="127.0.0.1").items():
        monkeypatch.setenv(name, value)
    yield server.store
    server.shutdown()


@pytest.mark.parametrize("strategy, commits", [("end", 1), ("every_save", 3), ("checkpoint", 5)])
def test_a_run_is_uploaded_and_tells_no_token(hub, tmp_path, capfd, strategy, commits):
    wish = dict(
        push_to_hub=True, hub_model_id="me/run", hub_strategy=strategy, hub_token="${HF_TOKEN}"
    )
    result = run(method_config({**TINY, "name": "up", "runs_dir": str(tmp_path), "hub": wish}))
    assert (
        len(hub["commits"]) == commits
        and hub["repos"] == {"me/run": "private"}
        and hub["tokens"] == {f"Bearer {TOKEN}"}
    )
    model = {p.name: p.read_bytes() for p in result.model_path.iterdir()}
    assert {name: hub["files"][name] for name in model} == model, (
        "the last word is the model of the run, to the byte"
    )
    assert any(name.startswith("last-checkpoint/") for name in hub["files"]) == (
        strategy == "checkpoint"
    )
    output = "".join(capfd.readouterr())
    assert TOKEN not in output and "me/run" in output
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file


def test_the_other_engine_uploads_the_same(hub, tmp_path):
    "TRL trains; what it saves is uploaded as with our loop, its own checkpoints included."
    pytest.importorskip("trl")
    wish = dict(push_to_hub=True, hub_model_id="me/run", hub_strategy="checkpoint")
    result = run(
        method_config(
            {**TINY, "name": "theirs", "runs_dir": str(tmp_path), "hub": wish, "engine": "trl"}
        ),
        verbose=False,
    )
    model = {p.name: p.read_bytes() for p in result.model_path.iterdir()}
    assert {name: hub["files"][name] for name in model} == model and hub["repos"] == {
        "me/run": "private"
    }
    assert (
        any(name.startswith("last-checkpoint/") for name in hub["files"])
        and len(hub["commits"]) == 5
    )


def test_a_missing_right_is_found_before_the_first_step(hub, tmp_path, monkeypatch):
    config = method_config({**TINY, "name": "no", "runs_dir": str(tmp_path), "push_to_hub": True})
    hub["refuse"] = "create"
    with pytest.raises(OSError, match="write access"):
        run(config, verbose=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="HF_HUB_OFFLINE"):
        run(config, verbose=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(OSError, match="needs a token"):
        run(config, verbose=False)
    assert not (tmp_path / "no" / "model").exists() and not hub["files"]


def test_an_upload_that_fails_costs_nothing(hub, tmp_path, capsys):
    hub["refuse"] = "commit"
    result = run(
        method_config(
            {
                **TINY,
                "name": "kept",
                "runs_dir": str(tmp_path),
                "push_to_hub": True,
                "hub_strategy": "end",
            }
        )
    )
    assert (result.steps, result.stop_reason) == (4, "finished") and load_pretrained(
        result.model_path
    )
    output = capsys.readouterr().out
    assert (
        f"hf upload me/kept {result.model_path}" in output
        and TOKEN not in output + (result.folder / "log.txt").read_text()
    )


@pytest.mark.parametrize("where", ["top", "group"])
@pytest.mark.parametrize("word", ["hub_token", "token", "use_auth_token"])
def test_a_config_holds_no_token(where, word, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    data = {word: TOKEN + "x"} if where == "top" else {"hub": {word: TOKEN + "x"}}
    with pytest.raises(ConfigError, match="secret") as caught:
        method_config(data)
    assert TOKEN not in str(caught.value)
    assert (
        method_config({word: True} if where == "top" else {"hub": {word: "${HF_TOKEN}"}}).hub
        == HubConfig()
    )


def test_words_of_other_libraries_work(tmp_path):
    c = method_config(
        {
            "push_to_hub": True,
            "hub_model_id": "a/b",
            "hub_strategy": "checkpoint",
            "cache_dir": "here",
            "device_map": "auto",
            "use_cache": False,
        }
    )
    assert (c.hub, c.cache_dir, c.device_map, c.use_cache) == (
        HubConfig(True, "a/b", "checkpoint"),
        "here",
        "auto",
        False,
    )
    with pytest.raises(ConfigError, match="hub_strategy"):
        method_config({"hub_strategy": "all_checkpoints"})
    assert HubPush(HubConfig(True), "my run, 2").repo == "my-run-2"
    for wrong in ("a/b/c", "a b", "../x", ""):
        with pytest.raises(ValueError, match="owner/name"):
            open_repo(wrong)


def test_cache_dir_is_where_models_are(tmp_path):
    "A cache as the hub library lays it out opens offline, by the name of the model."
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    theirs.save_pretrained(snapshot)
    (tmp_path / "models--me--tiny" / "refs").mkdir()
    (tmp_path / "models--me--tiny" / "refs" / "main").write_text("c" * 40)
    model, _ = load_pretrained("me/tiny", cache_dir=tmp_path)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids).logits, theirs.eval()(ids).logits, atol=1e-5, rtol=1e-5
        )
    with pytest.raises(OSError, match="HF_HUB_OFFLINE"):
        fetch_model("me/tiny", tmp_path / "elsewhere")
    assert explain(OSError(), "me/tiny") == "the hub refused 'me/tiny' (OSError)"


@pytest.mark.parametrize("family", ["GPTNeoX", "Phi"])
def test_other_families_take_lora_and_quantizer(family, tmp_path):
    """Other families stay models of transformers: same sums, and only the adapter learns.

    test_translate runs them with every method.
    """
    from trainkit.lora.inject import add_lora
    from trainkit.quant.quantize import QuantConfig, quantize_model
    from trainkit.lora.inject import LoRAConfig
    from trainkit.train.objectives import lm_loss

    torch.manual_seed(0)
    shape = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    original = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**shape)
    )
    original.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="native=False"):
        load_pretrained(tmp_path / "theirs", native=True)
    model, _ = load_pretrained(tmp_path / "theirs", use_cache=False)
    assert type(model) is type(original)
    ids = torch.randint(64, (2, 12))
    batch = dict(input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids))
    total, count, _ = lm_loss(model, batch).terms["loss"]
    assert torch.isclose(total / count, original.eval()(ids, labels=ids).loss, atol=1e-5)
    quantize_model(model, QuantConfig(4))
    add_lora(model, LoRAConfig(r=4, target_modules="all-linear"))
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(8):
        total, count, _ = lm_loss(model, batch).terms["loss"]
        (total / count).backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append((total / count).item())
    assert losses[-1] < losses[0] - 0.05 and all(
        torch.equal(p, dict(model.named_parameters())[n]) for n, p in frozen.items()
    )
    again, _ = load_pretrained(
        save_pretrained(
            load_pretrained(tmp_path / "theirs", native=False, use_cache=False)[0],
            None,
            tmp_path / "again",
        ),
        native=False,
    )
    assert again.config.use_cache


@pytest.mark.slow
def test_of_several_processes_one_uploads(hub, tmp_path):
    "Two processes train one model; the hub hears of it once, and gets what the run has."
    done = shell(
        "launch",
        "--processes",
        "2",
        "--strategy",
        "ddp",
        "--profile",
        "quick",
        "name=two",
        *WORDS,
        cwd=tmp_path,
        HF_ENDPOINT=constants.ENDPOINT,
        HF_HUB_OFFLINE="0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        hub["repos"] == {"me/two": "private"}
        and len(hub["commits"]) == 5
        and hub["tokens"] == {f"Bearer {TOKEN}"}
    )
    model = {p.name: p.read_bytes() for p in (tmp_path / "runs" / "two" / "model").iterdir()}
    assert {name: hub["files"][name] for name in model} == model
    assert any(name.startswith("last-checkpoint/") for name in hub["files"])


def test_a_mistyped_folder_has_a_neighbour(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "no-model").mkdir(parents=True)
    with pytest.raises(OSError, match="'runs/nomodel' is not a folder here.*mean 'no-model'"):
        find_model_files("runs/nomodel")
