"Files of every format, whole and damaged, become rows; splits are stable; mixtures, caches."

import gzip
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes import ROOT

from trainkit.config import ConfigError
from trainkit.data.dataset import (
    LoadedRows,
    DataConfig,
    _find_kind,
    _remedy,
    chunk_examples,
    clean_examples,
    clean_text,
    load_examples,
    load_splits,
    hash_position,
    split_examples,
    split_key,
    stream_examples,
)
from trainkit.data.mixture import add_prefix, mix, shares, whole_parts
from trainkit.data.readers import read_rows, write_examples
from trainkit.data.schema import KINDS, as_example, example_kind, to_messages
from trainkit.parallel import cached, in_order

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "json.gz", "csv.gz")


# --- what is written is read again, in every format and of every kind

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda t: t.strip() and not t.startswith("[{")
)
turns = st.builds(
    lambda u, a, s: [
        *([dict(role="system", content=s)] if s else []),
        dict(role="user", content=u),
        dict(role="assistant", content=a),
    ],
    text,
    text,
    st.none() | text,
)
ROWS = {
    "text": st.fixed_dictionaries(dict(text=text)),
    "messages": st.fixed_dictionaries(dict(messages=turns)),
    "preference": st.fixed_dictionaries(dict(prompt=text, chosen=text, rejected=text)),
    "unpaired": st.fixed_dictionaries(dict(prompt=text, completion=text, label=st.booleans())),
    "reasoning": st.fixed_dictionaries(dict(question=text, reasoning=text, answer=text)),
    "instruction": st.fixed_dictionaries(
        dict(instruction=text, input=st.just("") | text, output=text)
    ),
    "prompt_completion": st.fixed_dictionaries(dict(prompt=text, completion=text)),
    "prompt": st.fixed_dictionaries(dict(prompt=text)),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@settings(FUZZ, max_examples=10)  # Few files, and many rows in each
@given(data=st.data())
def test_round_trip(tmp_path, kind, form, data):
    rows = data.draw(st.lists(ROWS[kind], min_size=1, max_size=12))
    path = write_examples(rows, tmp_path / f"rows.{form}")
    back = load_examples(path)
    assert back.report.kind == kind
    assert [{k: v for k, v in row.items() if k not in ("source", "line")} for row in back] == rows


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv"])
@FUZZ
@given(rows=st.lists(ROWS["prompt_completion"], min_size=1, max_size=6))
def test_line_numbers_are_those_of_the_file(tmp_path, form, rows):
    path = write_examples(rows, tmp_path / f"rows.{form}")
    raw = path.read_bytes().decode()
    if form in (
        "csv",
        "tsv",
    ):  # a record must begin on its line: what comes before is the header and the rows before
        for i, row in enumerate(load_examples(path)):
            before = (
                write_examples(rows[:i], tmp_path / f"before.{form}").read_bytes().decode()
                if i
                else "prompt,completion\r\n"
            )
            assert row["line"] == len(before.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    else:
        lines = raw.split("\n")
        for row in load_examples(path):
            assert lines[row["line"] - 1].strip().startswith("{")
        numbers = [row["line"] for row in load_examples(path)]
        assert numbers == [i for i, line in enumerate(lines, 1) if line.strip().startswith("{")]


# --- seeded bad rows: each is found, on its line, and nothing else is

GOOD = [dict(prompt=f'Question {i},\n"so"?', completion=f"Answer; {i}") for i in range(40)]
BAD = {  # what is wrong -> the row, and what must be said of it
    "empty": (dict(prompt="x", completion=" "), "completion is empty"),
    "type": (dict(prompt="x", completion=5), "completion = 5 is of type int"),
    "missing": (dict(prompt="x", completon="y"), "Did you mean 'completon'"),
    "role": (dict(prompt=[dict(role="usr", content="x")], completion="y"), "unknown role 'usr'"),
    "nested": (dict(prompt=dict(a=1), completion="y"), "no 'role'"),
    "half": (dict(prompt="x", completion="cut \ud83d"), "surrogate pair"),
    "list": (["x", "y"], "must be an object"),
}


def seeded(seed, names):
    rng = random.Random(seed)
    rows, wrong = [*GOOD], {}
    for name in names:
        rows.insert(rng.randint(1, len(rows)), BAD[name][0])
    for i, row in enumerate(rows):
        for name in names:
            if row is BAD[name][0]:
                wrong[i] = name
    return rows, wrong


def load_skipping(path, **options):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rows = load_examples(path, on_bad="skip", **options)
    assert bool(warned) == bool(rows.report.bad), "what is left out must be said"
    return rows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz"])
def test_bad_rows_in_json(tmp_path, form, seed):
    rows, wrong = seeded(seed, BAD)
    dump = [json.dumps(row) for row in rows]
    if form.startswith("jsonl"):
        wrong[len(dump)] = "syntax"
        dump.append('{"prompt": "x" "completion": "y"}')
        data, where = "\n".join(dump) + "\n", {i + 1: name for i, name in wrong.items()}
    else:
        data, where = "[\n" + ",\n".join(dump) + "\n]", {i + 2: name for i, name in wrong.items()}
    path = tmp_path / f"rows.{form}"
    path.write_bytes(gzip.compress(data.encode()) if form.endswith("gz") else data.encode())
    back = load_skipping(path)
    assert [(r["prompt"], r["completion"]) for r in back] == [
        (r["prompt"], r["completion"]) for r in GOOD
    ]
    assert len(back.report.bad) == len(where)
    for message, (line, name) in zip(back.report.bad, sorted(where.items()), strict=True):
        assert f"{path}, line {line}" in message
        assert BAD[name][1] in message if name in BAD else "column 16: not JSON" in message
    first = min(where)
    with pytest.raises(ValueError, match=f"line {first}"):
        load_examples(path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_bad_rows_in_tables(tmp_path, form, seed):
    path, rng, mark = tmp_path / f"rows.{form}", random.Random(seed), "," if form == "csv" else "\t"
    records = [f'"Question {i}{mark}\nso?"{mark}Answer {i}\n' for i in range(30)]
    for bad in ("alone\n", f"x{mark}y{mark}z\n", f'"x" y{mark}z\n', f"x{mark}\n"):
        records.insert(rng.randint(20, len(records)), bad)
    path.write_text("prompt" + mark + "completion\n" + "".join(records))
    back, line, expected = load_skipping(path), 2, []
    for record in records:
        if not record.startswith('"Q'):
            expected.append(line)
        line += record.count("\n")
    assert len(back) == 30
    assert [
        int(message.split("line ")[1].split(":")[0].split(" ")[0]) for message in back.report.bad
    ] == expected


def test_bad_rows_in_parquet(tmp_path):
    rows = [
        dict(prompt=f"q{i}", completion=None if i in (3, 17) else " " if i == 8 else "a")
        for i in range(20)
    ]
    back = load_skipping(write_examples(rows, tmp_path / "rows.parquet"))
    assert len(back) == 17
    assert [message.split(": ")[0].split("line ")[1] for message in back.report.bad] == [
        "4",
        "9",
        "18",
    ]
    assert [r["line"] for r in back] == [i + 1 for i in range(20) if i not in (3, 8, 17)]


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "jsonl.gz", "csv.gz"])
def test_a_file_cut_anywhere_is_no_shorter_list_in_silence(tmp_path, form):
    path = write_examples(GOOD, tmp_path / f"rows.{form}")
    whole, rng = path.read_bytes(), random.Random(0)
    ends = {0}  # where a cut leaves whole rows only, which no reader can notice
    if form in ("jsonl", "csv"):
        for i in range(len(GOOD) + 1):
            ends.add(
                len(write_examples(GOOD[:i], tmp_path / f"part.{form}").read_bytes())
                if i
                else len("prompt,completion\r\n")
            )
    for cut in rng.sample(range(1, len(whole) - 1), 60):
        if any(abs(cut - end) <= 2 for end in ends):
            continue
        path.write_bytes(whole[:cut])
        try:
            back = load_examples(path)
        except ValueError:
            continue
        # an unquoted last field may end early in a CSV file: the row is there, only shorter
        assert form == "csv" and [r["prompt"] for r in back] == [
            r["prompt"] for r in GOOD[: len(back)]
        ], cut


def test_a_zst_file_without_its_end_is_an_error(tmp_path):
    import zstandard

    plain = write_examples(GOOD * 50, tmp_path / "rows.jsonl").read_bytes()
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(packed := zstandard.compress(plain))
    assert len(load_examples(path)) == len(GOOD) * 50
    for cut in (1, 20, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:cut])
        with pytest.raises(ValueError, match="not a whole .zst"):
            [*read_rows(path)]


