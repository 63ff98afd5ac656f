"The shell under interruptions: wrong values, Ctrl-C, closed pipes; and machine-read output."

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.processes import ROOT, call, command, in_child
from support.processes import shell as trainkit

POSIX = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A model that was taught nothing, with a chat format, and rows."
    import torch

    from trainkit.tokenizer.chat import set_template
    from trainkit.interop.hf import save_pretrained
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    folder = tmp_path_factory.mktemp("shell")
    rows = [
        dict(prompt=f"Spell {n}.", completion=word)
        for n, word in enumerate("zero one two three four five six seven eight nine".split() * 3)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = BPETokenizer.train(
        [row["prompt"] + row["completion"] for row in rows],
        280,
        special_tokens=["<|endoftext|>"],
        progress=False,
    )
    set_template(tokenizer, "chatml")
    torch.manual_seed(0)
    save_pretrained(
        Transformer(
            ModelConfig(
                vocab_size=tokenizer.vocab_size,
                d_model=32,
                n_heads=2,
                n_layers=1,
                d_ff=64,
                max_seq_len=256,
            )
        ),
        tokenizer,
        folder / "model",
    )
    return folder


def test_a_wrong_value_is_named(tmp_path):
    for words in (
        ["generate", "-m", "x", "-p", "y", "--max-new-tokens", "lots"],
        ["data", "show", "x", "-n", "lots"],
        ["train", "--profile", "lots"],
    ):
        done = trainkit(*words, cwd=tmp_path)
        assert done.returncode == 2 and "'lots'" in done.stderr and words[-2] in done.stderr, (
            done.stderr
        )


def test_a_wrong_knob_is_found_before_anything_is_said(home):
    for wrong, hint in ((["--top-p", "2"], "top_p = 2"), (["--stop", ""], "stop contains ''")):
        done = trainkit("generate", "-m", "model", "-p", "Spell", *wrong, cwd=home)
        assert (done.returncode, done.stdout) == (1, "") and hint in done.stderr, done.stderr


def pressed(words, cwd, env, what, person=False):
    "The command, which gets a Ctrl-C in the middle of its first answer, or of its writing."
    from trainkit.data import readers as containers
    from trainkit.model import generation as generate
    from trainkit.recipes import conversation as talk

    stream, write, calls = generate.stream, containers.write_atomic, []

    def press():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)

    def answer(*args, **knobs):
        calls.append(args)
        for piece in stream(*args, **knobs):
            yield piece
            if len(calls) == 1:
                press()

    if what == "write":
        containers.write_atomic = lambda path, data: (press(), write(path, data))
    else:
        generate.stream = talk.stream = answer
    sys.stdin = io.StringIO("Spell 1.\nSpell 2.\n/exit\n")
    sys.stdin.isatty = lambda: person
    return command(words, cwd, env)


@POSIX
@pytest.mark.parametrize("person", [True, False])
def test_ctrl_c_ends_an_answer(home, tmp_path, person):
    "At a terminal the chat asks the next question; elsewhere the program ends."
    words = ["chat", "-m", str(home / "model"), "--max-new-tokens", "9", "--seed", "1"]
    done = in_child(pressed, words, tmp_path, {}, "answer", person, folder=tmp_path)
    assert done.returncode == (0 if person else 130) and "Traceback" not in done.stderr, done.stderr
    assert done.stdout and done.stderr.count("> ") == 3 * person


@POSIX
def test_ctrl_c_ends_a_text(home, tmp_path):
    done = in_child(
        pressed,
        ["generate", "-m", str(home / "model"), "-p", "Spell", "--max-new-tokens", "9"],
        tmp_path,
        {},
        "answer",
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr, done.stdout[:5], done.stdout[-1]) == (
        130,
        "Interrupted.\n",
        "Spell",
        "\n",
    )


@POSIX
def test_ctrl_c_leaves_no_half_file(home, tmp_path):
    words = [
        "data",
        "pack",
        str(home / "rows.jsonl"),
        "out.jsonl",
        "--max-length",
        "64",
        "--tokenizer",
        str(home / "model"),
    ]
    done = in_child(pressed, words, tmp_path, {}, "write", folder=tmp_path)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")
    assert {p.name for p in tmp_path.iterdir()} == {"out.txt", "err.txt"}


def pressed_early(words, cwd, env):
    "The command, which gets a Ctrl-C while the run is prepared."
    from trainkit.recipes import runner

    def press(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)

    runner.prepare = press
    return command(words, cwd, env)


@POSIX
@pytest.mark.parametrize("resumed", [False, True])
def test_ctrl_c_before_the_run_has_a_folder_says_that_nothing_is_lost(resumed, tmp_path):
    words, state = ["train", "--profile", "quick", "name=a"], "Nothing was written yet"
    if resumed:
        words, state = [*words, "--resume", "auto"], f"{Path('runs') / 'a'} is as it was"
        (tmp_path / "runs" / "a").mkdir(parents=True)
    done = in_child(pressed_early, words, tmp_path, {}, folder=tmp_path)
    line = f"Interrupted. {state}: the same command starts it again.\n"
    assert done.returncode == 130 and done.stderr == line, done.stderr
    assert (tmp_path / "runs").exists() is resumed


def test_ctrl_c_while_the_program_is_imported_is_one_word(monkeypatch, capsys):
    from trainkit.__main__ import start

    class Slow(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "trainkit.cli", Slow("trainkit.cli"))
    with pytest.raises(SystemExit) as end:
        start()
    assert end.value.code == 130 and capsys.readouterr().err == "\nInterrupted.\n"


