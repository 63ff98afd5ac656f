"What a limit on lengths does to rows, and how much a file may become."

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.snapshots import compare

from trainkit.data import readers, tokenization
from trainkit.data.shards import TokenRows
from trainkit.data.tokenization import LengthReport
from trainkit.interop.hf import MAX_LAYERS, read_model_settings
from trainkit.train.step import count_rows


def reports():
    lengths = np.array([3, 5, 8, 8, 9, 13, 21, 34, 55, 300])
    answers = np.array([2, 0, 4, 4, 8, 6, 20, 1, 50, 200])
    for limit, kept, left in [
        (None, lengths, answers),
        (9, np.minimum(lengths, 9), np.minimum(answers, [2, 0, 4, 4, 8, 3, 8, 0, 8, 8])),
        (9, np.where(lengths > 9, 0, lengths), np.where(lengths > 9, 0, answers)),
    ]:
        for short, untrained in ((0, 0), (2, 3)):
            yield LengthReport(limit, "keep_end", lengths, kept, answers, left, short, untrained)
    one = np.array([4])
    yield LengthReport(4, "drop", one, one, one - 4, one - 4)


def test_a_report_on_lengths_in_words(monkeypatch):
    monkeypatch.setattr(tokenization, "draw_svg", lambda chart, counts, **words: counts | words)
    lines = []
    for report in reports():
        limits = [report.limit(share) for share in (0, 0.05, 0.1, 0.11, 0.5, 0.999, 1)]
        lines.append(f"{report}\n{limits}\n{report.histogram()}\n{report.histogram(3)}\n\n")
    compare("".join(lines), "lengths.txt")


@pytest.mark.parametrize(
    "sizes, most, rows",
    [
        ([], 100, 1),
        ([1], 100, 64),
        ([50], 100, 2),
        ([51], 100, 1),
        ([200], 200, 1),
        ([2, 4], 99, 24),
    ],
)
def test_a_batch_of_a_table_has_as_many_rows_as_are_safe(sizes, most, rows, tmp_path, monkeypatch):
    "Each may hold all bytes of its group."
    path, asked = tmp_path / "a.parquet", []
    path.write_bytes(b"x")
    monkeypatch.setenv(readers.UNPACKED_VARIABLE, str(most))
    footer = SimpleNamespace(
        num_row_groups=len(sizes),
        row_group=lambda i: SimpleNamespace(total_byte_size=-sizes[i] if i else sizes[i]),
    )
    batch = SimpleNamespace(nbytes=most, to_pylist=lambda: [{"a": "b"}, {"c": [1, "de"]}])
    file = SimpleNamespace(
        metadata=footer, iter_batches=lambda **knobs: asked.append(knobs) or [batch]
    )
    budget = readers._weight({"a": "b"}) + readers._weight({"c": [1, "de"]})
    if budget <= most:
        assert len(list(readers._table_rows(path, file))) == 2
        assert asked == [dict(batch_size=rows, use_threads=False)]


def test_the_bytes_that_a_file_may_become(tmp_path, monkeypatch):
    path = tmp_path / "a.gz"
    path.write_bytes(b"x" * 3)
    assert readers._Budget(path).most == 2**28
    monkeypatch.setattr(readers, "UNPACKED", 1000)
    assert readers._Budget(path).most == 1000 and readers._Budget(path, 400).most == 1200
    monkeypatch.setenv(readers.UNPACKED_VARIABLE, "5")
    budget = readers._Budget(path, 400)
    budget.spend(2), budget.spend(3)
    with pytest.raises(ValueError, match="3 bytes have become more than 5 of data"):
        budget.spend(1)
    monkeypatch.setenv(readers.UNPACKED_VARIABLE, "many")
    with pytest.raises(ValueError, match="= 'many': must be a number of bytes"):
        readers._Budget(path)
    weights = [readers._weight(x) for x in ("ab", b"abc", 1, None, [1, "a"], {"a": [], "b": (2,)})]
    assert weights == [2, 3, 8, 8, 10, 11]


def test_a_last_batch_that_is_not_full():
    "It is left out, unless it is the only one that a limit on tokens leaves."
    from trainkit.data.dataloader import cut_batches

    def sizes(rows, size, **limits):
        lengths = np.full(rows, 4) if "max_tokens" in limits else None
        return [len(part) for part in cut_batches(np.arange(rows), size, lengths, **limits)]

    assert sizes(7, 3) == [3, 3, 1] and sizes(7, 3, drop_last=True) == [3, 3]
    assert sizes(6, 3, drop_last=True) == [3, 3] and sizes(2, 3, drop_last=True) == []
    assert sizes(0, 3, drop_last=True) == []
    assert sizes(7, 9, max_tokens=12) == [3, 3, 1] == sizes(7, 9, max_tokens=15)
    assert sizes(7, 9, max_tokens=12, drop_last=True) == [3, 3]
    assert sizes(4, 9, max_tokens=12, drop_last=True) == [3]
    assert sizes(3, 9, max_tokens=12, drop_last=True) == [3]
    assert sizes(7, 2, max_tokens=12) == [2, 2, 2, 1]