def test_workers_change_nothing(tmp_path):
    rows, _ = seeded(1, [name for name in BAD if name != "list"])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    one, many = load_skipping(path), load_skipping(path, num_workers=2)
    assert one == many and one.report == many.report
    assert clean_examples(one) == clean_examples(one, num_workers=2)
    with pytest.raises(ValueError) as first:
        load_examples(path)
    with pytest.raises(ValueError) as again:
        load_examples(path, num_workers=2)
    assert str(first.value) == str(again.value)


def test_a_stream_reads_only_what_is_asked(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GOOD) + "broken\n")
    assert [r["line"] for r in stream_examples(path, max_examples=3)] == [1, 2, 3]
    assert len(load_examples(path, max_examples=40)) == 40
    with pytest.raises(ValueError, match="line 41"):
        load_examples(path)


# --- Hugging Face datasets


def test_hub_options_reach_datasets(monkeypatch):
    import datasets

    asked = []

    def fake(name, config, split=None, streaming=False):
        asked.append((name, config, split, streaming))
        return (
            {"train": [dict(text="a")], "validation": [dict(text="b")]}
            if split is None
            else [dict(text="c")]
        )

    monkeypatch.setattr(datasets, "load_dataset", fake)
    rows = load_examples("Salesforce/wikitext", dataset_config="wikitext-2-v1")
    assert [r["text"] for r in rows] == ["a"] and rows.report.notes == [
        "splits: train, validation; read: train"
    ]
    assert load_examples("Salesforce/wikitext", split="eval")[0]["text"] == "b"
    assert next(iter(stream_examples("Salesforce/wikitext", split="train[:10%]")))["text"] == "c"
    assert (
        next(iter(stream_examples("Salesforce/wikitext", dataset_config="wikitext-2-v1")))["text"]
        == "a"
    )
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-v1", None, False),
        ("Salesforce/wikitext", None, None, False),
        ("Salesforce/wikitext", None, "train[:10%]", False),
        ("Salesforce/wikitext", "wikitext-2-v1", None, True),
    ]
    parts, facts = load_splits(
        DataConfig(path="Salesforce/wikitext", validation_split="validation")
    )
    assert [r["text"] for r in parts["eval"]] == ["b"] and facts.train_rows == 1


def test_offline_is_a_sentence():
    with pytest.raises(
        ConnectionError, match="is not on this machine, and Hugging Face can't be reached"
    ):
        load_examples("no-such-owner/no-such-data")


# --- splits

HELD_OUT = [4, 9, 10, 11, 12, 13, 14, 18]


def test_split_vectors():
    "The published places: a split in any other program or language must get these."
    assert [
        hash_position(t) for t in ("trainkit", "", "Why is the sky blue?", "déjà vu", "日本語")
    ] == [
        0.6157926122048922,
        0.5151522356031434,
        0.9258451515712119,
        0.4148602243291247,
        0.6995804607646476,
    ]
    questions = [dict(prompt=f"Question {n}", completion="a") for n in range(20)]
    assert [
        n for n, row in enumerate(questions) if row in split_examples(questions, 0.2)[1]
    ] == HELD_OUT
    assert [hash_position("trainkit", seed) for seed in (0, 1)] == [
        0.6157926122048922,
        0.9973750967943643,
    ]


def test_splits_do_not_depend_on_the_process():
    code = (
        "import json\nfrom trainkit.data.dataset import load_examples, split_examples\n"
        "parts = split_examples(load_examples('arithmetic', max_examples=200), 0.1, 3, 0.1, "
        "by='source')\n"
        "print(json.dumps([[r['question'] for r in part] for part in parts]))"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outs) == 1


keys = st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True)


@FUZZ
@given(
    old=keys,
    new=keys,
    seed=st.integers(0, 5),
    test=st.sampled_from([0.0, 0.3]),
    by=st.sampled_from([None, "task"]),
    own=st.dictionaries(st.sampled_from("0123"), st.floats(0.01, 0.6)),
)
@pytest.mark.filterwarnings("ignore")
def test_added_rows_move_no_row(old, new, seed, test, by, own):
    "Adding rows moves none: with collections of one row, with tasks, with an empty part."

    def rows(numbers):
        return [dict(prompt=f"Question {n}", completion=str(n), task=str(n % 4)) for n in numbers]

    def find(numbers, own):
        return {
            r["prompt"]: i
            for i, part in enumerate(
                split_examples(rows(numbers), 0.3, seed, test, by, fractions=own)
            )
            for r in part
        }

    own = {
        task: share for task, share in own.items() if by and any(n % 4 == int(task) for n in old)
    }
    before, after = find(old, own), find([*new, *old], own)
    assert len(before) == len({*old}) and {prompt: after[prompt] for prompt in before} == before
    assert all(
        find([n], {t: v for t, v in own.items() if t == str(n % 4)})
        == {f"Question {n}": before[f"Question {n}"]}
        for n in old[:3]
    )


@FUZZ
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 3))
def test_no_question_on_two_sides(data, kind, seed):
    rows = data.draw(st.lists(ROWS[kind], min_size=8, max_size=20))
    rows = [dict(row, task=str(i % 3)) for i, row in enumerate(rows + rows[::2])]
    with warnings.catch_warnings(action="ignore"):
        parts = split_examples(rows, 0.3, seed, 0.2, by="task")
    sets = [{split_key(r) for r in part} for part in parts]
    assert sum(map(len, sets)) == len(set.union(*sets)) and sum(map(len, parts)) == len(rows)


def test_a_value_with_nothing_to_evaluate_on_is_named_and_its_own_share_helps():
    texts = sorted((f"row {i}" for i in range(200)), key=hash_position)
    rare, common = texts[-5:], texts[:150]  # By their own places all five are in the last 20 %
    rows = [dict(text=t, task="rare") for t in rare] + [dict(text=t, task="common") for t in common]
    with pytest.warns(UserWarning, match="no row with task = rare is set apart"):
        train, held, test = split_examples(rows, 0.1, test_fraction=0.2, by="task")
    assert {r["text"] for r in test if r["task"] == "rare"} == {*rare} and len(train) + len(
        held
    ) + len(test) == 155
    rows = [dict(text=t, task="rare" if 25 <= i < 35 else "common") for i, t in enumerate(texts)]
    with pytest.warns(UserWarning) as warned:
        before = split_examples(rows, 0.1, by="task")[1]
    share = float(re.search(r"fractions\['rare'\]=([.\d]+)", str(warned[0].message))[1])
    after = split_examples(rows, 0.1, by="task", fractions=dict(rare=share))[1]
    assert (
        any(r["task"] == "rare" for r in after)
        and [r for r in after if r["task"] == "common"] == before
    )


def test_a_run_with_nothing_to_evaluate_on_says_what_would_help(tmp_path):
    rows = sorted(
        (dict(prompt=f"Question {i}", completion="a") for i in range(60)),
        key=lambda row: hash_position(split_key(row)),
    )[20:40]
    path = str(write_examples(rows, tmp_path / "rows.jsonl"))
    with pytest.warns(UserWarning, match="20 rows leave none to evaluate on.*eval_file") as warned:
        parts, _ = load_splits(DataConfig(path=path))
    assert (len(parts["train"]), parts["eval"]) == (20, [])  # They train all the same
    share = float(re.search(r"eval_fraction=([.\d]+) sets", str(warned[0].message))[1])
    assert load_splits(DataConfig(path=path, eval_fraction=share))[1].eval_rows > 0
    with pytest.raises(ValueError, match="none to train on"):
        load_splits(DataConfig(path=path, eval_fraction=0.9))


def test_a_file_that_was_split_before_says_so(tmp_path):
    rows = [dict(prompt=f"Question {i}", completion="a") for i in range(400)]
    train, held = split_examples(rows, 0.1)
    paths = [
        str(write_examples(part, tmp_path / name))
        for part, name in ((train, "train.jsonl"), (held, "eval.jsonl"))
    ]
    with pytest.warns(
        UserWarning,
        match="an earlier split has taken them, and its other file belongs in eval_file",
    ):
        parts, _ = load_splits(DataConfig(path=paths[0]))
    assert (len(parts["train"]), parts["eval"]) == (len(train), [])
    with pytest.warns(UserWarning, match="an earlier split has taken them"):
        parts, _ = load_splits(DataConfig(path=paths[0], eval_fraction=0.12))
    assert 0 < len(parts["eval"]) < 20
    with warnings.catch_warnings(action="error"):
        parts, facts = load_splits(DataConfig(path=paths[0], eval_file=paths[1]))
    assert (facts.train_rows, facts.eval_rows, facts.shared) == (len(train), len(held), 0)
    with warnings.catch_warnings(action="error"):
        for seed in range(50):
            split_examples(rows, 0.1, seed)  # No false alarm