def test_packing_says_how_many_examples_were_too_long(home):
    "Counts of examples, tokens and rows as the library gives them, with and without long ones."
    from trainkit.data.dataloader import STRATEGIES, pack, packing_efficiency
    from trainkit.data.tokenization import tokenize_examples
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    tokenizer = BPETokenizer.load(home / "model")
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    sizes = sorted(len(row["input_ids"]) for row in tokenize_examples(rows, tokenizer, 999))
    assert sizes[0] < sizes[-1]
    for limit in (sizes[-1], sizes[-1] - 1):
        words = ["--max-length", str(limit), "--tokenizer", "model", "--drop"]
        done = call("data", "pack", "rows.jsonl", *words, cwd=home)
        assert done.returncode == 0, done.stderr
        first, *lines = done.stdout.splitlines()
        kept = tokenize_examples(rows, tokenizer, limit, truncation="drop")
        known = f"{len(kept)} examples of {sum(s for s in sizes if s <= limit)} tokens"
        gone = f", {len(rows) - len(kept)} too long and left out"
        assert first == known + gone * (limit < sizes[-1])
        packings = [kept, *(pack(kept, limit, name) for name in STRATEGIES)]
        for line, name, packed in zip(lines, ("a row each", *STRATEGIES), packings, strict=True):
            efficiency = f"{packing_efficiency(packed, limit):.1%} full"
            assert line.startswith(f"{name} ") and line.endswith(efficiency)
            assert f" {len(packed)} row" in line


