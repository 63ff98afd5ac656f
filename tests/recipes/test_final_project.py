"The final project: parts that are missing, wrong or weak get advice, and a good one passes."

import json
import shutil

import pytest
from typer.testing import CliRunner

from trainkit import export_gguf, run
from trainkit.cli import app
from trainkit.data import write_examples
from trainkit.recipes import check_project, method_config
from trainkit.recipes.final_project import NotYet, Project, check_data

ROWS = [
    dict(prompt=f"What comes after {i}?", completion=f"After {i} comes {i + 1}.")
    for i in range(130)
]
PAIRS = [dict(prompt=r["prompt"], chosen=r["completion"], rejected="No.") for r in ROWS]


def result(folder, name):
    return next(r for r in check_project(folder).requirements if r.name == name)


def small(folder, name, method, start, data, **changes):
    train = dict(max_steps=1, save_strategy="no", progress=False)
    return run(
        method_config(
            dict(
                name=name,
                method=method,
                watch_memory=False,
                runs_dir=str(folder / "runs"),
                init_from=start and str(folder / start),
                data=dict(path=str(folder / data), max_length=64),
                tokenizer=dict(vocab_size=300),
                model=dict(d_model=32, n_heads=2, n_layers=1, d_ff=64),
                optim=dict(learning_rate=0.0 if method == "dpo" else 3e-3),
                train=train | changes,
            )
        ),
        verbose=False,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    "A project with everything; its aligned model has learned nothing."
    folder = tmp_path_factory.mktemp("project")
    write_examples([dict(text=r["prompt"]) for r in ROWS] * 3, folder / "text.jsonl")
    write_examples(ROWS[25:], folder / "train.jsonl")
    write_examples(ROWS[:25], folder / "eval.jsonl")
    write_examples(PAIRS[25:], folder / "pairs.jsonl")
    write_examples(PAIRS[:25], folder / "eval_pairs.jsonl")
    small(folder, "base", "pretrain", "", "text.jsonl")
    small(folder, "tuned", "sft", "runs/base/model", "train.jsonl", max_steps=15)
    small(folder, "aligned", "dpo", "runs/tuned/model", "pairs.jsonl")
    export_gguf(folder / "runs/aligned/model", folder / "mine.gguf", "q8_0", progress=False)
    return folder


def test_as_many_rows_as_are_needed_are_enough(tmp_path):
    write_examples(ROWS[:3], tmp_path / "train.jsonl")
    assert len(Project(tmp_path).rows("train", 3)) == 3
    with pytest.raises(NotYet, match="3 rows"):
        Project(tmp_path).rows("train", 4)


def test_an_empty_folder_says_what_to_write_first(tmp_path):
    report = check_project(tmp_path)
    assert not report.passed and not any(r.passed for r in report.requirements)
    assert "train.jsonl" in report.requirements[0].evidence
    done = CliRunner().invoke(app, ["course", "check", str(tmp_path), "--json"])
    assert done.exit_code == 1 and json.loads(done.output) == report.to_dict()
    with pytest.raises(FileNotFoundError, match="no folder"):
        check_project(tmp_path / "nothing")


@pytest.mark.parametrize(
    "train, held_out, words",
    [
        (ROWS[25:60], ROWS[:25], "35 rows"),
        (ROWS[25:], ROWS[:3], "3 rows"),
        (ROWS, ROWS[:25], "also training rows"),
        ([{"nothing": 1}], ROWS[:25], "cannot be read"),
    ],
    ids=["too few", "too few set aside", "leak", "no answers"],
)
def test_data_that_cannot_carry_a_project(tmp_path, train, held_out, words):
    for name, rows in (("train", train), ("eval", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(NotYet, match=words) as problem:
        check_data(Project(tmp_path))
    assert problem.value.advice


def test_a_spreadsheet_is_as_good(tmp_path):
    lines = "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS[25:])
    (tmp_path / "train.csv").write_text("prompt,completion\n" + lines, encoding="utf-8")
    write_examples(ROWS[:25], tmp_path / "eval.jsonl")
    assert result(tmp_path, "data").passed


def test_what_was_tuned_and_exported_passes(project):
    report = {r.name: r for r in check_project(project).requirements}
    assert report["tuned"].passed and "tuned" in report["tuned"].evidence
    assert report["exported"].passed and "mine.gguf" in report["exported"].evidence


def test_an_alignment_that_changed_nothing_is_not_better(project):
    aligned = result(project, "aligned")
    share = float(aligned.evidence.split("preferred in ")[1].split("%")[0])
    assert aligned.passed == (share >= 90)
    assert aligned.passed or "train longer" in aligned.advice


def test_a_run_on_other_rows_is_named(project, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(project, folder)
    (folder / "train.jsonl").rename(folder / "train.json")
    tuned = result(folder, "tuned")
    assert not tuned.passed and "tuned learned from" in tuned.evidence


def test_the_file_of_another_model_is_found_out(project, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(project, folder)
    for path in (folder / "runs").glob("*/config.yaml"):  # They name the folder they ran in
        path.write_text(path.read_text().replace(str(project), str(folder)))
    (folder / "mine.gguf").write_bytes(b"GGUF" + bytes(40))
    assert "cannot be opened" in result(folder, "exported").evidence
    (folder / "mine.gguf").unlink()
    export_gguf(folder / "runs/base/model", folder / "base.gguf", "q8_0", progress=False)
    exported = result(folder, "exported")
    assert not exported.passed and "export the aligned model" in exported.advice