@FUZZ
@given(st.text(max_size=60) | st.text("ae\u0301\u200b\r\n\x85\u2029 \u00a0", max_size=20))
def test_cleaning_twice_is_cleaning_once(dirty):
    once = clean_text(dirty)
    assert clean_text(once) == once
    assert "\r" not in once and "a\u200b" not in once and "\n\n\n\n" not in once


@FUZZ
@given(st.text("a \t\n\r", max_size=30))
def test_spaces_at_the_ends_of_lines_go_as_the_plain_pattern_says(dirty):
    text = dirty.replace("\r\n", "\n").replace("\r", "\n")
    plain = re.sub("\n{4,}", "\n\n\n", re.sub(r"[ \t]+(?=\n|\Z)", "", text))
    assert clean_text(dirty) == plain


def test_a_long_run_of_spaces_is_cleaned_in_time_that_grows_with_its_length():
    from time import process_time

    start = process_time()
    assert len(clean_text("a" + " " * 1_000_000 + "b \n")) == 1_000_003
    assert process_time() - start < 10  # It took hours


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("least, left", [(1, 3), (9, 2), (10, 1)])
def test_short_rows_are_dropped_with_and_without_cleaning(tmp_path, clean, least, left):
    rows = [dict(prompt=" a\x00 ", completion="b"), dict(prompt="What?", completion="That")]
    rows += [dict(prompt="What is it?", completion="That")]
    write_examples(rows, tmp_path / "rows.jsonl")
    config = DataConfig(
        path=str(tmp_path / "rows.jsonl"), clean=clean, min_chars=least, eval_fraction=0
    )
    parts, facts = load_splits(config)
    assert len(parts["train"]) == left and facts.cleaning.get("too_short", 0) == 3 - left
    assert (parts["train"][0]["prompt"] == " a\x00 ") == (left == 3 and not clean)
    assert bool(facts.cleaning) == (clean or least > 1)


@pytest.mark.parametrize("kind", KINDS)
def test_cleaning_reaches_every_text(kind):
    dirty = dict(
        text="a\x00\r\nb",
        messages=[
            dict(role="user", content="a\x00\r\nb"),
            dict(role="assistant", content="a\x00\r\nb"),
        ],
    )
    row = {
        c: dirty["messages"] if c == "messages" else True if c == "label" else dirty["text"]
        for c in KINDS[kind]
    }
    (clean,), counts = clean_examples([row])
    assert "\\x00" not in repr(clean) and "\\r" not in repr(clean) and counts["changed"] == 1


def test_prepared_parts_share_nothing(tmp_path):
    rows = [
        dict(prompt=f"Question  {i % 70}" + "\u200b" * (i % 2), completion=f"{i}", task="ab"[i % 2])
        for i in range(300)
    ]
    path = write_examples(rows, tmp_path / "rows.jsonl")
    parts, facts = load_splits(
        DataConfig(path=str(path), eval_fraction=0.1, test_fraction=0.1, split_by="task")
    )
    assert facts.shared == 0 and facts.train_rows + facts.eval_rows + facts.test_rows == 300
    assert all({r["task"] for r in part} == {"a", "b"} for part in (parts["train"], parts["eval"]))


# --- conversations, mixtures, caches


@pytest.mark.parametrize("kind", ["messages", "reasoning", "instruction", "prompt_completion"])
@FUZZ
@given(data=st.data())
def test_messages_end_with_the_answer(kind, data):
    row = data.draw(ROWS[kind])
    messages = to_messages(row)
    assert [m["role"] for m in messages][-2:] == ["user", "assistant"]
    answer = row["messages"][-1]["content"] if kind == "messages" else row[KINDS[kind][-1]]
    assert messages[-1]["content"].endswith(answer)
    assert example_kind(as_example(row)) == kind and as_example(as_example(row)) == as_example(row)


@FUZZ
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    total=st.integers(0, 200),
    temperature=st.sampled_from([1, 2, 10.0]),
)
def test_mixtures_are_exact_and_fair(sizes, total, temperature):
    data = {f"t{i}": [dict(text=f"{i}/{j}") for j in range(n)] for i, n in enumerate(sizes)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = mix(data, temperature=temperature, total=total)
    assert len(rows) == total
    for name, own in data.items():
        used = [r["text"] for r in rows if r["task"] == name]
        assert len(used) == rows.report.parts[name]["used"]
        times = {sum(u == r["text"] for u in used) for r in own}
        assert max(times) - min(times) <= 1, "a row comes again only when all others have come"


def test_cache_is_shared_by_processes(tmp_path):
    code = f"""
from trainkit.parallel import cached
def make():
    open({str(tmp_path / "calls")!r}, 'a').write('x')
    return [dict(input_ids=[1, 2], labels=[-100, 2])]
rows = cached(make, [dict(a=1.5, b=None), 'v1'], {str(tmp_path / "cache")!r})
print([row['labels'].tolist() for row in rows])"""
    outs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "01"
    ]
    assert outs == ["[[-100, 2]]\n"] * 2 and (tmp_path / "calls").read_text() == "x"