@pytest.mark.slow
def test_a_pipe_that_closes_early_is_no_error(home):
    for words in (
        ["tokenizer", "encode", "model", "x " * 40_000],
        ["generate", "-m", "model", "-p", "Spell", "--max-new-tokens", "200"],
        ["data", "show", "rows.jsonl", "-n", "30"],
    ):
        with subprocess.Popen(
            [sys.executable, "-m", "trainkit", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as done:
            assert done.stdout and done.stderr and done.stdout.read(1)
            done.stdout.close()
            assert done.stderr.read() == "", words


DAMAGED = {  # what is done to a model's folder -> the command, and what it says
    "config.json is a list": (
        lambda m: (m / "config.json").write_text("[]"),
        ["generate", "-m", "M", "-p", "x"],
        "config.json contains a list",
    ),
    "tokenizer.json cut short": (
        lambda m: (m / "tokenizer.json").write_text('{"model": {'),
        ["generate", "-m", "M", "-p", "x"],
        "copy or save its tokenizer.json again",
    ),
    "tokenizer.json is empty": (
        lambda m: (m / "tokenizer.json").write_text("{}"),
        ["generate", "-m", "M", "-p", "x"],
        "copy or save its tokenizer.json again",
    ),
    "no tokenizer.json": (
        lambda m: (m / "tokenizer.json").unlink(),
        ["generate", "-m", "M", "-p", "x"],
        "copy or save its tokenizer.json again",
    ),
    "a tokenizer cut short": (
        lambda m: (m / "tokenizer.json").write_text('{"model": {'),
        ["data", "tokenize", "rows.jsonl", "out", "--tokenizer", "M"],
        "tokenizer.json",
    ),
    "a tokenizer that is empty": (
        lambda m: (m / "tokenizer.json").write_text("{}"),
        ["data", "pack", "rows.jsonl", "--tokenizer", "M"],
        "tokenizer.json",
    ),
    "NaN among the weights": (
        "nan",
        ["generate", "-m", "M", "-p", "x"],
        "M: the best logit is nan: the weights hold NaN",
    ),
    "a template that divides by zero": (
        lambda m: (m / "chat_template.jinja").write_text("{{ 1 // 0 }}"),
        ["eval", "M", "rows.jsonl", "--rows", "2", "--answers", "1"],
        "M: the chat template fails on these messages (ZeroDivisionError",
    ),
    "NaN, when it is judged": (
        "nan",
        ["eval", "M", "rows.jsonl", "--rows", "2", "--answers", "1"],
        "NaN",
    ),
    "an empty GGUF file": (
        lambda m: (m / "m.gguf").write_bytes(b""),
        ["generate", "-m", "M/m.gguf", "-p", "x"],
        "m.gguf is empty",
    ),
    "GGUF of what is cut short": (
        lambda m: os.truncate(m / "model.safetensors", 9000),
        ["export", "gguf", "M", "out.gguf"],
        "model.safetensors is damaged or cut short",
    ),
    "GGUF of NaN": (
        "nan",
        ["export", "gguf", "M", "out.gguf", "--type", "q8_0"],
        "has NaN or Inf in ",
    ),
    "a folder where a file is": (
        lambda m: None,
        ["lab", "rows.jsonl", "--copy-only"],
        "rows.jsonl is a file",
    ),
    "a config that is not UTF-8": (
        lambda m: (m / "c.yaml").write_bytes(b"name: sch\xf6n"),
        ["launch", "M/c.yaml", "--dry-run"],
        "c.yaml is not UTF-8",
    ),
    "a run that logged nothing": (
        lambda m: ((m / "metrics.jsonl").write_text(""), (m / "config.yaml").write_text("name: M")),
        ["runs", "health", "M"],
        "M has not logged a step",
    ),
    "base cut short": (
        lambda m: os.truncate(m / "model.safetensors", 9000),
        ["merge", "M", "adapter", "out"],
        "model.safetensors is damaged or cut short",
    ),
    "adapter of another shape": (
        lambda m: None,
        ["merge", "M", "adapter", "out"],
        "is it the right base model?",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_model_is_one_sentence_that_names_the_file(case, home, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    harm, words, hint = DAMAGED[case]
    shutil.copytree(home / "model", tmp_path / "M")
    shutil.copy(home / "rows.jsonl", tmp_path)
    if "merge" in words:
        (tmp_path / "adapter").mkdir()
        save_file(
            {
                f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight": torch.zeros(
                    shape
                )
                for x, shape in (("A", (2, 16)), ("B", (32, 2)))
            },
            tmp_path / "adapter" / "adapter_model.safetensors",
        )
        (tmp_path / "adapter" / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}'
        )
    if harm == "nan":
        save_file(
            {
                name: t * torch.nan
                for name, t in load_file(tmp_path / "M" / "model.safetensors").items()
            },
            tmp_path / "M" / "model.safetensors",
            {"format": "pt"},
        )
    else:
        harm(tmp_path / "M")
    before = {*os.listdir(tmp_path)}
    done = call(*words, cwd=tmp_path)
    assert (
        (done.returncode, done.stdout) == (1, "")
        and hint in done.stderr
        and "Traceback" not in done.stderr
    ), done.stdout + done.stderr
    assert done.stderr.count("\n") == 2 and {*os.listdir(tmp_path)} == before, done.stderr


def change(**values):
    "Other values in a JSON file."
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(share):
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


NOT_JSON = {
    "cut short": cut(0.5),
    "zero bytes": lambda path: path.write_bytes(b"\0" * 99),
    "nested too deep": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "null": lambda path: path.write_text("null"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}"),
}
NOT_BYTES = {
    "cut short": cut(0.5),
    "empty": cut(0),
    "zero bytes": lambda path: path.write_bytes(b"\0" * 999),
    "a wrong length": lambda path: path.write_bytes((2**63).to_bytes(8, "little") + b"{}"),
}
GENERATE = ["generate", "-m", "M", "-p", "x", "--max-new-tokens", "2"]
SHARDS = [
    "train",
    "data.path=S",
    "tokenizer.path=M",
    "train.max_steps=1",
    "data.max_length=16",
    "model.d_model=32",
    "model.n_heads=2",
    "model.n_layers=1",
    "watch_memory=false",
]
RESUME = ["train", "--resume", "R", "train.max_steps=3", "--force-resume"]
HARMS = {  # file -> the command that reads it, and what is done to the file
    "M/config.json": (
        GENERATE,
        NOT_JSON
        | {
            f"{name} = {value!r}"[:40]: change(**{name: value})
            for name, values in dict(
                num_hidden_layers=("x", 1.5, None, 10**7, 10**30, True),
                hidden_size=(-1, [], 10**30),
                num_attention_heads=(0, {}),
                vocab_size=(-1, "x"),
                num_key_value_heads=(0,),
                dtype=("x", []),
                hidden_act=("x", 3),
                rope_parameters=(3,),
                model_type=(None, "x"),
            ).items()
            for value in values
        },
    ),
    "M/trainkit.json": (
        GENERATE,
        {name: NOT_JSON[name] for name in ("cut short", "a list", "nested too deep")},
    ),
    "M/generation_config.json": (
        GENERATE,
        {name: NOT_JSON[name] for name in ("a list", "nested too deep", "null")}
        | {
            "a word ends a text": change(eos_token_id="x"),
            "so does a huge number": change(eos_token_id=[10**30]),
        },
    ),
    "M/model.safetensors": (GENERATE, NOT_BYTES),
    "M/tokenizer.json": (
        GENERATE,
        NOT_JSON
        | {
            "a vocabulary that is none": change(model=dict(type="BPE", vocab=3, merges=[])),
            "a merge of what is not there": change(
                model=dict(type="BPE", vocab=dict(a=0), merges=[["a", "b"]])
            ),
            "a huge id": change(model=dict(type="BPE", vocab=dict(a=10**30), merges=[])),
            "no normalizer": change(normalizer="x"),
        },
    ),
    "M/tokenizer_config.json": (
        ["tokenizer", "show", "M"],
        {name: NOT_JSON[name] for name in ("a list", "nested too deep", "null")}
        | {"a special token that is none": change(eos_token="nowhere")},
    ),
    "A/adapter_config.json": (
        ["merge", "M", "A", "out"],
        NOT_JSON
        | {
            f"{name} = {value!r}": change(**{name: value})
            for name, value in (
                ("r", "x"),
                ("r", -1),
                ("lora_alpha", []),
                ("rank_pattern", 3),
                ("use_dora", {}),
            )
        },
    ),
    "A/adapter_model.safetensors": (["merge", "M", "A", "out"], NOT_BYTES),
    "M.gguf": (
        ["generate", "-m", "M.gguf", "-p", "x"],
        NOT_BYTES
        | {
            f"{size} bytes of it": (lambda path, size=size: os.truncate(path, size))
            for size in (10, 24, 100)
        },
    ),
    "S/index.json": (
        SHARDS,
        NOT_JSON
        | {
            f"{name} = {value!r}": change(**{name: value})
            for name, value in (
                ("dtype", "x"),
                ("dtype", 3),
                ("shards", 3),
                ("shards", [{}]),
                ("shards", []),
            )
        },
    ),
    "R/config.yaml": (
        RESUME,
        {
            name: NOT_JSON[name]
            for name in ("zero bytes", "nested too deep", "a list", "null", "not UTF-8")
        }
        | {"empty": cut(0)},
    ),
    "R/checkpoints/checkpoint-2/manifest.json": (
        RESUME,
        NOT_JSON | {"no files": change(files=3), "no format": change(format=None)},
    ),
    "R/checkpoints/checkpoint-2/state.json": (RESUME, NOT_JSON),
    "R/checkpoints/checkpoint-2/model.safetensors": (RESUME, NOT_BYTES),
    "R/checkpoints/checkpoint-2/optimizer.safetensors": (RESUME, NOT_BYTES),
}


@pytest.fixture(scope="module")
def whole(home):
    "A model, an adapter of it, a GGUF file and shards, none of them damaged."
    import torch

    from trainkit.lora.adapters import save_adapter
    from trainkit.interop.gguf import export_gguf
    from trainkit.interop.hf import load_pretrained
    from trainkit.lora.inject import LoRAConfig
    from trainkit.lora.inject import add_lora
    from trainkit.data.shards import tokenize_to_disk

    folder = home / "whole"
    shutil.copytree(home / "model", folder / "M")
    export_gguf(folder / "M", folder / "M.gguf", "q8_0", progress=False)
    model, tokenizer = load_pretrained(folder / "M")
    torch.manual_seed(0)
    save_adapter(add_lora(model, LoRAConfig(r=2)), folder / "A", base="M")
    (folder / "words.txt").write_text("\n".join(f"The {i} words" for i in range(500)))
    tokenize_to_disk(folder / "words.txt", tokenizer, folder / "S", num_proc=1)
    done = call(
        *SHARDS,
        "train.max_steps=2",
        "name=R",
        "runs_dir=.",
        "watch_memory=false",
        "train.sample_steps=0",
        "train.eval_strategy=no",
        "train.save_strategy=steps",
        "train.save_steps=2",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("file", HARMS)
def test_whatever_is_damaged_is_named(file, whole, tmp_path):
    "Each kind of file, damaged in many ways: exit code 1, and a sentence that names it."
    words, harms = HARMS[file]
    wrong = []
    for name, harm in harms.items():
        folder = tmp_path / f"{len(wrong)}-{list(harms).index(name)}"
        shutil.copytree(whole, folder)
        harm(folder / file)
        try:
            done = call(*words, cwd=folder)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
        else:
            names = (
                (file, file.rpartition("/")[0] + "/", f"{file.rpartition('/')[0]} ")
                if "/" in file
                else (file,)
            )
            if file.startswith("R/checkpoints"):
                names = (
                    "R/checkpoints contains no checkpoint to resume from: checkpoint-2 is damaged",
                )
            if (
                done.returncode != 1
                or not done.stderr.startswith("Error: ")
                or not any(part in done.stderr for part in names)
            ):
                wrong.append(f"{name}: {done.returncode} {done.stderr}"[:300])
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)


def test_a_damaged_index_of_runs_is_made_again(whole, tmp_path):
    "The index is a cache of the runs' own files: lines of other types cost only time."
    shutil.copytree(whole / "R", tmp_path / "runs" / "R")
    index = tmp_path / "runs" / "index.jsonl"
    right = call("runs", "list", cwd=tmp_path).stdout
    line = json.loads(index.read_text())
    assert "finished" in right
    for text in (
        "",
        "\0" * 99,
        "[" * 100_000,
        "[]",
        "null",
        '{"run": ',
        *(
            json.dumps(line | {name: value})
            for name in line
            for value in (None, 3, [], {})
            if type(value) is not type(line[name])
        ),
    ):
        index.write_text(text + "\n")
        done = call("runs", "list", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, right), (text[:80], done.stderr)


def test_a_full_disk_names_the_file(tmp_path):
    "An error of an open file has no name; what a user sees has one."
    import errno

    from trainkit.files import writing

    with pytest.raises(OSError) as caught, writing(tmp_path / "x.bin"):
        raise OSError(errno.EIO, "Input/output error")
    assert str(caught.value) == f"[Errno {errno.EIO}] Input/output error: '{tmp_path / 'x.bin'}'"
    for error in (  # The second is numpy's, which has no number
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("1000 requested and 200 written"),
        OSError(errno.EROFS, "Read-only file system", str(tmp_path / ".x.a1b2")),
    ):
        with (
            pytest.raises(OSError, match="Nothing was written to .*x.bin: the disk is"),
            writing(tmp_path / "x.bin"),
        ):
            raise error
    with pytest.raises(OSError) as caught, writing(tmp_path / "x.bin"):
        raise OSError(errno.ENOSPC, "No space left on device", "other")
    assert caught.value.filename == "other"


def full_after(monkeypatch, files):
    "A disk that takes some files more, and no other."
    import errno

    taken, sync = [], os.fsync

    def fsync(handle):
        taken.append(handle)
        if len(taken) > files:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def everything(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("files", [0, 1, 2])
def test_a_full_disk_leaves_the_old_tokenizer_whole(tmp_path, monkeypatch, files):
    "Never the new tokens with the roles or the chat format of before."
    from trainkit import BPETokenizer
    from trainkit.tokenizer import set_template

    old, new = (
        BPETokenizer.train([text * 50], 262, "gpt2", special, progress=False)
        for text, special in (
            ("the cat sat on the mat ", ["<|endoftext|>"]),
            ("red and blue and green ", ["<|end|>", "<|begin|>"]),
        )
    )
    for tokenizer in (old, new):
        set_template(tokenizer, "chatml")
    (old.save(tmp_path / "t") / "model.txt").write_text("something else")
    before = everything(tmp_path)
    assert len(before) == 4
    full_after(monkeypatch, files)
    with pytest.raises(
        OSError,
        match=(
            r"Nothing was written to .*t.(tokenizer|tokenizer_config|chat_template)\.j\w+: "
            r"the disk is full"
        ),
    ):
        new.save(tmp_path / "t")
    assert everything(tmp_path) == before
    monkeypatch.undo()
    new.save(tmp_path / "t")
    assert BPETokenizer.load(tmp_path / "t").tokens == new.tokens


def test_a_full_disk_leaves_the_old_picture(tmp_path, monkeypatch):
    from trainkit.charts import bars, draw_svg

    draw_svg(bars, {"a": 1.0, "b": 2.0}).save(tmp_path / "a.svg")
    before = everything(tmp_path)
    full_after(monkeypatch, 0)
    with pytest.raises(OSError, match=r"Nothing was written to .*a\.svg: the disk is full"):
        draw_svg(bars, {"a": 3.0}).save(tmp_path / "a.svg")
    assert everything(tmp_path) == before


class SaysItInRust:
    "As tokenizers and safetensors do: the error has a class of its own, and no file."

    def save_pretrained(self, folder):
        raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.skipif(sys.platform == "win32", reason="numbers of POSIX")
def test_a_full_disk_that_a_library_in_rust_meets_names_the_folder(tmp_path):
    import errno

    from trainkit.files import atomic_folder

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old.txt").write_text("old")
    with (
        pytest.raises(OSError, match=r"Nothing was written to .*m: the disk is full") as caught,
        atomic_folder(tmp_path / "m") as new,
    ):
        SaysItInRust().save_pretrained(new)
    assert caught.value.errno == errno.ENOSPC and [p.name for p in tmp_path.rglob("*")] == [
        "m",
        "old.txt",
    ]
    with pytest.raises(Exception, match="of another kind") as caught, atomic_folder(tmp_path / "m"):
        raise Exception("of another kind")
    assert type(caught.value) is Exception


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounts a small disk"
)
def test_a_disk_that_fills_up_while_a_model_is_saved(tmp_path):
    "Both kinds of model and tokenizer: the old folder stays, and the error names it."
    import torch
    import transformers

    from trainkit import BPETokenizer, ModelConfig, Transformer
    from trainkit.interop.hf import save_pretrained

    tokenizer = BPETokenizer.train(["the cat sat on the mat " * 50], 262, progress=False)
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer.save(tmp_path / "words"))
    net = Transformer(
        ModelConfig(
            vocab_size=len(tokenizer), d_model=16, n_heads=2, n_layers=1, d_ff=16, max_seq_len=32
        )
    )
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("may not mount here")
    try:
        save_pretrained(net, tokenizer, disk / "m", verify=False)
        before = everything(disk)
        free = shutil.disk_usage(disk).free
        for room in (0, 8_000, 24_000, 44_000):
            (disk / "fill").write_bytes(b"x" * max(0, free - room))
            for model in (net, theirs):
                for words in (tokenizer, fast):
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(0.1)
                    with pytest.raises(
                        OSError, match=r"Nothing was written to .*disk.m.*: the disk is full"
                    ):
                        save_pretrained(model, words, disk / "m", verify=False)
                    assert {
                        name: data for name, data in everything(disk).items() if str(name) != "fill"
                    } == before
            (disk / "fill").unlink()
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounts a small disk"
)
@pytest.mark.parametrize("room", [12_288, pytest.param(40_000, marks=pytest.mark.slow)])
def test_a_session_on_a_disk_that_fills_up_says_so(tmp_path, room):
    "Also where the process cannot write what it said last."
    from trainkit.config import load_config
    from trainkit.recipes.config import RunConfig
    from trainkit.widgets.session import TrainSession

    (tmp_path / "words.txt").write_text(
        "\n".join(
            f"The {i} little words that {i * 7} say more than {i * i} others." for i in range(300)
        )
    )
    words = (
        f"data.path={tmp_path}/words.txt data.max_length=32 tokenizer.vocab_size=300 "
        "model.d_model=32 model.n_heads=2 model.n_layers=1 model.d_ff=64 "
        "train.max_steps=2 train.per_device_train_batch_size=2 sampling.max_new_tokens=2 "
        "watch_memory=false"
    )
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("may not mount here")
    try:
        (disk / "fill").write_bytes(b"x" * (shutil.disk_usage(disk).free - room))
        session = TrainSession(
            load_config(RunConfig, dict(runs_dir=str(disk), name="r"), words.split())
        )
        with pytest.raises(Exception, match=r"disk.r.*the disk is full: free some space"):
            session.start("process")
            session.result()
        assert "Traceback" not in (disk / "r" / "output.txt").read_text()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_run_stays_in_its_folder(tmp_path):
    "A name may have folders in it, and leads nowhere else."
    from trainkit.config import ConfigError
    from trainkit.recipes.config import RunConfig

    assert RunConfig(name="a/b").folder.parts == ("runs", "a", "b")
    for name in (str(tmp_path / "x"), "../x", "a/../../x", "~/x", "C:\\x", "", "."):
        with pytest.raises(ConfigError, match="names the folder of the run"):
            RunConfig(name=name)


def test_a_piped_chat_that_cannot_answer_says_so_by_its_exit_code(home, tmp_path):
    for text, code in (("Spell 1.\n", 0), ("x " * 3000 + "\n", 1), ("/retry\n", 1)):
        here = sys.stdin
        sys.stdin = io.StringIO(text)
        try:
            done = call("chat", "-m", home / "model", "--max-new-tokens", "3", cwd=tmp_path)
        finally:
            sys.stdin = here
        assert done.returncode == code, (text[:20], done.stderr)


def test_an_encoding_that_nobody_knows_and_a_link_to_nowhere(home):
    for name in ("gone.jsonl",):
        if not (home / name).is_symlink():
            (home / name).symlink_to("nowhere")
    for words, hint in (
        (
            ["data", "show", "rows.jsonl", "--encoding", "utf-99"],
            "encoding = 'utf-99' is not known",
        ),
        (["data", "show", "gone.jsonl"], "a link to nowhere"),
    ):
        done = call(*words, cwd=home)
        assert done.returncode == 1 and hint in done.stderr, done.stderr


def test_a_small_file_is_not_0_mb(home, tmp_path):
    (tmp_path / "text.txt").write_text("Spell zero and one. " * 100)
    done = trainkit(
        "data", "tokenize", "text.txt", "out", "--tokenizer", home / "model", cwd=tmp_path
    )
    assert done.returncode == 0 and "2/2 kB" in done.stderr, done.stderr


def test_a_warning_is_a_line_without_source_code(tmp_path):
    (tmp_path / "c.yaml").write_text("use_wandb: true\n")
    done = trainkit("config", "show", "c.yaml", cwd=tmp_path)
    assert (
        done.returncode == 0
        and done.stderr.startswith("Warning: use_wandb")
        and done.stderr.count("\n") == 1
    ), done.stderr


def test_what_a_run_notes_is_not_in_its_json(home, tmp_path):
    "Resuming with other data or knobs is noted, and a program still reads one JSON value."
    train = [
        "train",
        "--method",
        "sft",
        "-m",
        home / "model",
        "--dataset",
        home / "rows.jsonl",
        "train.sample_steps=0",
        "train.eval_strategy=no",
        "sft.questions=0",
        "data.max_length=64",
        "watch_memory=false",
        "name=a",
    ]
    first = call(*train, "train.max_steps=2", "--json", cwd=tmp_path)
    assert json.loads(first.stdout)["steps"] == 2, first.stderr
    more = call(
        "train",
        "--resume",
        "runs/a",
        "--force-resume",
        "optim.learning_rate=0.5",
        "train.max_steps=3",
        "--json",
        cwd=tmp_path,
    )
    assert json.loads(more.stdout)["steps"] == 3 and "as you requested" in more.stderr, (
        more.stdout + more.stderr
    )


@pytest.mark.parametrize("colour", [True, False])
def test_no_color_is_heard(colour, tmp_path, monkeypatch):
    "Also in the message of an error in a terminal (no-color.org)."
    from trainkit.cli import main

    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    monkeypatch.setattr(sys, "argv", ["trainkit", "train", str(tmp_path / "nowhere.yaml")])
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    screen.isatty = lambda: True
    with pytest.raises(SystemExit):
        main()
    assert "nowhere.yaml" in screen.getvalue() and ("\x1b[31m" in screen.getvalue()) == colour, (
        screen.getvalue()
    )


def closed(words, cwd, env):
    sys.stdin = None  # as Python has it where the shell closed it
    return command(words, cwd, env)


class Bare:
    "A stream that has nothing but `write`."

    def write(self, text):
        pass


def spoil(how):
    "Streams that do not take what a run prints."

    def broken():
        ours, theirs = os.pipe()
        os.close(ours)
        return open(theirs, "w", encoding="utf-8")

    if how == "closed":
        os.close(1), os.close(2)
    make = {
        "cp1252": lambda: open(os.devnull, "w", encoding="cp1252"),
        "ascii": lambda: open(os.devnull, "w", encoding="ascii"),
        "a full disk": lambda: open("/dev/full", "w"),
        "a pipe that nobody reads": broken,
        "closed": lambda: None,
        "nothing but write": Bare,
    }[how]
    sys.stdout, sys.stderr = make(), make()


def unheard(how, words, cwd, by_command):
    "The run, by the command or the function that it calls; exit code 7 if it does not end well."
    here = sys.stdout, sys.stderr
    os.chdir(cwd)
    try:
        spoil(how)
        if by_command:
            return command(["train", *words], cwd, {})
        from trainkit.recipes.config import method_config
        from trainkit.recipes.runner import run

        return 0 if run(method_config(None, words)).steps == 2 else 7
    finally:
        sys.stdout, sys.stderr = [
            open(os.devnull, "w") if how == "closed" else stream for stream in here
        ]


@POSIX
@pytest.mark.parametrize(
    "how",
    ["cp1252", "ascii", "a full disk", "a pipe that nobody reads", "closed", "nothing but write"],
)
@pytest.mark.parametrize("by_command", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_output_never_ends_a_run(how, by_command, tmp_path):
    if how == "a full disk" and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "words.txt").write_text(
        "\n".join(f"The {i} words → that say {i * 7} ☃ more." for i in range(300)), encoding="utf-8"
    )
    (tmp_path / "others.txt").write_text(
        "\n".join(f"Other {i} words say less." for i in range(300))
    )
    words = (
        "data.path=words.txt data.eval_file=others.txt data.max_length=32 tokenizer.vocab_size=300 "
        "model.d_model=32 model.n_heads=2 model.n_layers=1 model.d_ff=64 "
        "train.max_steps=2 train.per_device_train_batch_size=2 train.logging_steps=1 "
        "sampling.max_new_tokens=3 name=quiet watch_memory=false"
    ).split()
    done = in_child(unheard, how, words, tmp_path, by_command, folder=tmp_path)
    assert done.returncode == 0 and (tmp_path / "runs" / "quiet" / "report.html").exists(), done


def looked(how, words, cwd):
    here = sys.stdout, sys.stderr
    try:
        spoil(how)
        if how == "a full disk":
            sys.stderr = here[1]
        return command(words, cwd, {})
    finally:
        sys.stdout, sys.stderr = here


@POSIX
@pytest.mark.parametrize("how", ["cp1252", "ascii", "a full disk"])
@pytest.mark.parametrize(
    "words",
    ["doctor", "data show rows.jsonl", "chat -m MODEL --max-new-tokens 3", "demo --only PHASE"],
)
def test_a_console_that_cannot_show_it(how, words, home, tmp_path):
    "The output is escaped; a full disk behind standard output is an error that names it."
    if how == "a full disk" and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict(prompt="→ ☃", completion="ü 你好")) + "\n")
    done = in_child(
        looked, how, words.replace("MODEL", str(home / "model")).split(), tmp_path, folder=tmp_path
    )
    assert "Traceback" not in done.stderr and "codec" not in done.stderr, done.stderr
    if words.startswith("demo"):
        assert done.returncode == 1 and ("PHASE" in done.stderr or how != "a full disk")
    elif how == "a full disk":
        assert (done.returncode, "standard output" in done.stderr) == (
            (0, False) if words.startswith("chat") else (1, True)
        ), done.stderr
    else:
        assert done.returncode == 0, done


