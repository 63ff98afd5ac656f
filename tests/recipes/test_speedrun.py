"A speedrun: what an entry is, what its clock counts, what the ledger keeps."

import configparser
import json
import math
import sys

import numpy as np
import pytest
import yaml
from support.processes import ROOT

from trainkit.recipes.speedrun import (
    Attempt,
    SpeedrunResult,
    Track,
    add_to_ledger,
    entry_command,
    find_records,
    ledger_rows,
    p_below,
    read_ledger,
    run_attempt,
    run_timed,
)


def result(name, seconds, *bits, **more):
    attempts = tuple(Attempt(i, seconds, b, 1000) for i, b in enumerate(bits, 1))
    return SpeedrunResult(name, attempts, name, **more)


# Student's distribution in closed form: how likely more than t is, for n - 1 = 1, 2, 3
TAILS = {
    2: lambda t: 1 / 2 - math.atan(t) / math.pi,
    3: lambda t: 1 / 2 - t / (2 * math.sqrt(2 + t**2)),
    4: lambda t: (
        1 / 2 - (math.atan(t / math.sqrt(3)) + t / (math.sqrt(3) * (1 + t**2 / 3))) / math.pi
    ),
}


@pytest.mark.parametrize("n", TAILS)
def test_p_is_the_tail_of_students_distribution(n):
    values = np.random.default_rng(n).normal(2, 0.1, n)
    for target in (1.9, 2.0, 2.05, 2.3):
        t = (target - values.mean()) / (values.std(ddof=1) / math.sqrt(n))
        assert math.isclose(p_below(values, target), TAILS[n](t), rel_tol=1e-7, abs_tol=1e-12)


def test_equal_values_and_one_value():
    assert (p_below([2, 2], 2.1), p_below([2, 2], 2.0)) == (0, 1)
    with pytest.raises(ValueError, match="two seeds"):
        p_below([2.0], 2.1)


def test_time_of_children_counts(tmp_path):
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    assert run_timed([sys.executable, "-c", code], tmp_path, 30) >= 0.4


def test_an_entry_that_fails_or_leaves_nothing_is_named(tmp_path):
    rows = [{"text": f"row {i}"} for i in range(20)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    track = Track(str(tmp_path / "text.jsonl"), 0.2, 60, 1)
    entry = tmp_path / "entry.py"
    entry.write_text("raise SystemExit('no gradient')")
    with pytest.raises(RuntimeError, match="code 1(.|\n)*no gradient"):
        run_attempt(entry, 1, track)
    entry.write_text(
        "import sys; assert sys.argv[1:] == '--data train.jsonl --seed 1 --out model'.split()"
    )
    with pytest.raises(RuntimeError, match="wrote no model"):
        run_attempt(entry, 1, track, tmp_path / "work")
    kept = [json.loads(line)["text"] for line in open(tmp_path / "work/train.jsonl")]
    assert len(kept) < 20  # What is held out is nowhere in its folder
    text = "".join(p.read_text() for p in (tmp_path / "work").iterdir())
    assert not any(json.dumps(row["text"]) in text for row in rows if row["text"] not in kept)


def test_an_entry_is_a_config_or_a_program(tmp_path):
    (tmp_path / "entry.txt").write_text("")
    with pytest.raises(ValueError, match="a config for `trainkit train`"):
        entry_command(tmp_path / "entry.txt", 1)
    with pytest.raises(FileNotFoundError, match="no such entry"):
        entry_command(tmp_path / "none.yaml", 1)


def test_records_take_fewer_seconds_than_those_before():
    ledger = [
        result("slow", 500, 1.90, 1.91, 1.90),
        result("worse", 100, 2.10, 2.11, 2.10),
        result("fast", 300, 1.95, 1.96, 1.95),
        result("late", 400, 1.50, 1.51, 1.50),
    ]
    assert [r.name for r in find_records(ledger, 2.0)] == ["slow", "fast"]


def test_a_broken_ledger_names_its_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = add_to_ledger(path, result("a", 1, 2.0))
    assert read_ledger(path) == first
    path.write_text(path.read_text() + '{"name": 3}\n')
    with pytest.raises(ValueError, match="ledger.jsonl, line 2: no result of a speedrun"):
        read_ledger(path)
    path.write_text("")
    add_to_ledger(path, result("a", 1, 2.0, track="stdlib"))
    with pytest.raises(ValueError, match="another track"):
        add_to_ledger(path, result("b", 1, 2.0))


def test_the_record_is_the_profile_of_the_demo():
    "Every setting of the record but the number of its steps is that of `quick`."
    entry = yaml.safe_load((ROOT / "benchmarks/speedrun/record.yaml").read_text(encoding="utf-8"))
    profile = configparser.ConfigParser()
    profile.read(ROOT / "settings.ini", encoding="utf-8")
    sections = dict(tokenizer="Tokenizer", data="Data", model="Model", optim="Optim", train="Train")
    del entry["train"]["max_steps"]
    for group, kind in sections.items():
        for name, value in entry[group].items():
            assert yaml.safe_load(profile[f"quick.{kind}Config"][name]) == value, name


def test_a_program_gets_the_words_after_its_name(tmp_path):
    (tmp_path / "entry.py").write_text("")
    words, model = entry_command(tmp_path / "entry.py", 2, ["trick=ema"])
    assert words[-3:] == ["--out", "model", "trick=ema"] and model == "model"


def test_the_table_of_the_benchmarks_is_that_of_the_ledger():
    rows = ledger_rows(read_ledger(ROOT / "benchmarks" / "speedrun" / "ledger.jsonl"))
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for row in rows:
        assert f"| {' | '.join(row.values())} |" in text, row