def test_cache_misses_when_anything_changes(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return [dict(input_ids=[1])]

    rows = [dict(prompt="a", completion="b"), dict(prompt="c", completion="d")]
    for depends in ([rows, 1], [rows, 2], [rows[::-1], 1], [rows[:1], 1], [rows, "1"], [rows, 1]):
        cached(make, depends, tmp_path)
    assert len(calls) == 5 and len(list(Path(tmp_path).iterdir())) == 5


def test_every_reader_gives_lines_from_one(tmp_path):
    for form in ("jsonl", "json", "csv", "tsv", "parquet", "txt"):
        path = tmp_path / f"rows.{form}"
        if form == "txt":
            path.write_text("text\n")
        else:
            write_examples([dict(text="one"), dict(text="two")], path)
        lines = [line for line, _ in read_rows(path)]
        assert lines == {"txt": [1], "csv": [2, 3], "tsv": [2, 3], "json": [2, 5]}.get(form, [1, 2])


# --- what a reviewer's odd files brought to light

GOOD_LINE = '{"prompt": "a", "completion": "b"}\n'


def test_an_object_of_all_columns_of_messages_is_one_row(tmp_path):
    "Its lists look like lists of rows, and there are six of them."
    message = [{"role": "user", "content": "hi"}]
    columns = ["messages", "conversations", "chosen", "rejected", "prompt", "completion"]
    path = tmp_path / "row.json"
    path.write_text(json.dumps({name: message for name in columns}))
    assert [row for _, row in read_rows(path)] == [{name: message for name in columns}]


@pytest.mark.parametrize(
    "first", ["broken", '["x", "y"]', "# a comment", "{", '{"prompt": "a"', "5"]
)
def test_a_bad_first_line_is_a_bad_row_like_any_other(tmp_path, first):
    (path := tmp_path / "rows.jsonl").write_text(first + "\n" + GOOD_LINE * 3)
    rows = load_skipping(path)
    assert (
        [r["line"] for r in rows] == [2, 3, 4]
        and len(rows.report.bad) == 1
        and "line 1" in rows.report.bad[0]
    )
    with pytest.raises(ValueError, match="line 1"):
        load_examples(path)


def test_json_in_a_jsonl_file_and_blank_lines_before_the_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    for text, lines in (
        ("\n\n\n" + GOOD_LINE * 3, [4, 5, 6]),
        ('[\n{"text": "a"},\n{"text": "b"}\n]\n', [2, 3]),
        ('[{"text": "a"}, {"text": "b"}]\n', [1, 1]),
        ('{\n "text": "a"\n}\n', [1]),
    ):
        path.write_text(text)
        assert [r["line"] for r in load_examples(path)] == lines


@pytest.mark.parametrize(
    "first, rest, kind",
    [
        (dict(prompt="q", completion=None), dict(prompt="a", completion="b"), "prompt_completion"),
        (
            dict(prompt="q", completion="x", label=None),
            dict(prompt="a", completion="b", label=True),
            "unpaired",
        ),
        (
            dict(question="q", reasoning=None, answer="x"),
            dict(question="a", reasoning="r", answer="b"),
            "reasoning",
        ),
    ],
)
def test_a_null_in_the_first_row_does_not_decide_the_kind(tmp_path, first, rest, kind):
    path = write_examples([first, rest, rest], tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="line 1"):
        load_examples(path)
    rows = load_skipping(path)
    assert rows.report.kind == kind and len(rows) == 2
    assert (
        load_examples(write_examples([first] * 1200, path)).report.kind != kind
    )  # all rows say so


def test_an_index_that_pandas_wrote_is_a_column(tmp_path):
    (path := tmp_path / "rows.csv").write_text(",prompt,completion\n0,a,b\n1,c,d\n")
    assert [(r["index"], r["prompt"]) for r in load_examples(path)] == [("0", "a"), ("1", "c")]
    path.write_text("prompt,,completion\na,b,c\n")
    with pytest.raises(ValueError, match="name each column once"):
        load_examples(path)


def test_dates_and_arrays_become_json(tmp_path):
    import datetime

    import numpy as np

    rows = [dict(text="a", when=datetime.datetime(2020, 1, 2), n=np.int64(3), v=np.arange(2))]
    for form in ("jsonl", "json"):
        back = load_examples(write_examples(rows, tmp_path / f"rows.{form}"))[0]
        assert (back["when"], back["n"], back["v"]) == ("2020-01-02T00:00:00", 3, [0, 1])
    with pytest.raises(ValueError, match="column 'blob' holds a value of type bytes"):
        write_examples([dict(text="a", blob=b"x")], tmp_path / "rows.jsonl")


def test_what_parquet_has_no_form_for_is_named_with_its_column(tmp_path):
    rows = [dict(text="a", tools=[dict(name="add", parameters={})])]
    with pytest.raises(ValueError, match=r"rows.parquet: column 'tools' .*: write .jsonl"):
        write_examples(rows, tmp_path / "rows.parquet")
    assert not (tmp_path / "rows.parquet").exists()


def test_folders_say_what_they_do_not_read(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "extra.jsonl"):
        (tmp_path / name).write_text(GOOD_LINE)
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    rows = load_examples(tmp_path)
    assert [r["source"] for r in rows] == ["train.jsonl"]
    assert rows.report.notes == [
        "splits: train, test; read: train",
        "files of no split are not read: extra.jsonl",
    ]


def test_a_folder_of_programs_has_no_splits(tmp_path):
    for name in ("train.py", "test_model.py", "model.py"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "__init__.py").write_text("")
    rows = load_skipping(tmp_path)
    assert [r["source"] for r in rows] == ["model.py", "test_model.py", "train.py"] and len(
        rows.report.bad
    ) == 1
    with pytest.raises(ValueError, match="__init__.py: the file is empty"):
        load_examples(tmp_path)


def test_a_part_of_a_split_is_not_streamed(monkeypatch, tmp_path):
    import datasets

    real, path = (
        datasets.load_dataset,
        write_examples([dict(text=str(i)) for i in range(10)], tmp_path / "rows.jsonl"),
    )
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, **how: real(
            "json", data_files=str(path), cache_dir=str(tmp_path / "cache"), **how
        ),
    )
    rows = load_examples("some-owner/data", split="train[2:6]", max_examples=3)
    assert [r["text"] for r in rows] == ["2", "3", "4"]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_prompt_in_its_own_column_is_said(tmp_path, name):
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    for row in (
        dict(conversations=talk),
        dict(question="Hi", answer="Yo"),
        dict(instruction="Hi", output="Yo"),
    ):
        read = load_examples(write_examples([{**row, name: "Be brief"}], tmp_path / "rows.jsonl"))[
            0
        ]
        for one in (read, {**row, name: "Be brief"}):
            assert [(m["role"], m["content"]) for m in to_messages(one)] == [
                ("system", "Be brief"),
                ("user", "Hi"),
                ("assistant", "Yo"),
            ]


def test_clean_drops_empty_turns_and_keeps_different_calls():
    def talk(answer, **more):
        return dict(
            messages=[
                dict(role="user", content="Do"),
                dict(role="assistant", content=answer, **more),
            ]
        )

    calls = [
        talk("", tool_calls=[dict(function=dict(name="f", arguments=dict(x=x)))]) for x in (1, 2, 1)
    ]
    rows, counts = clean_examples([talk("\u200b"), talk("Yes"), *calls])
    assert rows == [talk("Yes"), *calls[:2]] and (counts["too_short"], counts["repeated"]) == (1, 1)


@FUZZ
@given(
    st.text(
        "aé\u0301\u0e01\u05d0\u200b\u200c\u200d\xad\u180e\u2060\u2064\ufeff\u200e\u202e\U000e0041\U0001f3f4\x1b[31m",
        max_size=14,
    )
)
def test_what_the_doctor_sends_to_cleaning_is_cleaned(dirty):
    from trainkit.data.text_checks import invisible

    once = clean_text(dirty)
    assert not invisible(once) and clean_text(once) == once


def test_cleaning_leaves_what_means_something():
    assert clean_text("\x1b[31mred\x1b[0m co\xadop") == "red coop"
    for text in (
        "ภาษา\u200bไทย",
        "می\u200cخواهم",
        "👩\u200d👧",
        "שלום\u200f!",
        "\U0001f3f4\U000e0067\U000e0062\U000e007f",
    ):
        assert clean_text(text) == text


def test_conversations_that_the_assistant_opens_are_split_by_their_question():
    rows = [
        dict(
            messages=[
                dict(role="assistant", content="Welcome!"),
                dict(role="user", content=f"q{i // 2}"),
                dict(role="assistant", content="x"),
            ]
        )
        for i in range(60)
    ]
    one, other = split_examples((r for r in rows), 0.2, by=None)
    assert len(one) > len(other) > 2 and not {split_key(r) for r in one} & {
        split_key(r) for r in other
    }
    assert (
        sum(
            map(
                len,
                split_examples(
                    [dict(text=str(i), task=["a", "b"][i % 2 :]) for i in range(40)], 0.2, by="task"
                ),
            )
        )
        == 40
    )