def test_no_standard_input_is_an_empty_one(home, tmp_path):
    done = in_child(closed, ["generate", "-m", str(home / "model")], tmp_path, {}, folder=tmp_path)
    assert done.returncode == 2 and "nothing to continue" in done.stderr, done.stderr


def test_json_for_programs_is_strict(capsys):
    "NaN becomes null, and an infinite number one that is read as infinite."
    from trainkit.cli import _json
    from trainkit.files import to_json

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    value = dict(low=math.nan, of=[math.inf, -math.inf], words=("nan", "\0x"), n=np.float64("nan"))
    _json(value)
    for text in (to_json(value, indent=1), capsys.readouterr().out):
        assert json.loads(text, parse_constant=refuse) == dict(
            low=None, of=[math.inf, -math.inf], words=["nan", "\0x"], n=None
        )


def test_a_config_that_was_not_written_is_not_said_to_start_a_run(tmp_path):
    (tmp_path / "theirs.yaml").write_text("base_model: x\nadapter: lora\n")
    (tmp_path / "file").write_text("")
    done = call("config", "convert", "theirs.yaml", "-o", "file/ours.yaml", cwd=tmp_path)
    assert done.returncode == 1 and "Nothing was written to file/ours.yaml" in done.stderr
    assert not done.stdout