def test_padding_counts_unless_there_is_none():
    from trainkit.data.dataloader import cut_batches

    lengths = np.array([2, 5, 1, 1, 1])
    order = np.arange(5)
    assert [len(p) for p in cut_batches(order, 9, lengths, 10)] == [2, 3]
    assert [len(p) for p in cut_batches(order, 9, lengths, 10, padding_free=True)] == [5]
    assert [len(p) for p in cut_batches(order, 9, lengths, 9, padding_free=True)] == [4, 1]
    assert [len(p) for p in cut_batches(order, 9, lengths, 9)] == [1, 1, 3]


def test_where_a_json_file_is_broken(tmp_path, monkeypatch):
    "Line and column of the first sign that does not belong there."
    monkeypatch.chdir(tmp_path)
    path, lines = Path("a.json"), []
    for text in (
        "",
        "[",
        "[1",
        '[{"a": 1},\n {"a": }]',
        '[{"a": 1},\n\n  {"b" 1}]',
        '[{"a": 1}\n {"a": 2}]',
        '[{"a": 1},]',
        '[{"a": 1}] x',
        '{"rows": [{"a": 1}, {"a": nope}]}',
        '{"rows": [{"a": 1}]\n,}',
        '{"a": "x\ny"}',
        '[{"a": 1e999999}, {"a": 01}]',
        "[" * 5 + "1",
        '"text"',
        "3",
        '[{"a": 1}, 3]',
    ):
        path.write_text(text)
        try:
            found = [
                row[-1] if isinstance(row, tuple) else row
                for row in readers.READERS[".json"](path, "utf-8", None)
            ]
            lines.append(f"{text!r}: {found}\n")
        except ValueError as error:
            lines.append(f"{text!r}: {error}\n")
    compare("".join(lines), "broken_json.txt")


@pytest.mark.parametrize(
    "start, stop, fits",
    [(0, 10, True), (8, 10, True), (9, 10, False), (0, 11, False), (-1, 5, False), (0, 2, True)],
)
def test_rows_of_a_line_need_two_tokens_of_it(start, stop, fits):
    with nullcontext() if fits else pytest.raises(ValueError, match=f"to {stop} of 10 tokens"):
        rows = TokenRows(np.arange(10), 4, start, stop)
        assert sum(rows.lengths) - len(rows) + 1 == stop - start


@pytest.mark.parametrize(
    "sizes, named",
    [
        (dict(hidden_size=2**31, num_hidden_layers=MAX_LAYERS), ""),
        (dict(hidden_size=2**31 + 1), "hidden_size = 2,147,483,649: no model has more than 2,147"),
        (dict(n_layer=MAX_LAYERS + 1), f"n_layer = {MAX_LAYERS + 1:,}: no model has more than"),
        (dict(hidden_size="many"), ""),
    ],
)
def test_a_config_with_impossible_sizes_is_refused(sizes, named, tmp_path):
    "They would take minutes to fail."
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        assert read_model_settings(tmp_path) == sizes


def test_the_rows_of_a_batch():
    batch = dict(scale=torch.ones(3), input_ids=torch.ones(4, 7), more=torch.ones(5, 2))
    assert count_rows(batch) == 4 and count_rows(dict(scale=torch.ones(3), name="x")) == 1


def test_a_small_compressed_file_may_become_a_quarter_of_a_gigabyte(tmp_path, monkeypatch):
    monkeypatch.delenv(readers.UNPACKED_VARIABLE, raising=False)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"x" * 10)
    assert readers._Budget(path).most == 2**28
    with path.open("wb") as file:
        file.truncate(2**21)
    assert readers._Budget(path).most == 200 * 2**21
    assert readers._Budget(path, free=300).most == 300 * 2**21


@pytest.mark.parametrize(("ids", "twice"), [([1, 1, 5, 2], True), ([1, 5, 1, 2], False)])
def test_two_bos_tokens_in_a_row(ids, twice):
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2)
    problems = tokenization.mask_problems(np.array(ids), np.array(ids), tokenizer)
    assert ("double BOS" in problems) == twice
