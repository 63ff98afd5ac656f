"The commands as a newcomer types them, with right and wrong input and a small real model."

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.processes import call, command, in_child
from support.processes import shell as trainkit

from trainkit.audit.report import SUBJECTS
from trainkit.eval.evaluator import load_questions
from trainkit.recipes.commands import show_tokenizer
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.train.checkpoint import run_lock

SMALL = [
    "data.path=stdlib",
    "data.max_chars=300000",
    "data.max_length=64",
    "tokenizer.vocab_size=600",
    "model.d_model=64",
    "model.n_heads=2",
    "model.n_layers=2",
    "model.d_ff=128",
    "train.max_steps=30",
    "train.logging_steps=5",
    "train.eval_steps=15",
    "train.save_steps=10",
    "train.sample_steps=0",
    "train.per_device_train_batch_size=4",
    "sampling.max_new_tokens=12",
    "watch_memory=false",
]

LATER = [
    "demo.topics=9",
    "demo.rank=2",
    "demo.tuning_steps=4",
    "demo.preference_steps=4",
    "demo.shown=1",
]  # the phases behind the first


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = trainkit("demo", *SMALL, *LATER, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_demo_says_what_it_does(demo):
    _, output = demo
    for part in (
        "Tokenizer",
        "parameters",
        "30 steps",
        "Before training",
        "After training",
        "Bits per byte",
        "this model",
        "token frequencies",
        "gzip",
        "xz",
        "report.html",
        "Phase 1 of 4",
        "Phase 4 of 4",
        "right answers",
        "NF4",
        "no difference seen",
    ):
        assert part in output, part


def test_demo_leaves_a_whole_run_folder(demo):
    run = demo[0] / "runs" / "demo"
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "log.txt",
        "report.html",
        "checkpoints",
        "model",
        "best_model",
    ):
        assert (run / name).exists(), name
    events = [
        json.loads(line)["event"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert {"start", "log", "eval", "sample", "save", "end"} <= set(events)
    report = (run / "report.html").read_text()
    for phase in ("sft", "dpo"):
        assert (
            (run / phase / "adapter" / "adapter_config.json").is_file()
            and (run / phase / "model").is_dir()
            and (run / phase / "report.html").is_file()
        )
    for part in (
        "Four models",
        "Answers to held-out questions",
        "Side by side, token by token",
        "Seconds for each part",
        "Held-out text",
    ):
        assert part in report, part
    notes = json.loads((run / "demo.json").read_text())
    assert (
        notes["finished"]
        and list(notes["seconds"]) == ["pretrain", "sft", "dpo", "compare"]
        and all(s > 0 for s in notes["seconds"].values())
    )
    base, *_, few = notes["models"]
    assert few["MB of weights"] < base["MB of weights"] and [
        row["model"] for row in notes["models"]
    ] == ["base", "SFT", "DPO", "NF4"]
    assert "http://" not in report.replace("http://www.w3.org", "") and "https://" not in report, (
        "a report needs nothing else"
    )
    assert "<svg" in report and "bits" in report.lower()
    assert str(demo[0]) not in report


def test_every_figure_of_the_demo_says_what_it_was_measured_on(demo):
    folder, output = demo
    [held_out] = re.findall(r"stdlib: .* characters to train on, ([\d,]+) held out", output)
    report, notes = (
        (folder / "runs" / "demo" / "report.html").read_text(),
        json.loads((folder / "runs" / "demo" / "demo.json").read_text()),
    )
    text = f"the {held_out} held-out characters of stdlib, read in rows of 64 tokens"
    assert f"Bits per byte of {text}" in output and f"one byte of {text}" in report
    measured_on = (
        "Right answers, and answers in a sentence: of the same 3 held-out questions. "
        "Finds the sentence likelier: in 3 held-out pairs. "
        f"Bits per byte: of the same {held_out} held-out characters that pre-training was "
        "evaluated on, in rows of 64 tokens as there."
    )
    assert measured_on in output and measured_on in report
    assert notes["models"][0]["bits per byte of text"] == pytest.approx(
        notes["metrics"]["bits_per_byte"], abs=1e-4
    )  # one model, one text, one figure
    answers = (folder / "runs" / "demo" / "sft" / "report.html").read_text()
    assert "3 held-out questions" in answers


def test_transformers_and_the_command_go_on_alike(demo):
    "That it opens where our code is not, test_hf shows."
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo[0] / "runs" / "demo" / "model"
    model, words = (c.from_pretrained(folder) for c in (AutoModelForCausalLM, AutoTokenizer))
    assert type(model).__name__ == "LlamaForCausalLM"
    text = words.decode(
        model.generate(
            words("import os", return_tensors="pt").input_ids, max_new_tokens=8, do_sample=False
        )[0]
    )
    ours = call(
        "generate",
        "-m",
        str(folder),
        "-p",
        "import os",
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
        cwd=demo[0],
    )
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.strip() == text.removesuffix("<|endoftext|>").strip()


def test_the_same_seed_says_the_same(demo):
    ask = ["generate", "-m", "runs/demo/model", "-p", "def ", "--max-new-tokens", "10", "--seed"]
    first, again, other = (
        run(*ask, seed, cwd=demo[0]).stdout
        for run, seed in ((trainkit, "1"), (call, "1"), (call, "2"))
    )
    assert first == again != other
    guessed = call(*ask, "1", "--prompt-lookup-num-tokens", "4", cwd=demo[0])
    assert guessed.stdout == first, guessed.stderr


def test_a_config_file_makes_the_run_again(demo):
    "The saved config alone gives the same losses, bit for bit."
    done = trainkit("train", "runs/demo/config.yaml", "name=again", cwd=demo[0])
    assert done.returncode == 0, done.stderr
    losses = [
        [
            r["loss"]
            for r in map(
                json.loads, (demo[0] / "runs" / name / "metrics.jsonl").read_text().splitlines()
            )
            if r["event"] == "log"
        ]
        for name in ("demo", "again")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_a_second_run_never_overwrites_the_first(demo):
    done = trainkit("train", "runs/demo/config.yaml", "train.max_steps=2", cwd=demo[0])
    assert done.returncode == 0 and (demo[0] / "runs" / "demo-2" / "model").is_dir(), done.stderr
    assert "Folder     runs/demo-2, as runs/demo has a run already" in done.stdout


def interrupted(words, cwd, env, step):
    "The command, which gets a Ctrl-C after a step."
    from trainkit.train.loggers import MetricsLog

    def press(self, trainer, record):
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    MetricsLog.on_step = press
    return command(words, cwd, env)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_saves_and_resume_goes_on(demo, tmp_path):
    "A run that is interrupted and resumed ends with the weights of the uninterrupted one."
    run = tmp_path / "runs" / "demo"
    stopped = in_child(interrupted, ["demo", *SMALL], tmp_path, {}, 13, folder=tmp_path)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    assert f"--resume {Path('runs') / 'demo'}" in stopped.stdout
    assert "resume=True" not in stopped.stdout, "that is for Python"
    assert (run / "checkpoints" / "checkpoint-13").is_dir()
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    other = call("train", "--resume", str(run), "optim.learning_rate=0.5", cwd=tmp_path)
    assert (
        other.returncode
        and "optim.learning_rate was" in other.stderr
        and "--force-resume" in other.stderr
    ), other.stderr
    with run_lock(run):
        busy = trainkit("train", "--resume", str(run), "train.logging_steps=7", cwd=tmp_path)
    assert busy.returncode and f"process {os.getpid()} on" in busy.stderr, busy.stderr
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == files
    shutil.copytree(run, tmp_path / "forced")
    forced = call(
        "train",
        "--resume",
        tmp_path / "forced",
        "--force-resume",
        "optim.learning_rate=0.5",
        "train.max_steps=14",
        cwd=tmp_path,
    )
    assert forced.returncode == 0 and "as you requested" in forced.stdout, (
        forced.stdout + forced.stderr
    )
    resumed = trainkit("train", run / "config.yaml", "--resume", "auto", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    weights = [
        (folder / "runs" / "demo" / "model" / "model.safetensors").read_bytes()
        for folder in (tmp_path, demo[0])
    ]
    assert weights[0] == weights[1]


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_demo_goes_on_in_the_phase_where_it_was_stopped(demo, tmp_path):
    """Ctrl-C during preference tuning: the same command does the rest.

    It ends with the weights of an undisturbed demo.
    """
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    run = tmp_path / "runs" / "demo"
    notes = json.loads((run / "demo.json").read_text())
    del notes["finished"], notes["seconds"]["dpo"], notes["seconds"]["compare"]
    (run / "demo.json").write_text(json.dumps(notes))
    shutil.rmtree(run / "dpo")
    shutil.rmtree(tmp_path / "runs" / "demo-2", ignore_errors=True)
    shutil.rmtree(tmp_path / "runs" / "again", ignore_errors=True)
    stopped = in_child(interrupted, ["demo", *SMALL, *LATER], tmp_path, {}, 2, folder=tmp_path)
    assert (
        stopped.returncode == 130
        and "Phase 1" not in stopped.stdout
        and "the same command again" in stopped.stdout
    ), stopped.stdout + stopped.stderr
    other = call("demo", *SMALL, *LATER[:-1], "demo.bits=8", "--only", "stf", cwd=tmp_path)
    assert other.returncode == 1 and "pretrain, sft" in other.stderr
    ended = trainkit("demo", *SMALL, *LATER, cwd=tmp_path)
    assert ended.returncode == 0 and "Resuming" in ended.stdout and "Phase 2" not in ended.stdout, (
        ended.stdout + ended.stderr
    )
    assert not (tmp_path / "runs" / "demo-2").exists()
    weights = [
        (folder / "runs" / "demo" / "dpo" / "model" / "model.safetensors").read_bytes()
        for folder in (tmp_path, demo[0])
    ]
    assert weights[0] == weights[1]


WRONG = {
    "demo: no such phase": (["demo", "--only", "tuning", *SMALL], "pretrain, sft, dpo"),
    "demo: a knob of the later phases": (["demo", "demo.bits=5"], "must be one of 4, 8"),
    "no such config": (["train", "nowhere.yaml"], "nowhere.yaml"),
    "unknown knob": (["demo", "train.max_step=3"], "Did you mean 'max_steps'"),
    "zero steps": (["demo", "train.max_steps=0"], "train.max_steps"),
    "negative steps": (["demo", "train.max_steps=-5"], "train.max_steps"),
    "learning rate that is NaN": (["demo", "optim.learning_rate=.nan"], "finite number"),
    "width and heads": (["demo", "model.d_model=100", "model.n_heads=3"], "divisible"),
    "rows too long": (
        [
            "demo",
            "data.max_length=512",
            "model.max_seq_len=64",
            *[s for s in SMALL if "max_length" not in s],
        ],
        "max_seq_len",
    ),
    "vocabulary too small": (["demo", "tokenizer.vocab_size=200"], "tokenizer.vocab_size"),
    "missing data": (["demo", "data.path=nothing.txt"], "nothing.txt"),
    "empty data": (["demo", "data.path=empty.txt"], "empty"),
    "binary data": (["demo", "data.path=binary.txt"], "binary"),
    "wrong encoding": (["demo", "data.path=latin.txt"], "line 2"),
    "no such model": (["generate", "-m", "nowhere", "-p", "x"], "nowhere"),
    "a model in one file": (
        ["generate", "-m", "checkpoint-10000.pt", "-p", "x"],
        "load_state_dict",
    ),
    "force without a run": (["train", "--force-resume"], "--force-resume goes with --resume"),
    "not a run": (["train", "--resume", "."], "config.yaml"),
    "serve: an adapter with the name of the model": (
        ["serve", "done/model", "--adapter", "done=done/adapter"],
        "give the adapter another name",
    ),
    "a finished run without a checkpoint": (["train", "--resume", "done"], "begin again"),
    "a checkpoint in one file": (
        ["train", "--resume", "checkpoint-10000.pt"],
        "is one file, and a checkpoint here is a folder",
    ),
    "unknown method": (
        ["train", "--method", "stf", "--dataset", "latin.txt"],
        "Did you mean 'sft'",
    ),
    "method and data that do not fit": (
        ["train", "--method", "pretrain", "--dataset", "pairs.jsonl", *SMALL[1:]],
        "use method=sft",
    ),
    "answers that are missing": (
        ["train", "--method", "sft", "--dataset", "half.jsonl", *SMALL[2:]],
        "half.jsonl, line 2",
    ),
    "no such base model": (
        ["train", "--method", "sft", "--model", "nowhere", "--dataset", "pairs.jsonl"],
        "nowhere",
    ),
    "check: missing file": (["data", "check", "nothing.jsonl"], "nothing.jsonl"),
    "check: max_length without a tokenizer": (
        ["data", "check", "pairs.jsonl", "--max-length", "9"],
        "--model",
    ),
    "split: over its own input": (
        [
            "data",
            "split",
            "pairs.jsonl",
            "--train-output",
            "pairs.jsonl",
            "--eval-output",
            "e.jsonl",
        ],
        "the file that is read",
    ),
    "split: unknown column": (
        [
            "data",
            "split",
            "pairs.jsonl",
            "--train-output",
            "t.jsonl",
            "--eval-output",
            "e.jsonl",
            "--stratify",
            "tsk",
        ],
        "tsk",
    ),
    "split: percentage": (
        [
            "data",
            "split",
            "pairs.jsonl",
            "--train-output",
            "t.jsonl",
            "--eval-output",
            "e.jsonl",
            "--eval-percentage",
            "0",
        ],
        "between 0 and 100",
    ),
    "convert: broken rows": (["data", "convert", "half.jsonl", "x.csv"], "half.jsonl, line 2"),
    "convert: unknown form": (["data", "convert", "pairs.jsonl", "x.xml"], "x.xml"),
    "show: binary": (["data", "show", "binary.txt"], "binary"),
    "tokenize: no tokenizer": (
        ["data", "tokenize", "latin.txt", "out", "--tokenizer", "."],
        "tokenizer.json",
    ),
    "unknown tracker": (["demo", "report_to=[tensorbord]", *SMALL], "tensorboard"),
    "unknown preset": (
        ["train", "--strategy", "minimal-memry", *SMALL],
        "Did you mean 'minimal-memory'",
    ),
    "a config of another library": (
        ["train", "foreign.yaml"],
        "here it is finetuning_type: lora; trainkit config convert FILE",
    ),
    "bits without an adapter": (
        ["train", "--method", "sft", "quant.bits=4", "--model", "x", "--dataset", "pairs.jsonl"],
        "qlora",
    ),
    "a value that is not a number": (
        ["train", "foreign.yaml", "train.max_steps=abc"],
        "train.max_steps = 'abc': must be a valid integer",
    ),
    "runs: no such folder": (["runs", "list", "nowhere"], "nowhere is not a folder"),
    "export: no such folder": (
        ["export", "gguf", "nowhere", "x.gguf"],
        "nowhere is not a folder: give that of a saved model",
    ),
    "dry run of a run": (["train", "--dry-run", "--resume", "."], "--dry-run and --resume"),
    "config: no such file": (["config", "convert", "nowhere.yaml"], "nowhere.yaml"),
    "config: what contradicts itself": (["config", "convert", "both.yaml"], "line 2"),
    "config: a script that is none": (["config", "convert", "broken.py"], "line 1"),
    "config: over its own input": (
        ["config", "convert", "foreign.yaml", "-o", "foreign.yaml", "--force"],
        "this is what is read",
    ),
    "config: a method that is none": (["config", "show", "method=stf"], "Did you mean 'sft'"),
    "merge: no adapter": (["merge", ".", ".", "out"], "adapter_config.json"),
    "columns that are not written NAME=COLUMN": (
        ["train", "--method", "sft", "--dataset", "pairs.jsonl", "--column", "prompt"],
        "--column prompt: is written NAME=COLUMN",
    ),
    "export: no such model": (["export", "gguf", "nowhere", "m.gguf"], "nowhere"),
    "export: no such source": (["export", "hf", "nowhere", "out"], "nowhere"),
    "tokenizer: none there": (["tokenizer", "show", "."], "tokenizer.json"),
    "tokenizer: too little text": (["tokenizer", "train", "little.txt", "tok"], "merges"),
    "chat: no such model": (["chat", "-m", "nowhere"], "nowhere"),
}


@pytest.fixture(scope="module")
def litter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty.txt").write_text("")
    (folder / "binary.txt").write_bytes(b"\x00\x01\x02" * 100)
    (folder / "latin.txt").write_bytes("gut\nschön".encode("latin-1"))
    (folder / "checkpoint-10000.pt").write_bytes(b"")
    (folder / "done" / "model").mkdir(parents=True)
    (folder / "done" / "config.yaml").write_text("name: done\n")
    (folder / "done" / "adapter").mkdir()
    (folder / "done" / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "pairs.jsonl").write_text(
        "\n".join(
            json.dumps(dict(prompt=f"What is {n}?", completion=f"It is {n}.")) for n in range(30)
        )
    )
    (folder / "foreign.yaml").write_text("base_model: x\nadapter: lora\nmicro_batch_size: 2\n")
    (folder / "both.yaml").write_text("optimizer: adamw\noptim: sgd\nbase_model: x\n")
    (folder / "broken.py").write_text("def (")
    (folder / "little.txt").write_text("a b c")
    (folder / "half.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_clear_line_and_leaves_nothing(case, litter):
    words, hint = WRONG[case]
    before = {p.name for p in litter.iterdir()}
    done = call(*words, cwd=litter)
    assert done.returncode == 1, done.stdout + done.stderr
    assert hint in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert {p.name for p in litter.iterdir()} == before, "nothing half-written"


def test_generate_without_a_prompt_is_wrong_usage(litter):
    done = call("generate", "-m", "nowhere", "-p", "", cwd=litter)
    assert (
        done.returncode == 2 and "nothing to continue" in done.stderr and "--prompt" in done.stderr
    )


def test_data_from_a_first_look_to_shards_that_train(demo, tmp_path):
    "show, check, split, convert and tokenize as a new user types them, and a run from the shards."
    rows = [
        dict(question=f"What is {n} times two?", answer=f"{2 * n}", topic="ab"[n % 2])
        for n in range(200)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = call("data", "show", "mine.jsonl", cwd=tmp_path)
    assert (
        shown.returncode == 0
        and "prompt_completion" in shown.stdout
        and "What is 2 times two?" in shown.stdout
    ), shown.stderr
    cut = call(
        "data",
        "split",
        "mine.jsonl",
        "--train-output",
        "train.jsonl",
        "--eval-output",
        "eval.jsonl",
        "--eval-percentage",
        "10",
        "--test-output",
        "test.csv",
        "--stratify",
        "topic",
        cwd=tmp_path,
    )
    assert cut.returncode == 0, cut.stderr
    again = call(
        "data",
        "split",
        "mine.jsonl",
        "--train-output",
        "a.jsonl",
        "--eval-output",
        "b.jsonl",
        "--test-output",
        "c.csv",
        "--stratify",
        "topic",
        cwd=tmp_path,
    )
    assert again.returncode == 0
    for one, other in (
        ("train.jsonl", "a.jsonl"),
        ("eval.jsonl", "b.jsonl"),
        ("test.csv", "c.csv"),
    ):
        assert (tmp_path / one).read_bytes() == (tmp_path / other).read_bytes()
    (tmp_path / "half.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"topic": "c"}])))
    parts = "--train-output", "t.jsonl", "--eval-output", "e.jsonl", "--skip-bad"
    skipped = call("data", "split", "half.jsonl", *parts, cwd=tmp_path)
    assert "200 rows" in skipped.stdout and "half.jsonl, line 201" in skipped.stdout, skipped.stderr
    clean, leak = (
        call("data", "check", "train.jsonl", "--eval", held, "--json", cwd=tmp_path)
        for held in ("eval.jsonl", "train.jsonl")
    )
    assert leak.returncode == 1 and "leak" in leak.stdout
    assert (
        all(f["severity"] != "error" for f in json.loads(clean.stdout)["findings"])
        and clean.returncode == 0
    ), clean.stdout
    chats = call(
        "data", "convert", "train.jsonl", "chats.parquet", "--to", "messages", cwd=tmp_path
    )
    assert (
        chats.returncode == 0
        and "messages" in call("data", "show", "chats.parquet", cwd=tmp_path).stdout
    ), chats.stderr
    (tmp_path / "text.txt").write_text(
        "\n".join(f"{r['question']} {r['answer']}" for r in rows) * 9
    )
    shards = call(
        "data",
        "tokenize",
        "text.txt",
        "shards",
        "--tokenizer",
        str(demo[0] / "runs" / "demo" / "model"),
        "--verify",
        cwd=tmp_path,
    )
    assert shards.returncode == 0 and "All checksums are right" in shards.stdout, shards.stderr
    ran = trainkit(
        "train",
        "--dataset",
        "shards",
        *SMALL[2:],
        "data.eval_fraction=0.1",
        "train.max_steps=5",
        "train.eval_steps=5",
        cwd=tmp_path,
    )
    assert ran.returncode == 0 and (tmp_path / "runs" / "run" / "model").is_dir(), (
        ran.stdout + ran.stderr
    )


def test_check_counts_all_bad_rows(tmp_path):
    "Also those beyond the thousand that are described, over all files."
    good = [json.dumps(dict(prompt=f"What is {n}?", completion=f"It is {n}.")) for n in range(40)]
    for name, bad in (("a", 1500), ("b", 7), ("c", 1)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*good, *['{"prompt"'] * bad]))
    done = call(
        "data", "check", "a.jsonl", "--eval", "b.jsonl", "--html", "page.html", cwd=tmp_path
    )
    assert (
        done.returncode == 1
        and "1,507 rows are not examples" in done.stdout
        and done.stdout.count("not JSON") == 5
    ), done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "<title>Check of a.jsonl</title>" in page and "not JSON" in page
    assert "<p>1,507 rows are not examples, the first of them above</p>" in page
    reports = json.loads(call("data", "check", "a.jsonl", "b.jsonl", "--json", cwd=tmp_path).stdout)
    assert (reports["skipped"], len(reports["bad"]), reports["exit_code"]) == (1507, 1007, 1)
    assert "1 row is not an example" in call("data", "check", "c.jsonl", cwd=tmp_path).stdout


def test_usage_errors_have_their_own_code(tmp_path):
    assert call("data", "splt", cwd=tmp_path).returncode == 2
    assert call("data", "split", "x.jsonl", cwd=tmp_path).returncode == 2
    assert call("trane", cwd=tmp_path).returncode == 2
    assert call("generate", cwd=tmp_path).returncode == 2


def test_version_and_doctor(tmp_path):
    import trainkit as package

    assert trainkit("--version", cwd=tmp_path).stdout == f"trainkit {package.__version__}\n"
    checks = json.loads(call("doctor", "--json", cwd=tmp_path).stdout)
    assert {"torch", "device", "dtype", "ram", "disk"} <= {c["name"] for c in checks}


def test_from_a_config_of_another_library_to_a_model_that_chats(demo, tmp_path):
    "convert, dry-run, train, merge, export and chat, as a new user types them."
    base = demo[0] / "runs" / "demo" / "model"
    rows = [dict(instruction=f"Say {n}.", output=f"{n}") for n in range(40)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "theirs.yaml").write_text(
        f"base_model: {base}\n"
        "adapter: lora\n"
        "lora_r: 2\n"
        "datasets:\n"
        "  - path: mine.jsonl\n"
        "    type: alpaca\n"
        "sequence_len: 64\n"
        "val_set_size: 0.2\n"
        "chat_template: plain\n"
        "micro_batch_size: 4\n"
        "max_steps: 4\n"
        "logging_steps: 2\n"
        "use_unsloth: true\n"
    )
    converted = call("config", "convert", "theirs.yaml", "-o", "ours.yaml", cwd=tmp_path)
    assert (
        converted.returncode == 0
        and "plain torch" in converted.stdout
        and "trainkit train ours.yaml" in converted.stdout
    ), converted.stdout + converted.stderr
    assert call("config", "convert", "theirs.yaml", "--strict", cwd=tmp_path).returncode == 1
    before = {p.name for p in tmp_path.iterdir()}
    tried = call("train", "ours.yaml", "--epochs", "2", "--dry-run", "--json", cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr
    plan = json.loads(tried.stdout)
    assert (
        plan["steps"],
        plan["effective_batch"],
        plan["memory"] > 0,
        plan["step_seconds"] > 0,
    ) == (16, 4, True, True), "two passes over 32 rows, instead of the 4 steps of the file"
    assert {p.name for p in tmp_path.iterdir()} == before, "a dry run writes nothing"
    ran = trainkit("train", "ours.yaml", "--json", "name=mine", "sft.questions=0", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (
        result["steps"] == 4
        and result["final_loss"] > 0
        and (tmp_path / result["final_checkpoint"]).is_dir()
    )
    run = tmp_path / "runs" / "mine"
    assert "lora" in call("config", "show", str(run / "config.yaml"), cwd=tmp_path).stdout
    merged = call("merge", str(base), str(run / "adapter"), "merged", cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    answers = [
        call(
            "generate",
            "-m",
            m,
            "-p",
            "Say",
            "--max-new-tokens",
            "6",
            "--temperature",
            "0",
            cwd=tmp_path,
        ).stdout
        for m in ("merged", str(run / "model"))
    ]
    assert answers[0] == answers[1]
    exported = call("export", "gguf", str(base), "base.gguf", "--type", "f32", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    merged = call("merge", "base.gguf", str(run / "adapter"), "same", cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    one, other = (
        safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        for name in ("merged", "same")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    again = call("export", "hf", str(run / "model"), "again", cwd=tmp_path)
    assert (
        again.returncode == 0
        and call("export", "hf", str(run / "model"), "again", cwd=tmp_path).returncode == 1
    ), again.stderr
    shown = call("tokenizer", "encode", str(run / "model"), "Say 1", "--json", cwd=tmp_path)
    assert shown.returncode == 0 and len(json.loads(shown.stdout)) > 1


def test_presets_and_completion(tmp_path):
    assert "minimal-memory" in json.loads(call("config", "presets", "--json", cwd=tmp_path).stdout)
    shown = call("train", "--help", cwd=tmp_path).stdout
    assert all(option in shown for option in ("--dry-run", "--strategy", "--json", "--epochs"))
    script = trainkit(
        "--show-completion",
        "bash",
        cwd=tmp_path,
        SHELL="/bin/bash",
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    assert script.returncode == 0 and "_TRAINKIT_COMPLETE" in script.stdout, script.stderr
    assert script.stdout.rstrip().endswith(" trainkit"), "not for python -m trainkit"
    assert "nospace" in script.stdout, "the value stands next to GROUP.KNOB="


COMPLETED = {  # What stands before the cursor in bash -> what some of the completions are
    "train --method l": ["lora"],
    "data check x --method gr": ["grpo"],
    "train --strategy cpu,smal": ["cpu,small"],
    "train optim.le": ["optim.learning_rate="],
    "train x.yaml learning_ra": ["learning_rate="],
    "train x.yaml optim.optim=mu": ["optim.optim=muon"],
    "train x.yaml optim.optim = mu": ["muon"],
    "train x.yaml model.gradient_checkpointing=t": ["model.gradient_checkpointing=true"],
    "serve x --weights q8": ["q8_0"],
    "export gguf x y --type q5": ["q5_k_m"],
    "train mine": ["mine.yaml"],
    "sweep x.yaml data.pat": ["data.path="],
    "config show data.pat": ["data.path="],
    "runs show o": ["one"],
    "runs compare one t": ["two"],
    "train --resume runs/o": [f"{Path('runs') / 'one'}"],
    "launch --resume runs/t": [f"{Path('runs') / 'two'}"],
    "sweep --resume ru": [f"{Path('runs') / 'all-sweep'}"],
}


@pytest.mark.parametrize("line", COMPLETED)
def test_what_a_shell_completes(line, tmp_path):
    for name, file in (("one", "metrics.jsonl"), ("two", "metrics.jsonl"), ("all-sweep", "")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        for each in (file, "config.yaml") if file else ("sweep.json",):
            (folder / each).touch()
    (tmp_path / "mine.yaml").touch()
    words = ["trainkit", *line.split(" ")]
    asked = dict(COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
    done = call(cwd=tmp_path, **asked, _TRAINKIT_COMPLETE="complete_bash")
    assert done.stdout.split() == COMPLETED[line], done.stderr


def test_completing_a_knob_loads_no_torch():
    code = (
        "import sys\nfrom types import SimpleNamespace\n"
        "from trainkit.recipes.commands import complete_change\n"
        "found = complete_change(SimpleNamespace(params={}), 'optim.le')\n"
        "assert found == ['optim.learning_rate='] and 'torch' not in sys.modules, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The field's own spellings, as flags and as commands


def shown_with(*words, cwd):
    "The config that `config show` makes of these words."
    done = call("config", "show", "--json", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FLAGS = {  # as somebody from another library types it -> (group, knob, value)
    "--per_device_train_batch_size 3": ("train", "per_device_train_batch_size", 3),
    "--per-device-train-batch-size 3": ("train", "per_device_train_batch_size", 3),
    "--batch_size 3": ("train", "per_device_train_batch_size", 3),
    "--micro_batch_size 3": ("train", "per_device_train_batch_size", 3),
    "--max_steps 100": ("train", "max_steps", 100),
    "--max_steps=100": ("train", "max_steps", 100),
    "--max-steps=100": ("train", "max_steps", 100),
    "--train.max_steps 100": ("train", "max_steps", 100),
    "--num_train_epochs 2": ("train", "num_train_epochs", 2.0),
    "--num_epochs=2": ("train", "num_train_epochs", 2.0),
    "--lora_r 4": ("lora", "r", 4),
    "--lora_rank 4": ("lora", "r", 4),
    "--lora_alpha 4": ("lora", "lora_alpha", 4),
    "--lora.r 4": ("lora", "r", 4),
    "--lora_target_modules q_proj v_proj": ("lora", "target_modules", ["q_proj", "v_proj"]),
    "--lora_target q_proj,v_proj": ("lora", "target_modules", ["q_proj", "v_proj"]),
    "--lora_target all": ("lora", "target_modules", "all-linear"),
    "--dataset_name rows.jsonl": ("data", "path", "rows.jsonl"),
    "--data_path rows.jsonl": ("data", "path", "rows.jsonl"),
    "--output_dir out": ("train", "output_dir", "out"),
    "--learning_rate 1e-3": ("optim", "learning_rate", 1e-3),
    "--learning_rate=1e-3": ("optim", "learning_rate", 1e-3),
    "--lr 1e-3": ("optim", "learning_rate", 1e-3),
    "--model_name_or_path x": ("", "init_from", "x"),
    "--base_model x": ("", "init_from", "x"),
    "--cutoff_len 77": ("data", "max_length", 77),
    "--sequence_len 77": ("data", "max_length", 77),
    "--bf16": ("train", "mixed_precision", "bf16"),
    "--bf16 True": ("train", "mixed_precision", "bf16"),
    "--fp16 true": ("train", "mixed_precision", "fp16"),
    "--gradient_checkpointing": ("model", "gradient_checkpointing", True),
    "--gradient_checkpointing False": ("model", "gradient_checkpointing", False),
    "--packing": ("sft", "packing", "best_fit"),
    "--template chatml": ("sft", "template", "chatml"),
    "--use_lora True": ("", "method", "lora"),
    "--use_peft": ("", "method", "lora"),
    "--finetuning_type lora": ("", "method", "lora"),
    "--stage dpo --finetuning_type lora": ("", "use_lora", True),
    "--stage=sft --finetuning_type=full": ("", "method", "sft"),
    "--report_to wandb": ("", "report_to", ["wandb"]),
    "--report_to wandb tensorboard": ("", "report_to", ["wandb", "tensorboard"]),
    "--use_wandb": ("", "report_to", ["wandb"]),
    "--early_stopping True": ("train", "early_stopping_patience", 3),
    "--optimizer adamw": ("optim", "optim", "adamw_torch"),
    "--lr_scheduler cosine": ("optim", "lr_scheduler_type", "cosine"),
    "--run_name 0012": ("", "name", "0012"),
    "--warmup_ratio 0.2 --do_train": ("optim", "warmup_ratio", 0.2),
    "--method rloo --beta 0.2": ("rl", "beta", 0.2),
    "--seed -1 --seed 5": ("train", "seed", 5),
    "--method qlora --load_in_8bit": ("quant", "bits", 8),
    "--method grpo --reward_funcs right_answer": ("rl", "rewards", ["right_answer"]),
    "--eval_strategy steps --eval_steps 5": ("train", "eval_steps", 5),
    "--bs 3": ("train", "per_device_train_batch_size", 3),
    "--grad-accum 4": ("train", "gradient_accumulation_steps", 4),
    "--max_iters 7": ("train", "max_steps", 7),
    "--train.lr_warmup_steps 5": ("optim", "warmup_steps", 5.0),
    "--lora --max_steps 9": ("", "method", "lora"),
    "--out_dir out": ("train", "output_dir", "out"),
    "--wandb": ("", "report_to", ["wandb"]),
    "--config c.yaml": ("", "name", "mine"),
    "--max_steps 5 c.yaml": ("", "name", "mine"),
    "c.yaml --max_steps 5 seed=9": ("train", "seed", 9),
}


@pytest.mark.parametrize("typed", FLAGS)
@pytest.mark.filterwarnings("ignore:.*name from another library")
def test_a_flag_in_the_spelling_of_another_library_is_a_knob(typed, tmp_path):
    (tmp_path / "c.yaml").write_text("name: mine\n")
    group, knob, value = FLAGS[typed]
    if typed.startswith("--seed -1"):
        typed = "--seed 4 --seed 5"
    config = shown_with(*typed.split(), cwd=tmp_path)
    assert (config[group] if group else config)[knob] == value


def plain(text):
    return " ".join(text.translate({ord(c): " " for c in "│╭╮╰╯─"}).split())


ANSWERS = {  # a name that is not a knob -> the answer
    "train --leraning_rate 1": "Did you mean 'learning_rate'",
    "train --num_procesess 2": "Did you mean",
    "train --num_processes 2": "trainkit launch FILE --processes",
    "train --deepspeed ds.json": "trainkit launch FILE --processes",
    "train --fsdp full_shard": "trainkit launch FILE",
    "train --resume_from_checkpoint True": "trainkit train --resume FOLDER",
    "train --trust_remote_code True": "never run",
    "train --use_vllm True": "library of its own",
    "train --label_smoothing_factor 0.1": "has no equivalent here",
    "train --global_batch_size 64": "--gradient_accumulation_steps",
    "train --min_lr 1e-5": "--min_lr_ratio",
    "train --adapter_name_or_path x": "the adapter's folder as --model",
    "train --export_dir x": "trainkit export hf",
    "train --galore_rank 8": "has no equivalent here",
    "train --dynamic_rank true": "trainkit.lora.GrowRank({100: 8, 200: 16})",
    "train --learning_rate": "give a value, as in optim.learning_rate=VALUE",
    "train --learning_rate --max_steps 3": "give a value",
    "train --zzzqqq 3": "trainkit config show",
    "generate --model_name x --prompt y": "x",
    "generate --max_new_token 3": "--max-new-tokens",
    "merge --model_name_or_path x": "merge BASE ADAPTER OUTPUT",
    "eval --model_name_or_path x d.jsonl": "eval MODEL DATA",
    "eval --model x d.jsonl": "The folder of the model stands without a flag: eval MODEL DATA",
    "eval x --data d.jsonl": "The data stand without a flag: eval MODEL DATA",
    "finetune": "trainkit train --method sft --model FOLDER --dataset FILE",
    "finetune start --model x": "trainkit train --method sft --model x",
    "finetune start --model x --method lora": "Type: trainkit train --model x --method lora",
    "datasplit": "Type: trainkit data split",
    "datasplit --input x.jsonl --eval-output e.jsonl": "data split x.jsonl --eval-output e.jsonl",
    "data split --input x.jsonl": "The file stands without a flag: split FILE",
    "fine-tune": "trainkit train --method sft",
    "sft --model_name_or_path x": "trainkit train --method sft --model_name_or_path x",
    "pretrain": "trainkit train --method pretrain",
    "dpo": "trainkit train --method dpo",
    "kto": "dpo.loss_type=kto",
    "grpo c.yaml": "trainkit train --method grpo c.yaml",
    "lora": "--method lora",
    "rm": "--method reward",
    "pt": "--method pretrain",
    "infer": "trainkit generate --model",
    "deploy": "trainkit serve MODEL",
    "api": "trainkit serve MODEL",
    "export x": "trainkit export hf",
    "webui": "trainkit studio",
    "evaluate": "trainkit eval",
    "merge-lora": "trainkit merge",
    "merge_and_unload": "trainkit merge",
    "preprocess": "trainkit data tokenize",
    "env": "trainkit doctor",
    "version": "trainkit --version",
    "resume": "trainkit train --resume",
    "trane": "Did you mean 'train'",
    "data splt": "Did you mean 'split'",
    "convert": "trainkit config convert",
}


@pytest.mark.parametrize("typed", ANSWERS)
def test_what_is_no_flag_and_no_command_is_answered_with_what_is(typed, tmp_path):
    done = call(*typed.split(), cwd=tmp_path)
    assert done.returncode == (1 if typed.startswith("generate --model_name") else 2), (
        done.stdout + done.stderr
    )
    assert ANSWERS[typed] in plain(done.stderr), done.stderr
    assert not [*tmp_path.iterdir()]


def test_an_unknown_command_is_answered_by_older_typers_too(monkeypatch):
    "Their errors are those of click: typer 0.16 has no `TyperException`."
    import typer

    from trainkit import cli

    monkeypatch.delattr(typer, "TyperException")
    group = typer.main.get_command(cli.app).commands["export"]
    with pytest.raises(Exception, match="Type: .*trainkit export hf"):
        group.resolve_command(typer.Context(group, info_name="trainkit export"), ["x"])


def test_every_word_of_transformers_trl_and_peft_leads_somewhere():
    """A knob, a reason, or nothing because it is always so; never a word that only looks near.

    In a flag, and in the class that has it; and what a class has by itself is never refused,
    so that a config that was written out whole loads."""
    import dataclasses

    import peft
    import trl
    from transformers import Seq2SeqTrainingArguments

    from trainkit.recipes.foreign_settings import look_up
    from trainkit.recipes.foreign_words import Implied, Refused

    unknown, refused = {}, {}
    for kind in (
        Seq2SeqTrainingArguments,
        trl.SFTConfig,
        trl.DPOConfig,
        trl.KTOConfig,
        trl.GRPOConfig,
        trl.RLOOConfig,
        trl.RewardConfig,
        trl.ModelConfig,
        trl.ScriptArguments,
        peft.LoraConfig,
    ):
        for field in dataclasses.fields(kind):
            value = {"report_to": "wandb", "betas": [0.9, 0.99]}.get(
                field.name, True if "bool" in str(field.type) else 1
            )
            for above in ((), (kind.__name__,)):
                meaning = look_up(field.name, value, above)
                assert isinstance(meaning, (dict, Refused, Implied)), field.name
                if isinstance(meaning, Refused) and "is not known" in meaning:
                    unknown.setdefault(kind.__name__, set()).add(field.name)
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if not isinstance(default, (bool, int, float, str, list, dict)):
                continue
            if isinstance(look_up(field.name, default, (kind.__name__,)), Refused):
                refused.setdefault(kind.__name__, set()).add(field.name)
    assert not unknown, unknown
    # Pairs that are too long lose other tokens here
    assert refused == {"DPOConfig": {"truncation_mode"}}, refused


@pytest.mark.parametrize(
    "words",
    [
        ["--strategy", "zero2", "method=sft", "init_from=x", "optim.learning_rate=0.5"],
        [
            "--strategy",
            "fsdp",
            "--profile",
            "quick",
            "data.path=stdlib",
            "optim.optim=adamw_torch_fused",
        ],
        ["method=dpo", "init_from=x", "use_lora=true", "dpo.loss_type=[ipo]", "name=it's"],
        [
            "--strategy",
            "zero3",
            "--nodes",
            "2",
            "--node-rank",
            "1",
            "--main-address",
            "a",
            "method=grpo",
            "init_from=x",
            "rl.rewards=[right_length(20, 5)]",
        ],
        ["c.yaml", "train.max_steps=3"],
    ],
    ids=str,
)
def test_what_a_dry_launch_prints_can_be_pasted(words, tmp_path):
    "It writes nothing, and each file that the command reads is written by the lines above it."
    import subprocess

    from trainkit.cli import read_run_config

    (tmp_path / "c.yaml").write_text("method: lora\ninit_from: x\nnum_gpus: 2\nlora: {r: 3}\n")
    shown = call(
        "launch",
        *([] if words[0] == "c.yaml" else ["--processes", "2"]),
        "--dry-run",
        *words,
        cwd=tmp_path,
    )
    assert shown.returncode == 0 and [p.name for p in tmp_path.iterdir()] == ["c.yaml"], (
        shown.stderr
    )
    if "--profile" in words:  # the note next to a script is not one of its lines
        swapped = call(
            "launch",
            "--processes",
            "2",
            "--dry-run",
            *[w for w in words if "optim" not in w],
            cwd=tmp_path,
        )
        assert "Muon" in swapped.stderr and "Muon" not in swapped.stdout
    script, _, line = shown.stdout.rstrip().rpartition("\n")
    assert subprocess.run(["bash", "-eu", "-c", script], cwd=tmp_path).returncode == 0
    read = [
        w.strip("'").replace("'\"'\"'", "'").partition("=")[2]
        if w.startswith("TRAINKIT_DEEP")
        else w
        for w in line.split()
        if w.endswith((".yaml", ".json", ".yaml'"))
    ]
    changes = [w for w in words if "=" in w]
    whole = (
        read_run_config("quick" if "quick" in words else None, None, changes)
        if words[0] != "c.yaml"
        else read_run_config(
            None,
            tmp_path / "x.yaml"
            if (tmp_path / "x.yaml").write_text("method: lora\ninit_from: x\nlora: {r: 3}\n")
            else None,
            changes,
        )
    )
    written = next(p for p in tmp_path.rglob("config.yaml"))
    assert read_run_config(None, written, []) == whole, "the same run"
    assert (
        len(read) == 1 + any("zero" in w for w in words)
        and str(written.relative_to(tmp_path)).split("'")[0] in line
    )
    if len(read) > 1:
        assert (tmp_path / read[0]).is_file() and json.loads((tmp_path / read[0]).read_text())[
            "zero_optimization"
        ]["stage"] in (2, 3)
    again = call(
        "launch",
        *([] if words[0] == "c.yaml" else ["--processes", "2"]),
        "--dry-run",
        *words,
        cwd=tmp_path,
    )
    assert "--nodes" in words or "-2/launch" in again.stdout, (
        "a folder that is taken is not written into"
    )


def test_a_strategy_of_ones_own(tmp_path):
    "In settings.ini or in a file of its own; a run's own words win over both."
    (tmp_path / "settings.ini").write_text(
        "[strategy.mine]\n"
        "doc = Slow and careful\n"
        "optim.learning_rate = 1e-5\n"
        "train.per_device_train_batch_size = 3\n"
        "method = lora\n"
        "lora.target_modules = [q_proj, v_proj]\n"
    )
    (tmp_path / "thin.yaml").write_text("lora: {r: 2}\noptim.warmup_ratio: 0.5\n")
    config = shown_with(
        "preset=mine,thin.yaml", "init_from=x", "train.per_device_train_batch_size=5", cwd=tmp_path
    )
    assert (
        config["method"],
        config["optim"]["learning_rate"],
        config["optim"]["warmup_ratio"],
        config["lora"]["r"],
        config["lora"]["target_modules"],
        config["train"]["per_device_train_batch_size"],
    ) == ("lora", 1e-5, 0.5, 2, ["q_proj", "v_proj"], 5)
    assert (
        json.loads(call("config", "presets", "--json", cwd=tmp_path).stdout)["mine"]["doc"]
        == "Slow and careful"
    )
    (tmp_path / "settings.ini").write_text("[strategy.mine]\noptim.learning_rte = 1e-5\n")
    for words, says in (
        (["--strategy", "mine"], "Did you mean 'learning_rate'"),
        (["--strategy", "mien"], "Did you mean 'mine'"),
        (["--strategy", "none.yaml"], "there is no such file"),
    ):
        done = call("train", *words, "--method", "sft", cwd=tmp_path)
        assert done.returncode == 1 and says in done.stderr, done.stderr
    assert call("config", "show", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("value", ["-1", "-.5", "-0.5", "1e-4", ".5", "word"])
@pytest.mark.parametrize("word", ["--learning_rate", "--report_to"])
def test_a_negative_number_is_the_value_of_a_flag_and_no_flag(word, value):
    from trainkit.cli import _value_of

    for after in ([], ["-x"], ["--bf16"], ["train.max_steps=3"], ["run.yaml"]):
        rest = [value, *after]
        assert (_value_of(word, rest), rest) == (value, after)
    for first in ("-x", "-", "--bf16", "train.max_steps=3", "run.yml"):
        rest = [first, value]
        assert (_value_of(word, rest), rest) == (None, [first, value])


HELP = {  # Command -> what its help tells, among other things
    "sweep": ["(default: 12)", "(default: sobol)", "(default: halving)"],
    "train": ["(default: pretrain)", "trainkit train --method lora"],
    "eval": ["--encoding", "(default: exact_match and f1)", "trainkit eval runs/tuned/model"],
    "tokenizer train": ["--encoding", "(default: <|endoftext|>)"],
    "chat": ["trainkit chat --model"],
    "serve": ["trainkit serve runs"],
    "merge": ["trainkit merge runs/base/model"],
    "data split": ["trainkit data split rows.jsonl"],
    "config show": ["Changes to the config"],
    "audit": [*SUBJECTS],
}


@pytest.mark.parametrize("words", HELP)
def test_the_help_of_a_command_has_its_defaults_and_a_line_to_copy(words, tmp_path):
    shown = plain(call(*words.split(), "--help", cwd=tmp_path, COLUMNS="300").stdout)
    assert [word for word in HELP[words] if word not in shown] == [], shown


ADVICE = {  # What is typed -> what the error says
    "tokenizer train latin.txt new": "Say --encoding latin-1 (or",
    "data show latin.txt": "Say --encoding latin-1 (or",
    "train --profile quick --dataset latin.txt": "Say data.encoding=latin-1 (or",
    "data tokenize rows.jsonl latin.txt --tokenizer no": "latin.txt is a file: shards go into",
    "lab latin.txt --copy-only": "latin.txt is a file: give a folder",
    "memory plan --machine foo": "or name a machine: T4, ",
}


@pytest.mark.parametrize("line", ADVICE)
def test_an_error_says_what_is_typed_in_a_shell(line, tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait, ".encode("latin-1") * 40)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    done = call(*line.split(), cwd=tmp_path)
    assert done.returncode == 1 and ADVICE[line] in done.stderr, done.stderr


def test_files_in_another_encoding_are_read(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait, ".encode("latin-1") * 40)
    words = ["tokenizer", "train", "latin.txt", "new", "--vocab-size", "260"]
    done = call(*words, "--encoding", "latin-1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_questions(tmp_path / "latin.txt", encoding="latin-1")[0]["text"].startswith(
        "caf\xe9"
    )


def test_the_line_to_copy_after_a_split_is_quoted(tmp_path):
    rows = "".join(json.dumps(dict(prompt=f"{i}", completion="b")) + "\n" for i in range(40))
    (tmp_path / "my rows.jsonl").write_text(rows)
    outputs = ["--train-output", "to train.jsonl", "--eval-output", "to judge.jsonl"]
    done = call("data", "split", "my rows.jsonl", *outputs, cwd=tmp_path)
    line = done.stdout.splitlines()[-1].partition(": ")[2]
    assert shlex.split(line) == ["--dataset", "to train.jsonl", "data.eval_file=to judge.jsonl"]


def test_the_longest_token_is_shown_as_it_is(tmp_path, capsys):
    "It is often a run of spaces, which cannot be seen."
    tokenizer = BPETokenizer.train(["x = 1" + " " * 9] * 9, vocab_size=259, progress=False)
    tokenizer.save(tmp_path / "tok")
    show_tokenizer(tmp_path / "tok")
    assert re.search(r"^longest +' {4,8}'$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("resume", "says"),
    [
        ("old/checkpoints/checkpoint-5", "resumes from its last checkpoint: --resume old;"),
        ("gone", "'gone' is not a run folder"),
        ("checkpoint-10000.pt", "is one file, and a checkpoint here is a folder"),
        ("old", "give either a config file or --resume"),
    ],
)
def test_what_cannot_be_resumed_beside_a_config_is_named_for_what_it_is(resume, says, tmp_path):
    (tmp_path / "old" / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    for name in ("mine.yaml", "old/config.yaml"):
        (tmp_path / name).write_text("method: sft\ninit_from: nothing.gguf\n")
    (tmp_path / "checkpoint-10000.pt").write_bytes(b"")
    words = ["--config", "mine.yaml", "--resume_from_checkpoint", resume]
    done = call("train", *words, cwd=tmp_path)
    assert done.returncode and says in " ".join(plain(done.stderr).split()), done.stderr