@pytest.mark.slow
def test_programs_read_json_and_nothing_else(home, tmp_path):
    "Each command with --json."
    (tmp_path / "theirs.yaml").write_text("base_model: x\nadapter: lora\nmicro_batch_size: 2\n")
    model, rows = str(home / "model"), str(home / "rows.jsonl")
    train = [
        "train",
        "--method",
        "sft",
        "-m",
        model,
        "--dataset",
        rows,
        "train.max_steps=2",
        "train.sample_steps=0",
        "sft.questions=2",
        "data.max_length=64",
    ]
    for words in (
        [*train, "name=a"],
        [*train, "name=b", "optim.learning_rate=1e-3"],
        [*train, "--dry-run"],
        ["runs", "list"],
        ["runs", "compare", "a", "b"],
        ["runs", "show", "a"],
        ["runs", "health", "a"],
        ["eval", "runs/a/model", rows, "--base", model, "--rows", "4", "--answers", "2"],
        ["config", "show"],
        ["config", "presets"],
        ["config", "convert", "theirs.yaml"],
        ["tokenizer", "show", model],
        ["tokenizer", "encode", model, "Spell"],
        ["doctor"],
        ["memory", "predict", "-m", model],
        ["memory", "plan", "-m", model, "--budget", "1 GB"],
        ["data", "check", rows],
    ):
        done = trainkit(*words, "--json", cwd=tmp_path)
        json.loads(done.stdout)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, (words, done.stderr)


