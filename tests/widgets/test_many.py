"Many pairs and many runs: what is read and written, counted instead of timed."

import errno
import os
from unittest.mock import patch

import pytest

from trainkit.data.dataset import load_examples
from trainkit.train import runs
from trainkit.train.runs import RunFolder
from trainkit.widgets import labeler
from trainkit.widgets.labeler import JournalPairs, PreferenceLabeler, PreferenceLabels
from trainkit.widgets.run_browser import RunBrowser

pytest.importorskip("ipywidgets")

PAIRS = [dict(prompt=f"Frage {i}?", answers=[f"ja {i}", f"nein {i}"]) for i in range(3000)]


def test_an_answer_writes_a_line_and_not_all_of_them(tmp_path):
    "A verdict adds a line to the journal and a row to the file; nothing is written whole."
    labels = PreferenceLabels(tmp_path / "many.jsonl", PAIRS)
    whole = []
    with patch.object(labeler, "write_atomic", lambda path, data: whole.append(path)):
        for n in range(200):
            before = labels.journal.stat().st_size, labels.end
            labels.judge("left")
            grown = labels.journal.stat().st_size - before[0], labels.path.stat().st_size
            assert grown[0] < 400 and grown[1] - before[1] < 400, n
    assert not whole and len(load_examples(labels.path)) == labels.count == 200


def test_pairs_are_read_when_they_are_shown(tmp_path):
    "Opening reads no pair, and the page reads the one that it shows."
    path = tmp_path / "many.jsonl"
    first = PreferenceLabels(path, PAIRS, seed=3)
    for _ in range(50):
        first.judge("right")
    read, get = [], JournalPairs.__getitem__

    def counted(self, i):
        read.append(i)
        return get(self, i)

    with patch.object(JournalPairs, "__getitem__", counted):
        again = PreferenceLabels(path)
        assert not read and (again.verdicts, again.count) == (first.verdicts, 50)
        page = PreferenceLabeler(path, key="many")
        assert {*read} == {page.labels.plan[50][0]} and len(read) < 8
        page.buttons["undo"].click()
        assert "49 of 3300 judged" in page.status.value
        page.close()
    assert again.now == first.now and [*again.pairs][7] == PAIRS[7] == again.pairs[7]
    assert PreferenceLabels(path, PAIRS).now.place == 49


def test_a_contradiction_takes_the_row_away_and_undo_brings_it_back(tmp_path):
    "The row becomes a blank line, or the end is cut; a file that was changed is written anew."
    cut = set()
    for seed in range(6):
        labels = PreferenceLabels(tmp_path / f"{seed}.jsonl", PAIRS[:6], seed, repeat=1.0)
        most = 0
        while labels.count >= most:
            most = labels.count
            before = labels.path.read_bytes() if most else b""
            labels.judge("left")  # Until a pair is shown again, its sides exchanged
        whole = labels.path.read_bytes()
        cut.add(len(whole) < len(before))
        assert whole.count(b"  \n") == (len(whole) == len(before))
        assert labels.count == most - 1 == len(load_examples(labels.path))
        assert PreferenceLabels(labels.path).rows() == labels.rows()
        labels.undo()
        assert labels.count == most and labels.path.read_bytes() == before
        labels.judge("left")
        assert labels.path.read_bytes() == whole
        for content in (b"", whole + b"{}\n"):
            labels.path.write_bytes(content)
            assert PreferenceLabels(labels.path).rows() == labels.rows()
            assert labels.path.read_bytes() == whole
    assert cut == {True, False}


def test_a_journal_of_an_earlier_version_is_continued(tmp_path):
    "Its first line has the pairs, and its verdicts do not say where their rows are."
    import json

    labels = PreferenceLabels(tmp_path / "new.jsonl", PAIRS[:5], repeat=0)
    for verdict in ("left", "tie", "right"):
        labels.judge(verdict)
    begin, *lines = labels.journal.read_text().splitlines()
    old = {k: v for k, v in json.loads(begin).items() if k not in ("count", "digest")}
    verdicts = [{k: v for k, v in json.loads(x).items() if k != "at"} for x in lines[5:]]
    text = "".join(json.dumps(x) + "\n" for x in [old | dict(pairs=PAIRS[:5]), *verdicts])
    (tmp_path / "old.journal.jsonl").write_text(text)
    again = PreferenceLabels(tmp_path / "old.jsonl", PAIRS[:5])
    assert again.rows() == labels.rows() and again.now == labels.now
    assert again.path.read_bytes() == labels.path.read_bytes()
    assert again.judge("left") == labels.judge("left")


def test_the_run_browser_reads_the_logs_of_the_chosen_runs_only(tmp_path):
    "The index has what a row and the list of curves need."
    for i in range(12):
        with RunFolder(tmp_path / f"run{i}", f"optim:\n  learning_rate: {i / 1000}\n") as folder:
            for step in (1, 2):
                folder.record("log", dict(step=step, loss=1.0, grad_norm=0.5, learning_rate=0.1))
            folder.record("end", dict(step=2, reason="finished"))
    logs, read = [], runs.read_metrics

    def counted(path, *options):
        logs.append(path.parent.name)
        return read(path, *options)

    with patch.object(runs, "read_metrics", counted):
        RunBrowser(tmp_path, key="many").close()
        assert len({*logs}) == 12, "the index is made"
        logs.clear()
        browser = RunBrowser(tmp_path, key="many")
        assert len(browser.listed) == 12 and browser.metric.options[0] == "loss"
        assert {"grad_norm", "learning_rate"} <= {*browser.metric.options}
        assert {*logs} <= {run.name for run in browser.chosen}, logs
        logs.clear()
        with patch("trainkit.widgets.run_browser.parse_yaml", side_effect=AssertionError):
            browser.words.value = "run7"  # A word needs no knobs
        assert [run.name for run in browser.listed] == ["run7"] and logs == ["run7"]
        browser.words.value = "learning_rate>8e-3"
        assert len(browser.listed) == 3 and len(logs) <= 3
        browser.close()


def test_a_run_whose_process_is_there_is_running(tmp_path):
    from trainkit.recipes.control import write_state

    with RunFolder(tmp_path / "one", "method: dpo\n") as folder:
        folder.record("log", dict(step=1, loss=0.5))
        write_state(tmp_path / "one", "running")
        browser = RunBrowser(tmp_path, key="running")
        assert "one · running" in browser.list.options[0][0]
        browser.words.value = "running"
        assert len(browser.listed) == 1
        write_state(tmp_path / "one", "running", pid=2**22 + 1)  # It is gone
        browser.read()
        assert not browser.listed
        browser.close()


@pytest.mark.parametrize("taken", [0, 7])
def test_a_verdict_of_which_a_full_disk_takes_a_part_does_not_count(tmp_path, taken):
    "Neither in memory nor on the disk, where the next one finds its place."
    labels = PreferenceLabels(tmp_path / "full.jsonl", PAIRS[:6], repeat=0)
    labels.judge("left")
    before = labels.journal.read_bytes()
    real, calls = os.write, []

    def full(file, data):
        calls.append(data)
        if len(calls) == 1 and taken:
            return real(file, data[:taken])
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        patch.object(labeler.os, "write", full),
        pytest.raises(OSError, match="full.journal.jsonl: the disk is full"),
    ):
        labels.judge("right")
    assert labels.journal.read_bytes() == before and len(labels.verdicts) == 1
    labels.judge("right")
    assert PreferenceLabels(labels.path).verdicts == labels.verdicts
