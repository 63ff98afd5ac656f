"Which split is read, from names of splits and of files."

from pathlib import Path

import pytest

from trainkit.data.dataset import hash_position, split_examples, split_key
from trainkit.data.sources import _choose_split, _split_of


@pytest.mark.parametrize(
    "names, asked, chosen, notes",
    [
        (["all"], None, "all", []),
        (["test"], None, "test", []),
        (["test", "train"], None, "train", ["splits: test, train; read: train"]),
        (["a", "b"], None, None, ["has the splits a, b: say which, as in split='a'"]),
        (["train", "dev"], "validation", "dev", []),
        (["train", "dev"], "train", "train", []),
        (
            ["train", "test"],
            "tset",
            None,
            ["has no split 'tset'; it has train, test. Did you mean"],
        ),
        ([], "train", None, ["has no split 'train'; it has none."]),
    ],
)
def test_the_split_to_read(names, asked, chosen, notes):
    said = []
    if chosen is None:
        with pytest.raises(ValueError) as error:
            _choose_split(names, asked, "x", said)
        assert str(error.value).startswith(f"x {notes[0]}")
    else:
        assert (_choose_split(names, asked, "x", said), said) == (chosen, notes)


@pytest.mark.parametrize(
    "name, split",
    [
        ("train-00000-of-00002.parquet", "train"),
        ("a/test/b.jsonl", "test"),
        ("dev.jsonl", "dev"),
        ("train/eval_1.jsonl", "eval"),
        ("training.csv", "training"),
        ("trainer.jsonl", None),
        ("train.txt", "train"),
        ("train.py", None),
    ],
)
def test_the_split_in_the_name_of_a_file(name, split):
    assert _split_of(Path("folder") / name, Path("folder")) == split


def test_the_parts_of_a_split_leave_something_to_train_on():
    rows = [dict(text=f"text {i}") for i in range(40)]
    with pytest.raises(ValueError, match=r"test_fraction = 0.5: must be between 0 and what"):
        split_examples(rows, 0.5, test_fraction=0.5)
    assert all(split_examples(rows, 0.3, test_fraction=0.3))


def test_a_question_that_shares_would_put_on_both_sides_is_named():
    rows = [
        dict(prompt=f"question {i}", completion="c", task=task)
        for i in range(30)
        for task in ("easy", "hard")
    ]
    with pytest.raises(ValueError, match="easy and hard both ask 'question") as told:
        split_examples(rows, 0.2, by="task", fractions={"easy": 0.05, "hard": 0.4})
    question = str(told.value).split("'")[1]
    assert 0.05 <= hash_position(split_key(dict(prompt=question, completion="c"))) < 0.4


@pytest.mark.parametrize("tasks", [2, 3, 5])
def test_of_many_warnings_three_are_written_out(tasks):
    rows = [dict(prompt=f"q{i}", completion="c", task=f"t{i}") for i in range(tasks)]
    rows.append(dict(prompt="heard", completion="c", task="heard"))
    shares = {f"t{i}": 1e-9 for i in range(tasks)} | dict(heard=1 - 1e-9)
    with pytest.warns(UserWarning) as caught:
        split_examples(rows, 0.5, by="task", fractions=shares)
    said = str(caught[0].message)
    assert said.count("is set apart to evaluate on") == min(tasks, 3)
    assert said.endswith(" (and 2 more of the kind)") is (tasks == 5)
    assert ("more of the kind" in said) is (tasks > 3)