RUDE = "red \x1b[31m title \x1b]0;owned\x07 back\rover \x9b2J \u202egnp.exe"
KIND = "red ⟨1B⟩[31m title ⟨1B⟩]0;owned⟨07⟩ back⟨0D⟩over ⟨9B⟩2J ⟨202E⟩gnp.exe"


def no_controls(text: str) -> bool:
    import re

    return not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", text)


def test_data_and_prompts_do_nothing_in_a_terminal(home, tmp_path):
    file = tmp_path / "ro\x1b[31mws.jsonl"
    file.write_text(
        "\n".join(
            json.dumps(row)
            for row in [dict(prompt=RUDE, completion=f"{RUDE} {n}") for n in range(4)]
            + [dict(prompt=RUDE, answer=RUDE)]
        )
    )
    model = str(home / "model")
    for words, seen in (
        (["data", "show", file], KIND[:20]),
        (["data", "check", file], "1B"),
        (["data", "check", file, "--json"], ""),
        (["generate", "-m", model, "-p", RUDE, "--max-new-tokens", "3"], KIND),
        (["generate", "-m", RUDE, "-p", "x"], "⟨1B⟩"),
        (["tokenizer", "encode", model, "--text", RUDE], ""),
        (["data", "show", str(file) + "\x1b[2J"], "⟨1B⟩"),
    ):
        done = call(*words, cwd=tmp_path, NO_COLOR="1")
        assert no_controls(done.stdout + done.stderr), (words, done.stdout, done.stderr)
        assert seen in done.stdout + done.stderr, (words, done.stdout, done.stderr)
        if "--json" in words:
            json.loads(done.stdout)