def test_mix_says_what_is_wrong_with_it():
    data = dict(a=[dict(text="x")], b=[dict(text="y")])
    for how, why in (
        (dict(datasets=[*data.values()]), "must have names"),
        (dict(datasets=data, total=-1), "total = -1"),
        (dict(datasets=data, weights=dict(a=1)), r"lacks \['b'\]"),
        (dict(datasets=data, weights=[float("nan"), 1]), "must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=why):
            mix(**how)
    assert len(mix(dict(a=(r for r in data["a"]), b=data["b"]))) == 2


def test_caches_of_odd_examples(tmp_path):
    from trainkit.parallel import content_hash

    row = dict(prompt="a")
    assert len({content_hash(row), content_hash([row]), content_hash([[row]])}) == 3
    with pytest.raises(ValueError, match=r"one has \['a'\], another \['b'\]"):
        cached(lambda: [dict(a=1), dict(b=1)], ["x"], tmp_path)
    assert cached(lambda: iter([dict(a=1)]), ["y"], tmp_path) == [dict(a=1)]  # type: ignore


# --- several processes

CTRL_C = """
import os, signal, sys, threading, time
from trainkit.parallel import in_order
def slow(part):
    os.write(1, f'{os.getpid()}{os.linesep}'.encode()) # one write: two processes can't mix theirs
    time.sleep(600)
    return part
try: list(in_order(slow, range(4), num_workers=2, chunk=1))
except KeyboardInterrupt: print('stopped', flush=True)
"""


def test_ctrl_c_ends_the_workers_at_once():
    "The key reaches the parent; it kills the workers instead of waiting for what they do."
    with subprocess.Popen(
        [sys.executable, "-c", CTRL_C], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        workers = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300)[0].endswith("stopped\n")
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_parent_takes_its_workers_with_it():
    with subprocess.Popen(
        [sys.executable, "-c", CTRL_C], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        workers = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        process.communicate(timeout=300)  # the pipe closes when the last of them is gone
    assert len({*workers}) == 2


@pytest.mark.parametrize("work", ["words", "shards", "batches"])
@pytest.mark.skipif(sys.platform != "linux", reason="others import the script again")
def test_workers_do_not_import_the_script_again(monkeypatch, work):
    "Python 3.14 would start them so by itself, and a script without a guard would not end."
    from multiprocessing import context, popen_forkserver

    from trainkit.data.dataloader import Batches
    from trainkit.data.shards import encode_blocks
    from trainkit.tokenizer.bpe import count_words
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    def fresh(self, process):
        raise AssertionError("a process that begins with nothing")

    monkeypatch.setattr(popen_forkserver.Popen, "__init__", fresh)
    monkeypatch.setattr(
        context._default_context, "_actual_context", multiprocessing.get_context("forkserver")
    )
    if work == "words":
        assert count_words(["a b", "a"], num_proc=2, backend="python") == {"a": 2, " b": 1}
    elif work == "shards":
        words = dict(special_tokens=["<|endoftext|>"], progress=False)
        tokenizer = BPETokenizer.train(["a b"], 257, **words)
        (block,) = encode_blocks([(0, ["a"], [False])], tokenizer, num_proc=2)
        assert block[3].tolist() == [97]
    else:
        rows = [dict(input_ids=[1, 2], labels=[1, 2])] * 4
        assert len(list(Batches(rows, 2, num_workers=1))) == 2


def test_what_cannot_travel_is_an_error_and_no_hang():
    from trainkit.tokenizer.bpe import count_words

    for items in ([lambda: 1], [1, 2, threading.Lock()]):
        with pytest.raises(ValueError, match="cannot be sent to another process"):
            list(in_order(list, items, num_workers=2, chunk=1))
    with pytest.raises(ValueError, match="a result cannot be sent"):
        list(in_order(lambda part: [lambda: 1], [1], num_workers=2))

    class Text(str):
        def __reduce__(self):
            raise TypeError("this text stays here")

    with pytest.raises((TypeError, ValueError), match="stays here"):
        count_words([Text("a b")] * 3, num_proc=2, backend="python")


@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
def test_bad_rows_are_all_counted_and_the_first_thousand_described(tmp_path, count):
    "The messages are bounded for any file; the number in each sentence counts all rows."
    from trainkit.data.sources import MAX_BAD_MESSAGES

    lines = [
        json.dumps(dict(prompt="Hi", completion="Hello")),
        *["not JSON"] * count,
        json.dumps(dict(prompt="Bye", completion="Bye bye")),
    ]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rows = load_examples(path, on_bad="skip")
    report = rows.report
    assert len(rows) == report.rows == 2 and rows[1]["line"] == count + 2
    assert (
        MAX_BAD_MESSAGES == 1000 and len(report.bad) == min(count, 1000) and report.skipped == count
    )
    assert [f"line {n + 2}," in line for n, line in enumerate(report.bad)] == [True] * len(
        report.bad
    )
    for text in (str(report), str(warned[0].message), report._repr_html_()):
        assert (
            f"{count:,} left out" in text
            and f"and {count - 5:,} more" in text
            and ("the first 1,000" in text) == (count > 1000)
        )
    (broken := tmp_path / "broken.jsonl").write_text("\n".join(lines[1:-1]))
    with pytest.raises(ValueError, match=rf"none of {count:,} rows is an example.*line 1"):
        load_examples(broken, "preference", on_bad="skip")


def test_rows_in_memory_are_loaded_like_a_file(tmp_path):
    import datasets

    rows = [dict(question=f"Is {n} even?", answer="yes" if n % 2 == 0 else "no") for n in range(6)]
    read = load_examples(write_examples(rows, tmp_path / "rows.jsonl"))

    def plain(examples):
        return [{k: v for k, v in row.items() if k not in ("source", "line")} for row in examples]

    table = datasets.Dataset.from_list(rows)
    for source in (
        table,
        rows,
        iter(rows),
        datasets.DatasetDict(train=table),
        datasets.DatasetDict(validation=table),
    ):
        examples = load_examples(source)
        assert plain(examples) == plain(read) and examples.report.kind == read.report.kind
        assert examples[0]["source"] == f"{type(source).__name__} in memory"
    assert len(load_examples(table, max_examples=2)) == 2
    assert (
        plain(
            load_examples(datasets.DatasetDict(train=table, test=table.select([0])), split="test")
        )
        == plain(read)[:1]
    )
    assert plain(load_examples(write_examples(table, tmp_path / "again.jsonl"))) == plain(read)
    with pytest.raises(ValueError, match=r"split = 'dev': this DatasetDict has train"):
        load_examples(datasets.DatasetDict(train=table), split="dev")
    with pytest.raises(ValueError, match="row 2: "):
        load_examples([rows[0], dict(nothing=1)])
    with pytest.raises(ValueError, match="list in memory: there are no rows"):
        load_examples([])
    with pytest.raises(TypeError, match="a int is no path.*contains no rows"):
        load_examples(7)


@pytest.mark.parametrize("suffix", ["txt.gz", "jsonl.bz2", "csv.xz"])
def test_a_file_that_is_made_to_fill_the_memory_is_named(tmp_path, monkeypatch, suffix):
    "The file, the size that it reached, and how to read it all the same."
    import bz2
    import gzip
    import lzma

    from trainkit.data.readers import read_rows

    line = b'{"text": "a"}\n' if "jsonl" in suffix else b"text\n"
    pack = {"gz": gzip, "bz2": bz2, "xz": lzma}[suffix.rpartition(".")[2]].compress
    (path := tmp_path / f"bomb.{suffix}").write_bytes(pack(line * 200_000))
    assert sum(1 for _ in read_rows(path)) >= 1
    monkeypatch.setattr("trainkit.data.readers.RATIO", 10)
    monkeypatch.setattr("trainkit.data.readers.UNPACKED", 100_000)
    with pytest.raises(
        ValueError,
        match=r"bomb\..* bytes have become more than 100,000 of data.*TRAINKIT_MAX_UNPACKED",
    ):
        list(read_rows(path))
    monkeypatch.setenv("TRAINKIT_MAX_UNPACKED", "10000000")
    assert sum(1 for _ in read_rows(path)) >= 1


def varint(value):  # Of a size in a Parquet footer: zigzag, seven bits a byte
    value, out = 2 * value, []
    while value > 127:
        value, out = value >> 7, [*out, value & 127 | 128]
    return bytes([*out, value])


def with_small_sizes(data, sizes):
    "A Parquet file whose footer claims that each of these sizes is a single byte."
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    head, footer = data[:start], data[start:]
    for size in sizes:
        assert (true := varint(size)) in footer
        footer = footer.replace(true, bytes([2 | 128, *[128] * (len(true) - 2), 0]))
    return head + footer


@pytest.mark.parametrize("lying", [False, True], ids=["honest", "lying"])
@pytest.mark.parametrize("what", ["plain", "repeated", "nested", "numbers", "nothing"])
def test_a_parquet_file_that_is_made_to_fill_the_memory_is_named(
    tmp_path, monkeypatch, what, lying
):
    """Parquet is bounded like any compressed file, and is never read all at once.

    The footer is checked first; where it says too little, the data are counted as they come.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainkit.data.readers import read_rows

    one = pa.DictionaryArray.from_arrays(
        pa.array([0] * 20_000, pa.int32()), pa.array(["y" * 3000])
    )  # A value and 20,000 times its number
    table = pa.table(
        {
            "a": dict(
                plain=lambda: ["x" * 10_000] * 6000,
                numbers=lambda: [0] * 400_000,
                nothing=lambda: pa.nulls(400_000),
                repeated=lambda: one,
                nested=lambda: pa.ListArray.from_arrays(list(range(0, 20_001, 10)), one),
            )[what]()
        }
    )
    pq.write_table(
        table,
        path := tmp_path / "bomb.parquet",
        compression="zstd",
        use_dictionary=what not in ("plain", "numbers"),
    )
    footer = pq.read_metadata(path)
    assert path.stat().st_size < 20_000
    if lying:
        path.write_bytes(
            with_small_sizes(
                path.read_bytes(),
                {footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)},
            )
        )
    assert pq.read_metadata(path).row_group(0).total_byte_size == 1 or not lying
    monkeypatch.setattr("trainkit.data.readers.RATIO", 10)
    monkeypatch.setattr("trainkit.data.readers.UNPACKED", 2_000_000)
    seen, before = 0, pa.total_allocated_bytes()
    with pytest.raises(
        ValueError,
        match=(
            r"bomb\.parquet: .* bytes have become more than 2,000,000 of "
            r"data.*TRAINKIT_MAX_UNPACKED"
        ),
    ):
        for _ in read_rows(path):
            seen += 1
            assert (
                pa.total_allocated_bytes() - before < 20_000_000
            )  # A page of the file, and a batch
    if what in ("plain", "numbers") and not lying:
        assert seen == 0  # The footer says it
    assert seen <= 2_000_000
    monkeypatch.setenv("TRAINKIT_MAX_UNPACKED", str(10**9))
    assert sum(1 for _ in read_rows(path)) == len(table)
    monkeypatch.setenv(
        "TRAINKIT_MAX_UNPACKED", "1000"
    )  # Also where it is less than what the file has
    with pytest.raises(ValueError, match="more than 1,000 of data"):
        list(read_rows(path))


@pytest.mark.parametrize("rows_in_group", [1, 100, 5000])
def test_parquet_files_are_read_in_full_and_in_order(tmp_path, rows_in_group):
    "With many groups, nulls, lists and numbers; also of no rows, and in a process that was forked."
    import multiprocessing

    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainkit.data.readers import read_rows

    rows = [
        dict(
            messages=[dict(role="user", content=f"{n}" * (n % 7))] * (n % 3),
            n=n if n % 5 else None,
            x=n / 7,
            s="same",
        )
        for n in range(3000)
    ]
    pq.write_table(
        pa.Table.from_pylist(rows), path := tmp_path / "rows.parquet", row_group_size=rows_in_group
    )
    assert [row for _, row in read_rows(path)] == rows and [n for n, _ in read_rows(path)] == list(
        range(1, 3001)
    )
    pq.write_table(pa.Table.from_pylist(rows)[:0], tmp_path / "none.parquet")
    assert list(read_rows(tmp_path / "none.parquet")) == []
    if "fork" in multiprocessing.get_all_start_methods():
        child = multiprocessing.get_context("fork").Process(target=lambda: list(read_rows(path)))
        child.start()
        child.join(300)
        assert child.exitcode == 0, "a reader hangs in a forked process"


def abandon_large_results():
    "Leave streams while their workers write results of 20 MB."
    from trainkit.parallel import in_order

    for i in range(6):
        stream = in_order(large_results, range(100), 2, chunk=1)
        next(stream)
        time.sleep(0.01 * i)
        stream.close()


def large_results(items):
    return [bytes(20_000_000) for _ in items]


def test_a_stream_that_is_left_early_never_hangs():
    "A worker that is killed while it writes leaves half a result; nobody waits for the rest."
    process = multiprocessing.get_context("fork").Process(target=abandon_large_results)
    process.start()
    process.join(300)
    hung = process.is_alive()
    process.kill()
    assert not hung and process.exitcode == 0


def test_the_mark_of_a_task_stands_before_the_first_words_of_the_user():
    turns = [
        dict(role=r, content=f"{r} {i}") for i, r in enumerate(("system", "user", "assistant"))
    ]
    again = [*turns, dict(role="user", content="more"), turns[2]]
    for column, row in (
        ("messages", dict(messages=again)),
        ("prompt", dict(prompt=turns[:2], completion=turns[2:])),
    ):
        marked = [turn["content"] for turn in add_prefix(row, "[SUMS] ")[column]]
        plain = [turn["content"] for turn in row[column]]
        assert marked == [plain[0], "[SUMS] user 1", *plain[2:]]
    with pytest.raises(ValueError, match="messages has no user turn to mark with"):
        add_prefix(dict(messages=[turns[2]]), "[SUMS] ")


@pytest.mark.parametrize("kind, kept", [("preference", "chosen"), ("messages", "messages")])
def test_rows_of_several_kinds_are_read_as_the_method_needs(tmp_path, kind, kept):
    "As UltraFeedback has them: pairs, and the better conversation besides."
    rows = []
    for name in ("Ann", "Bea", "Cleo", "Dora"):
        better = [dict(role="user", content=f"I am {name}."), dict(role="assistant", content="Hi!")]
        worse = [better[0], dict(role="assistant", content="What?")]
        row = dict(prompt=name, prompt_id="7", chosen=better, rejected=worse, messages=better)
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), eval_fraction=0.0)
    with pytest.raises(ValueError, match="fit the kinds messages and preference: choose one"):
        load_splits(config)
    rows, facts = load_splits(config, preferred=(kind, "unpaired"))
    assert facts.kind == kind and len(rows["train"]) == 4 and kept in rows["train"][0]
    assert ("rejected" in rows["train"][0]) == (kind == "preference")
    with pytest.raises(ValueError, match="fit the kinds"):
        load_splits(config, preferred=("messages", "preference"))


def test_the_names_of_the_file_are_remembered(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict(question="2+2?", solution="4")) + "\n")
    _, facts = load_splits(DataConfig(path=str(tmp_path / "rows.jsonl"), eval_fraction=0.0))
    assert facts.renamed == dict(prompt="question", completion="solution")


@pytest.fixture
def two(tmp_path):
    "40 sums and 20 words to spell, in files of different columns; and a few chats."
    rows = {
        "sums": [dict(question=f"{n} + 1?", answer=str(n + 1)) for n in range(40)],
        "words": [dict(prompt=f"Spell {n} now.", completion=f"n{n}") for n in range(20)],
        "chats": [
            dict(
                messages=[
                    dict(role="user", content=f"Hi {n}"),
                    dict(role="assistant", content="Yo"),
                ]
            )
            for n in range(12)
        ],
    }
    for name, some in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    return tmp_path


def mixed(folder, *names, **more):
    entries = [name if isinstance(name, dict) else str(folder / f"{name}.jsonl") for name in names]
    return DataConfig(datasets=entries, **more)


def of_task(rows, task):
    return [{k: v for k, v in row.items() if k != "task"} for row in rows if row["task"] == task]


def test_without_weights_every_row_of_each_dataset_is_there_once(two):
    parts, facts = load_splits(mixed(two, "sums", "words", eval_fraction=0.25))
    for name in ("sums", "words"):
        alone, _ = load_splits(DataConfig(path=str(two / f"{name}.jsonl"), eval_fraction=0.25))
        for part in ("train", "eval"):
            got, expected = of_task(parts[part], name), alone[part]
            assert sorted(map(str, got)) == sorted(map(str, expected)) and expected
    assert facts.train_rows + facts.eval_rows == 60 and facts.path == "sums + words"
    assert facts.mixture.parts["sums"]["epochs"] == 1
    again, same = load_splits(mixed(two, "sums", "words", eval_fraction=0.25))
    assert again == parts and same == facts


@pytest.mark.parametrize(
    ("rule", "counts"),
    [("total", (15, 45)), ("first_exhausted", (7, 19)), ("all_exhausted", (40, 120))],
)
def test_weights_change_what_is_learned_and_not_what_is_held_out(two, rule, counts):
    config = mixed(
        two,
        dict(path=str(two / "sums.jsonl"), weight=1, max_examples=40),
        dict(path=str(two / "words.jsonl"), weight=3),
        eval_file=str(two / "words.jsonl"),
        stopping_strategy=rule,
    )
    with pytest.warns(UserWarning, match="have the same question as a training row"):
        parts, facts = load_splits(config)
    got = tuple(len(of_task(parts["train"], name)) for name in ("sums", "words"))
    assert sum(got) == (60, 26, 160)[("total", "first_exhausted", "all_exhausted").index(rule)]
    assert got == counts and len(parts["eval"]) == 20 == facts.eval_rows
    assert len({row["prompt"] for row in of_task(parts["train"], "sums")}) == min(40, got[0])


def test_a_repeated_row_is_never_held_out(two):
    config = mixed(
        two,
        dict(path=str(two / "sums.jsonl"), weight=1),
        dict(path=str(two / "words.jsonl"), weight=9),
        eval_fraction=0.3,
        test_fraction=0.2,
    )
    parts, facts = load_splits(config)
    asked = {part: {row["prompt"] for row in rows} for part, rows in parts.items()}
    assert facts.shared == 0 and facts.mixture.parts["words"]["epochs"] > 1
    assert not asked["train"] & (asked["eval"] | asked["test"]) and asked["test"]


def test_of_text_weights_count_characters(tmp_path):
    (tmp_path / "long.txt").write_text("\n\n".join(f"{n} " + "a" * 390 for n in range(100)))
    rows = "\n".join(json.dumps(dict(text=f"{n} " + "b" * 37)) for n in range(400))
    (tmp_path / "short.jsonl").write_text(rows)
    entries = [
        dict(path=str(tmp_path / "long.txt"), weight=1),
        dict(path=str(tmp_path / "short.jsonl"), weight=1),
    ]
    parts, _ = load_splits(DataConfig(datasets=entries, chunk_chars=400, eval_fraction=0.1))
    sizes = [
        sum(len(row["text"]) for row in parts["train"] if row["task"] == name)
        for name in ("long", "short")
    ]
    assert abs(sizes[0] / sizes[1] - 1) < 0.05


def test_conversations_of_several_kinds_become_messages(two):
    parts, facts = load_splits(mixed(two, "sums", "chats", eval_fraction=0.2))
    assert facts.kind == "messages"
    assert all(
        [turn["role"] for turn in row["messages"]] == ["user", "assistant"]
        for rows in parts.values()
        for row in rows
    )
    (two / "text.txt").write_text("a\n\nb")
    with pytest.raises(ValueError, match="these kinds do not train together: sums: .*, text: text"):
        load_splits(mixed(two, "sums", dict(path=str(two / "text.txt"))))


def test_each_dataset_is_read_as_its_entry_says(two):
    (two / "odd.csv").write_text("ask,reply,more\n" + "\n".join(f"q{n},a{n},x" for n in range(9)))
    odd = dict(
        path=str(two / "odd.csv"),
        name="odd",
        kind="prompt_completion",
        columns={"prompt": "ask", "completion": "reply"},
        max_examples=5,
    )
    parts, facts = load_splits(
        mixed(two, "words", odd, eval_fraction=0.2, split_by="task", eval_fractions={"odd": 0.0})
    )
    assert sorted(row["prompt"] for row in of_task(parts["train"], "odd")) == [
        f"q{n}" for n in range(5)
    ]
    assert facts.renamed == {"prompt": "ask", "completion": "reply"}
    assert {row["task"] for row in parts["eval"]} == {"words"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(path="a.txt", datasets=["b.txt"]), "path = 'a.txt': and data.datasets both say"),
        (dict(datasets=[dict(weight=1)]), r"datasets\[0\].path"),
        (dict(datasets=["a", dict(path="b", wieght=1)]), r"datasets\[1\].wieght.*'weight'"),
        (dict(datasets=["a", dict(path="b", weight=1)]), r"datasets\[0\].weight: is missing"),
        (dict(datasets=[dict(path="b", weight=0)]), "weights of 0 only"),
        (dict(datasets=[dict(path="b", weight=-1)]), r"datasets\[0\].weight = -1"),
        (
            dict(datasets=[dict(path="b", weight=1)], mix_temperature=2.0),
            "mix_temperature = 2.0: sets the proportions",
        ),
    ],
)
def test_a_mixture_that_contradicts_itself(values, words):
    with pytest.raises(ConfigError, match=words):
        DataConfig(**values)


# --- the edges of loading, splitting, cutting and mixing


def test_texts_are_cut_at_the_last_mark_of_the_second_half():
    "A mark in the middle is too early; a blank line goes before a line end, that before a space."
    for text, pieces in (
        ("a" * 10, None),
        ("a" * 11, ["a" * 10, "a"]),
        ("a" * 25, ["a" * 10, "a" * 10, "a" * 5]),
        ("aaaaa bbbbbbb", ["aaaaa bbbb", "bbb"]),
        ("aaaaaa bbbbbb", ["aaaaaa ", "bbbbbb"]),
        ("aaaaaa b ccccc", ["aaaaaa b ", "ccccc"]),
        ("aaaaaa\nb ccccc", ["aaaaaa\n", "b ccccc"]),
        ("aaaaaa\n\nb cccc", ["aaaaaa\n\n", "b cccc"]),
        ("aaaaaa\n\nb\nc d eeeeeee", ["aaaaaa\n\n", "b\nc d eeee", "eee"]),
    ):
        row = dict(text=text, source="book", part=3)
        expected = [row] if pieces is None else []
        for number, piece in enumerate(pieces or ()):
            expected.append(dict(text=piece, source=f"book#{number}", part=3))
        assert chunk_examples([row], 10) == expected, text
    assert [row["text"] for row in chunk_examples([dict(text="ab c")], 1)] == [*"ab c"]
    with pytest.raises(ValueError, match="max_chars = 0: must be at least 1"):
        chunk_examples([dict(text="a")], 0)


@pytest.mark.parametrize(
    "places, fraction, advice",
    [
        ([0.13, 0.13, 0.5], 0.05, "share=0.14 sets 1 of their 2 questions or texts apart; with 59"),
        ([0.14, 0.145, 0.5], 0.1, "share=0.15 sets 2 of their 3 questions or texts apart; with 29"),
        ([0.05], 0.2, "share=0.21 sets 1 of their 1 questions or texts apart; with 14"),
        ([0.495], 0.05, "share=0.5 sets 1 of their 1 questions or texts apart; with 59"),
        ([0.5], 0.05, "with 59"),
        ([0.005], 0.002, "share=0.01 sets 1 of their 1 questions or texts apart; with 1,497"),
    ],
)
def test_the_share_that_would_reach_the_first_row(places, fraction, advice):
    assert _remedy(places, fraction, "share") == (
        f"{advice} of them (max_examples) and share={fraction:g} a part is empty one time in twenty"
    )


def test_the_part_that_is_empty_is_named_with_its_own_share():
    texts = sorted((f"row {i}" for i in range(40)), key=hash_position)[10:20]
    rows = [dict(text=text) for text in texts]
    places = [hash_position(text) for text in texts]
    with pytest.warns(UserWarning) as warned:
        split_examples(rows, 0.1, test_fraction=0.1)
    alone = "since the text of each alone decides its side. "
    assert str(warned[0].message) == (
        f"10 rows leave none to evaluate on, {alone}{_remedy(places, 0.1)}; or give a file of its "
        f"own to evaluate on (eval_file). 10 rows leave none for the test, {alone}"
        + _remedy([1 - place for place in places], 0.1, "test_fraction")
    )
    with pytest.warns(UserWarning, match="^1 row leaves none to evaluate on"):
        split_examples(rows[:1], 0.1)


@pytest.mark.parametrize("count, more", [(2, ""), (3, ""), (4, "(and 1 "), (6, "(and 3 ")])
def test_three_values_with_nothing_to_evaluate_on_are_named(count, more):
    texts = sorted((f"row {i}" for i in range(60)), key=hash_position)
    rows = [dict(text=text, task="common") for text in texts[:-count]]
    rows += [dict(text=text, task=f"rare {i}") for i, text in enumerate(texts[-count:])]
    with pytest.warns(UserWarning) as warned:
        split_examples(rows, 0.3, by="task")
    said = str(warned[0].message)
    assert said.count("is set apart to evaluate on") == min(count, 3)
    assert said.endswith(f"{more}more of the kind)") if more else "of the kind" not in said


def test_a_row_on_the_border_of_two_parts():
    rows = [dict(text=f"text {i}") for i in range(40)]
    places = sorted(hash_position(row["text"]) for row in rows)
    parts = split_examples(rows, places[8], test_fraction=1 - places[30])
    found = [sorted(hash_position(row["text"]) for row in part) for part in parts]
    assert found == [places[8:30], places[:8], places[30:]]
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"eval_fraction = {share}: must be between 0 and 1"):
            split_examples(rows, share)
    for share in (-0.1, 0.9):
        with pytest.raises(ValueError, match=f"test_fraction = {share}: must be between 0 and"):
            split_examples(rows, 0.1, test_fraction=share)
    with pytest.raises(ValueError, match="no rows to split"):
        split_examples([])


def test_the_first_question_of_a_conversation_decides():
    def talk(*turns):
        return dict(messages=[dict(role=role, content=content) for role, content in turns])

    system, user, more = ("system", "S"), ("user", "Q  one"), ("user", "Q two")
    first, last = ("assistant", "A one"), ("assistant", "A two")
    for turns, key in (
        ((user, first), "q one"),
        ((system, user, first, more, last), "q one"),
        ((first, user, last, more, first), "q one"),
        ((user, system, more, first), "q one q two"),
        ((first, last), "a one"),
        ((user, more), "q one q two"),
    ):
        assert split_key(talk(*turns)) == key
    assert split_key(dict(instruction="Do", input="this", output="x")) == "do this"


def test_the_last_turn_of_a_labelled_chat_is_judged(tmp_path):
    turns = [dict(role=r, content=r) for r in ("system", "user", "assistant")]
    for count in (2, 3):
        (row,) = load_examples([dict(messages=turns[-count:], kto_tag=True)], "unpaired")
        assert (row["prompt"], row["completion"]) == (turns[-count:-1], turns[-1:])
    with pytest.raises(ValueError, match="messages"):
        load_examples([dict(messages=turns[-1:], kto_tag=True)], "unpaired")


def test_reading_stops_at_the_number_of_characters():
    rows = [dict(text="abcde"), dict(text="fghij"), dict(text="klm")]
    for most, texts in (
        (4, ["abcd"]),
        (5, ["abcde"]),
        (6, ["abcde", "f"]),
        (10, ["abcde", "fghij"]),
        (99, ["abcde", "fghij", "klm"]),
    ):
        assert [row["text"] for row in load_examples(rows, max_chars=most)] == texts
    pairs = [dict(prompt="ab", completion="cd"), dict(prompt="e", completion="f")] * 2
    assert [len(load_examples(pairs, max_chars=most)) for most in (1, 4, 5, 6, 7)] == [
        1,
        1,
        2,
        2,
        3,
    ]


def test_how_far_the_kind_is_looked_for():
    "A wrong row does not end the search, nor what only seems to be of a kind; 1,000 rows do."
    good, wrong = dict(prompt="a", completion="b"), dict(prompt="x", completion=5)
    rows = load_skipping([wrong, good, good])
    assert (len(rows), rows.report.skipped) == (2, 1)
    unsure = dict(prompt="q", completion=None)
    raw = ((f"row {n}", "here", None, unsure) for n in range(1, 2000))
    kind, read = _find_kind(raw, None)
    assert (kind, len(read)) == ("prompt", 1000)
    with pytest.raises(ValueError) as told:
        load_examples([wrong, dict(prompt="y", completion=6)], "prompt_completion", on_bad="skip")
    assert "none of 2 rows is an example. row 1" in str(told.value) and "row 2" not in str(
        told.value
    )
    pair = dict(prompt="a", chosen="b", rejected="c")
    with pytest.raises(ValueError, match=r"\(the first row is of kind preference\)"):
        [*stream_examples([pair, good], preferred=("preference", "messages"))]


def test_columns_that_differ_in_capitals_only_keep_their_names():
    (row,) = load_examples([{"Prompt": "a", "Completion ": "b"}])
    assert (row["prompt"], row["completion"]) == ("a", "b")
    (row,) = load_examples([{"text": "a", "Prompt": "b", "PROMPT": "c"}])
    assert (row["Prompt"], row["PROMPT"]) == ("b", "c")


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1, 2, 3.0])
def test_shares_are_powers_of_sizes(temperature):
    sizes = [10**6, 10**5, 30, 1]
    powers = [(n / 10**6) ** (1 / temperature) for n in sizes]
    expected = [power / sum(powers) for power in powers]
    assert shares(sizes, temperature=temperature) == pytest.approx(expected, rel=1e-12)
    assert shares(sizes, [0, 3, 1, 0]) == [0, 0.75, 0.25, 0]
    for weights in ([-1, 2, 1, 1], [0, 0, 0, 0], [float("inf"), 1, 1, 1]):
        with pytest.raises(ValueError, match="must be 0 or more, and not all 0"):
            shares(sizes, weights)
    with pytest.raises(ValueError, match="temperature = 0: must be above 0"):
        shares(sizes, temperature=0)


@pytest.mark.parametrize(
    "total, parts, counts",
    [
        (10, [0.25, 0.25, 0.5], [3, 2, 5]),
        (10, [0.125, 0.4375, 0.4375], [1, 5, 4]),
        (3, [0.125, 0.125, 0.75], [1, 0, 2]),
        (3, [0.0625, 0.1875, 0.75], [0, 1, 2]),
        (0, [0.5, 0.5], [0, 0]),
        (7, [1.0], [7]),
    ],
)
def test_what_is_left_goes_to_the_largest_remainders(total, parts, counts):
    assert whole_parts(total, parts) == counts


def test_a_mixture_says_what_comes_several_times():
    data = {name: [dict(text=f"{name}{i}") for i in range(n)] for name, n in (("a", 4), ("b", 2))}
    with warnings.catch_warnings(action="error"):
        rows = mix(data)  # Each exactly once
        one = mix(data, dict(a=1, b=0), total=1)
    assert sorted(row["text"] for row in rows) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert str(rows.report) == (
        "a: 4 of 4 rows, 66.67% of the mixture\nb: 2 of 2 rows, 33.33% of the mixture"
    )
    assert one.report.parts["a"] == dict(rows=4, used=1, share=1.0, epochs=0.25)
    assert one.report.parts["b"] == dict(rows=2, used=0, share=0.0, epochs=0.0)
    with pytest.warns(UserWarning, match=r"several times: a \(1.2 times\), b \(2.5 times\)$"):
        rows = mix(data, [1, 1], total=10, prefixes=dict(b="B: "))
    assert str(rows.report) == (
        "a: 5 of 4 rows, 50.00% of the mixture, each 1.2 times\n"
        "b: 5 of 2 rows, 50.00% of the mixture, each 2.5 times"
    )
    assert {row["text"][:2] for row in rows} == {"a0", "a1", "a2", "a3", "B:"}
    with pytest.raises(ValueError, match="total = -1: must be 0 or more"):
        mix(data, total=-1)
    with pytest.raises(ValueError, match=r"no rows in \['c'\]"):
        mix({**data, "c": []})
    with pytest.raises(ValueError, match="1 weights for 2 datasets"):
        mix(data, [1])


def test_warnings_of_data_name_the_line_that_asked():
    rows = [dict(text=f"text {i}") for i in range(3)]
    with pytest.warns(UserWarning, match="several times") as caught:
        mix({"a": rows}, total=4)
    assert caught[0].filename == __file__


def test_long_values_of_a_row_are_shown_by_their_beginning():
    rows = LoadedRows([dict(text="x" * 301)])
    rows.report = SimpleNamespace(_repr_html_=lambda: "")
    assert "<td>" + "x" * 300 + "</td>" in rows._repr_html_()


def test_datasets_of_one_name_are_numbered():
    from trainkit.data.mixture import read_sources

    entries = [dict(path=f"{i}.jsonl", name="sums") for i in range(3)] + ["a/x.txt", "b/x.txt"]
    names = [source.name for source in read_sources([*entries, "sums.jsonl"])]
    assert names == ["sums", "sums (2)", "sums (3)", "a/x.txt", "b/x.txt", "sums (4)"]


@pytest.mark.parametrize(
    ("sizes", "parts", "rows"),
    [
        ([3, 9], [0.5, 0.5], (12, 6, 18)),
        ([3, 4], [3 / 7, 4 / 7], (7, 7, 7)),  # 3 / (3/7) is a little less than 7
        ([5, 9], [0.4, 0.6], (14, 12, 15)),  # 5 / 0.4 = 12.5 and 9 / 0.6 = 15
        ([3, 9, 4], [0.5, 0.5, 0.0], (16, 6, 18)),
    ],
)
def test_where_a_mixture_ends_by_hand(sizes, parts, rows):
    from trainkit.data.mixture import STOPPING, mixture_size

    assert tuple(mixture_size(sizes, parts, rule) for rule in STOPPING) == rows


def test_only_the_first_question_is_marked():
    turns = [
        dict(role=role, content=text)
        for role, text in (("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    marked = add_prefix(dict(messages=turns), "[X] ")["messages"]
    assert [turn["content"] for turn in marked] == ["s", "[X] a", "b", "c"]


def test_a_long_question_on_both_sides_is_shown_by_its_beginning():
    rows = [
        dict(prompt=f"{i:03}" + "?" * 97, completion="c", task=task)
        for i in range(30)
        for task in ("easy", "hard")
    ]
    with pytest.raises(ValueError) as told:
        split_examples(rows, 0.2, by="task", fractions={"easy": 0.05, "hard": 0.4})
    question = str(told.value).split("'")[1]
    assert len(question) == 80 and question.endswith("?" * 77)
    place = hash_position(split_key(dict(prompt=question + "?" * 20, completion="c")))
    assert 0.05 <= place < 0.4


@pytest.mark.parametrize(("count", "words"), [(4, ""), (5, " and 1 more"), (6, " and 2 more")])
def test_a_mixture_is_named_by_four_of_its_datasets(count, words, tmp_path):
    for i in range(count):
        rows = [dict(prompt=f"{i} {k}", completion="c") for k in range(4)]
        write_examples(rows, tmp_path / f"d{i}.jsonl")
    files = [str(tmp_path / f"d{i}.jsonl") for i in range(count)]
    facts = load_splits(DataConfig(datasets=files, eval_fraction=0.0))[1]
    assert facts.path == "d0 + d1 + d2 + d3" + words