def test_prompts_and_answers_do_nothing_in_a_log(tmp_path, capsys):
    import io

    from trainkit.progress import Progress
    from trainkit.train.runs import RunFolder
    from trainkit.train.loggers import MetricsLog

    folder = RunFolder(tmp_path / "run")
    log = MetricsLog(folder, console=True)
    log.say(f"a sample: {RUDE}")
    folder.log(RUDE)
    shown = capsys.readouterr().out + (folder.path / "log.txt").read_text(encoding="utf-8")
    assert no_controls(shown) and shown.count(KIND) == 3
    for where in ("lines", "terminal"):
        file = io.StringIO()
        with Progress(10, RUDE, where=where, file=file) as bar:
            bar.update(1, said=RUDE)
            output = bar.status() + "".join(part for part, _ in bar.parts(400))
            if where == "lines":
                bar.screen.refresh(bar)
        assert no_controls(output) and KIND in output
        if where == "lines":
            assert no_controls(file.getvalue()) and KIND in file.getvalue()


def test_a_tuned_model_is_compared_with_a_base_that_lacks_the_tokens_of_its_chat(home, tmp_path):
    "The base gets a row for each, as it did when tuning began, and the command says so."
    import torch

    from trainkit.interop.hf import save_pretrained
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    plain = BPETokenizer.train(
        [row["prompt"] + row["completion"] for row in rows],
        280,
        special_tokens=["<|endoftext|>"],
        progress=False,
    )
    torch.manual_seed(1)
    shape = dict(d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=64)
    base = Transformer(ModelConfig(vocab_size=plain.vocab_size, **shape))
    save_pretrained(base, plain, tmp_path / "base")
    words = ["eval", str(home / "model"), str(home / "rows.jsonl"), "--rows", "3"]
    words += ["--base", str(tmp_path / "base"), "--answers", "0", "--json"]
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) and "2 tokens of the rows" in done.stderr, done.stderr
    assert "are unknown to" in done.stderr


def test_a_metric_from_a_file(home, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def same_start(answers, expected):\n"
        "    print('comparing')\n"
        "    return [float(a[:1] == e[:1]) for a, e in zip(answers, expected)]\n"
        "def half(answers, expected):\n"
        "    import numpy\n"
        "    return numpy.float32(0.5)\n"
    )
    words = ["eval", str(home / "model"), str(home / "rows.jsonl"), "--rows", "2", "--json"]
    done = call(*words, "--metric", "mine.py:same_start", "--metric", "mine.py:half", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measures = json.loads(done.stdout)["measures"]
    assert measures["same_start"]["model"]["n"] == 2 and "comparing" in done.stderr
    assert measures["half"]["model"]["value"] == 0.5
    wrong = call(*words, "--metric", "mine.py:sam_start", cwd=tmp_path)
    assert wrong.returncode and "Did you mean 'same_start'" in wrong.stderr


def test_shards_of_a_folder_are_of_one_split(home, tmp_path):
    for name in ("train", "test"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "a.jsonl").write_text('{"text": "zero one"}\n')
    words = ["data", "tokenize", "texts", "out", "--tokenizer", home / "model"]
    for more, said in (([], "splits: train, test; read: train"), (["--split", "test"], "")):
        done = call(*words, *more, "--overwrite", cwd=tmp_path)
        assert done.returncode == 0 and ("read: train" in done.stdout) == bool(said), done.stdout


def test_rows_written_as_messages_keep_their_columns(tmp_path):
    "Of one file by convert, and of files of different kinds by mix: its file is read whole."
    tools = [dict(type="function", function=dict(name="add", parameters=dict(type="object")))]
    turns = [dict(role="user", content="Tell 1"), dict(role="assistant", content="1!")]
    files = dict(
        ins=dict(instruction="Say 1", output="1", id=7),
        msg=dict(messages=turns, tools=tools),
        text=dict(text="one"),
    )
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    done = call("data", "convert", "msg.jsonl", "one.jsonl", "--to", "messages", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "one.jsonl").read_text())["tools"] == tools
    words = ["data", "mix", "a=ins.jsonl", "b=msg.jsonl", "--output", "mix.jsonl"]
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 0 and "instruction and messages are written as mes" in done.stdout
    lines = (tmp_path / "mix.jsonl").read_text().splitlines()
    rows = {row["task"]: row for row in map(json.loads, lines)}
    shown = call("data", "show", "mix.jsonl", cwd=tmp_path).stdout
    assert "2 rows of kind messages" in shown
    assert rows["a"]["messages"][0]["content"] == "Say 1" and rows["a"]["id"] == 7
    assert rows["b"]["messages"] == turns and rows["b"]["tools"] == tools
    done = call("data", "mix", "a=ins.jsonl", "b=text.jsonl", "--output", "x.jsonl", cwd=tmp_path)
    assert done.returncode == 1 and "do not train together" in done.stderr
