"Shards survive kills, need little memory, and are the same bytes for any number of workers."

import bz2
import gzip
import json
import lzma
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from trainkit.data import shards
from trainkit.data.dataset import load_examples
from trainkit.data.mixture import MixedRows
from trainkit.data.shards import (
    TokenRows,
    encode_texts,
    open_shards,
    read_pieces,
    tokenize_to_disk,
    verify_shards,
)
from trainkit.data.sources import LoadReport
from trainkit.parallel import in_order
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

EOS = "<|endoftext|>"
CODE = """
import os, resource, sys
from trainkit.data.shards import tokenize_to_disk
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
if __name__ == '__main__':
    source, tokenizer, folder, num_proc = sys.argv[1:]
    tok = BPETokenizer.load(tokenizer)
    options = dict(shard_chars=1_200_000, progress=False)
    shards = tokenize_to_disk(source, tok, folder, int(num_proc), **options)
    # VmHWM, as ru_maxrss starts with the parent's
    status = open('/proc/self/status')
    own = next(int(line.split()[1]) for line in status if line.startswith('VmHWM'))
    peak = [own // 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024]
    print(len(shards), *peak, 'torch' in sys.modules)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    "12 MB: half of it one file, half a file for each text, and a tokenizer."
    folder = tmp_path_factory.mktemp("corpus")
    texts = [row["text"] for row in load_examples("stdlib", max_chars=1_200_000)]
    (folder / "text" / "b").mkdir(parents=True)
    (folder / "text" / "a.txt").write_text("".join(texts) * 5, encoding="utf-8")
    for i, text in enumerate(texts * 5):
        (folder / "text" / "b" / f"{i:05}.txt").write_text(text, encoding="utf-8")
    tok = BPETokenizer.train(texts[:40], 2000, special_tokens=[EOS], progress=False)
    tok.save(folder / "tokenizer")
    return folder, tok, texts


def command(corpus, folder, num_proc=2):
    return [
        sys.executable,
        "-c",
        CODE,
        str(corpus / "text"),
        str(corpus / "tokenizer"),
        str(folder),
        str(num_proc),
    ]


def contents(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "shards"
    done = subprocess.run(
        command(corpus[0], folder, 1), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.split()


def test_ids_are_those_of_the_texts(corpus, whole):
    "Each file is a document, however long it is."
    _, tok, texts = corpus
    expected = encode_texts(["".join(texts) * 5, *texts * 5], tok)
    shards = open_shards(whole[0], verify=True)
    assert len(shards.maps) > 5
    np.testing.assert_array_equal(shards[:], expected)
    assert sum(r["documents"] for r in shards.index["shards"]) == 1 + 5 * len(texts)


def test_memory_is_bounded_and_torch_is_not_needed(whole):
    tokens, own, _, torch = whole[1]
    assert int(own) < 500, f"{own} MB"
    assert torch == "False" and int(tokens) > 10**6


@pytest.mark.parametrize("num_proc", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_number_of_workers_writes_the_same_bytes(corpus, whole, tmp_path, num_proc):
    done = subprocess.run(
        command(corpus[0], tmp_path / "s", num_proc), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "s") == contents(whole[0])


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("shards_before", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_killed_outright_it_goes_on_to_the_same_bytes(corpus, whole, tmp_path, shards_before):
    "SIGKILL: no cleaning up, no last words; workers leave with their parent."
    folder = tmp_path / "s"
    child = subprocess.Popen(
        command(corpus[0], folder), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(list(folder.glob("*.bin"))) >= shards_before or child.poll() is not None)
    child.kill()
    child.wait()
    assert (
        not json.loads((folder / "index.json").read_text())["complete"]
        if (folder / "index.json").exists()
        else True
    )
    with pytest.raises((ValueError, FileNotFoundError)):
        open_shards(folder)

    def gone():
        try:
            os.killpg(child.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(gone, 20)
    (folder / ".shard-00009.bin.rest").write_bytes(b"what a killed process leaves behind")
    times = {p: p.stat().st_mtime_ns for p in folder.glob("*.bin")}
    recorded = (
        {r["file"] for r in json.loads((folder / "index.json").read_text())["shards"]}
        if (folder / "index.json").exists()
        else set()
    )
    tokenize_to_disk(
        corpus[0] / "text", corpus[1], folder, 1, shard_chars=1_200_000, progress=False
    )
    assert {p.name for p, t in times.items() if p.stat().st_mtime_ns == t} >= recorded, (
        "finished shards are not made again"
    )
    assert contents(folder) == contents(whole[0]), "and nothing else lies there"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find the workers")
def test_a_killed_worker_is_said_and_nothing_is_lost(corpus, whole, tmp_path):
    folder = tmp_path / "s"
    child = subprocess.Popen(command(corpus[0], folder), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(folder.glob("*.bin"))) >= 2)
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    assert len(workers) == 2
    os.kill(int(workers[0]), signal.SIGKILL)
    errors = child.communicate(timeout=300)[1]
    assert child.returncode == 1 and "Finished shards are kept" in errors
    tokenize_to_disk(
        corpus[0] / "text", corpus[1], folder, 1, shard_chars=1_200_000, progress=False
    )
    assert contents(folder) == contents(whole[0]) and verify_shards(folder) == []


def test_a_text_that_has_changed_is_refused(corpus, whole, tmp_path):
    before = contents(whole[0])
    other = tmp_path / "other.txt"
    other.write_text("another text" * 1000)
    with pytest.raises(FileExistsError, match="another text"):
        tokenize_to_disk(other, corpus[1], whole[0], 1, shard_chars=1_200_000, progress=False)
    assert contents(whole[0]) == before


@pytest.mark.parametrize(
    "data, hint", [(b"", "no text"), (b"\0\1", "binary"), (b"a\xff", "not utf-8")]
)
def test_wrong_files_leave_nothing(corpus, tmp_path, data, hint):
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(ValueError, match=hint):
        tokenize_to_disk(tmp_path / "x.txt", corpus[1], tmp_path / "s", progress=False)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("at", [3, 40, 777])
def test_a_bad_byte_is_named_with_its_line_however_far_down_it_is(corpus, tmp_path, at):
    "The file is read in pieces, and the lines of all of them count."
    lines = [f"line {i} of a text" for i in range(1, 1001)]
    data = "\n".join(lines).encode().replace(f"line {at} of".encode(), b"line \xff of", 1)
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(ValueError, match=rf"line {at}: byte 0xff is not utf-8"):
        tokenize_to_disk(
            tmp_path / "x.txt", corpus[1], tmp_path / "s", 1, shard_chars=500, progress=False
        )


@pytest.mark.parametrize("source", ["rows", "file"])
def test_the_bar_counts_in_the_unit_that_it_names(corpus, tmp_path, monkeypatch, source):
    from trainkit.data import shards

    heard = []

    class Bar(shards.Progress):
        def __init__(self, total, what, unit, **more):
            heard.append([total, unit])
            super().__init__(total, what, unit, enabled=False)

        def update(self, done, **more):
            heard.append(done)

    monkeypatch.setattr(shards, "Progress", Bar)
    text = "a line of words\n" * (150_000 if source == "rows" else 4_000)  # 2.4 MB, 64 kB
    (tmp_path / "x.txt").write_text(text)
    tokenize_to_disk(
        [text] if source == "rows" else tmp_path / "x.txt", corpus[1], tmp_path / "s", 1
    )
    assert (heard[0], heard[-1]) == (([None, "MB"], 3) if source == "rows" else ([64, "kB"], 64))


def test_a_file_of_windows_in_two_bytes_a_character_is_named_as_such(tmp_path):
    "As PowerShell writes it; read as Latin-1 it would be refused again, for its zero bytes."
    (tmp_path / "a.txt").write_bytes("héllo\nworld".encode("utf-16"))
    with pytest.raises(ValueError, match="line 1: byte 0xff is not utf-8. Say encoding='utf-16'"):
        list(read_pieces(tmp_path))
    assert list(read_pieces(tmp_path, encoding="utf-16")) == [("héllo\nworld", True)]


@pytest.mark.parametrize("size", [9, 10, 11, 30, 1000])
def test_a_shard_ends_where_it_is_full(size, monkeypatch):
    "With blocks of at most 12 characters: each text and its end count, and no text is cut."
    monkeypatch.setattr(shards, "_BLOCK", 12)
    pieces = [("x" * (i % 4), i % 3 == 0) for i in range(60)]
    jobs = [*shards._shard_jobs(iter(pieces), size)]
    assert [pair for _, *job in jobs for pair in zip(*job, strict=True)] == pieces
    sizes: dict[int, list[int]] = {}
    for number, texts, _ in jobs:
        sizes.setdefault(number, []).append(sum(len(text) + 1 for text in texts))
    assert [*sizes] == list(range(len(sizes)))
    block = min(12, size)
    for number, blocks in sizes.items():
        assert all(block <= n < block + 4 for n in blocks[: None if number + 1 in sizes else -1])
        assert number + 1 not in sizes or sum(blocks[:-1]) < size <= sum(blocks)
    assert sum(sizes[len(sizes) - 1][:-1]) < size


def _half_a_result(part):
    "Another process that writes half of its result and is killed."
    if 0 in part:
        frame = sys._getframe()
        while "result_queue" not in frame.f_locals:
            frame = frame.f_back
        os.write(frame.f_locals["result_queue"]._writer.fileno(), struct.pack("!i", 1000) + b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return part


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
def test_a_worker_that_was_killed_while_it_wrote_is_noticed():
    "The others go on, so that the pool's thread would wait for the rest of the result for ever."
    with pytest.raises(BrokenProcessPool):
        list(in_order(_half_a_result, range(40), 2, 1))


def test_rows_that_are_no_texts_can_be_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one two"}\n{"text": "  "}\n{"text": "three"}\n{bad\n')
    tokenizer = BPETokenizer.train(["one two three"] * 9, 262, special_tokens=["<|endoftext|>"])
    with pytest.raises(ValueError, match="rows.jsonl, line 2: text is empty"):
        tokenize_to_disk(file, tokenizer, tmp_path / "a", progress=False)
    report = LoadReport(str(file))
    shards = tokenize_to_disk(file, tokenizer, tmp_path / "b", progress=False, report=report)
    assert report.skipped == 2 and "line 4" in report.bad[1]
    ends = [i for i in shards[: len(shards)] if i == tokenizer.eos_token_id]
    assert len(ends) == 2


@pytest.mark.parametrize(
    "names, split, read, notes",
    [
        (
            ["train/a.jsonl", "test/a.jsonl", ".ipynb_checkpoints/a.jsonl", "README.md"],
            None,
            ["train/a.jsonl"],
            ["text files next to the data are not read: README.md", "splits: train, test; read: "],
        ),
        (["train/a.jsonl", "test/a.jsonl"], "test", ["test/a.jsonl"], []),
        (
            ["corpus.jsonl", "test.jsonl", "val.jsonl"],
            None,
            ["corpus.jsonl"],
            ["splits: train, test, val; read: train", "files of no split are read as train: corp"],
        ),
        (["corpus.jsonl", "test.jsonl"], "test", ["test.jsonl"], []),
        (["a.txt", "b.txt"], None, ["a.txt", "b.txt"], []),
    ],
)
def test_shards_are_made_of_the_files_that_training_reads(tmp_path, names, split, read, notes):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = f"Text of {name}"
        row = json.dumps(dict(text=text)) + "\n" if name.endswith(".jsonl") else text
        (tmp_path / name).write_text(row)
    rows = load_examples(tmp_path, split=split)
    report = LoadReport("shards")
    pieces = read_pieces(tmp_path, split=split, report=report)
    assert [text for text, _ in pieces] == [row["text"] for row in rows]
    assert [row["text"] for row in rows] == [f"Text of {name}" for name in read]
    assert report.notes == rows.report.notes
    assert [a.startswith(b) for a, b in zip(report.notes, notes, strict=True)] == [True] * len(
        notes
    )


def test_a_file_has_no_split_to_make_shards_of(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="a.txt: a file has no splits"):
        list(read_pieces(tmp_path / "a.txt", split="test"))


@pytest.mark.parametrize("packed", ["gz", "bz2", "xz", "zst"])
def test_a_compressed_text_without_its_end_is_named(corpus, tmp_path, packed):
    import zstandard

    compress = dict(gz=gzip.compress, bz2=bz2.compress, xz=lzma.compress, zst=zstandard.compress)
    (tmp_path / f"x.txt.{packed}").write_bytes(
        compress[packed](b"some words of a text\n" * 99)[:-9]
    )
    with pytest.raises(ValueError, match=rf"x.txt.{packed}: not a whole .{packed} file"):
        tokenize_to_disk(tmp_path / f"x.txt.{packed}", corpus[1], tmp_path / "s", progress=False)


# --- rows, slices and units, without a tokenizer


def test_rows_of_a_line_of_ids():
    "Each begins with the last token of the one before, so that every token is predicted once."
    line = np.arange(100, 130)
    for length in (2, 3, 7, 29, 30, 31):
        for start, stop in ((0, 30), (0, 2), (5, 19), (28, 30), (3, 4 + length)):
            if stop > 30:
                continue
            rows = shards.TokenRows(line, length, start, stop)
            starts = range(start, stop - 1, length - 1)
            expected = [line[at : min(at + length, stop)].tolist() for at in starts]
            assert [row.tolist() for row in rows] == expected and len(rows) == len(expected)
            assert rows.lengths.tolist() == [*map(len, expected)]
            assert [row.tolist() for row in rows[-2:]] == expected[-2:]
            assert rows[-1].tolist() == expected[-1]
            for wrong in (len(rows), -len(rows) - 1):
                with pytest.raises(IndexError, match=f"of {len(rows)}"):
                    rows[wrong]
    for start, stop in ((0, 1), (-1, 5), (29, 30), (5, 6), (0, 31), (30, 32)):
        with pytest.raises(ValueError, match="at least 2 are needed to train on"):
            shards.TokenRows(line, 4, start, stop)
    with pytest.raises(ValueError, match="max_length = 1: a row needs at least 2 tokens"):
        shards.TokenRows(line, 1, 0, 30)


def write_small(folder, sizes, dtype="<u2"):
    ids = np.arange(sum(sizes))
    parts = np.split(ids, np.cumsum(sizes)[:-1])
    records = [shards.write_shard(folder, i, part, dtype) for i, part in enumerate(parts)]
    shards.write_index(folder, records[::-1], dtype)
    return ids, records


def test_slices_of_several_shards(tmp_path):
    ids, records = write_small(tmp_path, [3, 1, 4, 2])
    line = open_shards(tmp_path, verify=True)
    assert [record["tokens"] for record in records] == [3, 1, 4, 2] and len(line) == 10
    places = [None, *range(-11, 12)]
    for start in places:
        for stop in places:
            assert line[start:stop].tolist() == ids[start:stop].tolist()
    assert [line[i] for i in range(-10, 10)] == [*ids, *ids]
    for wrong in (10, -11):
        with pytest.raises(IndexError, match="of 10"):
            line[wrong]
    with pytest.raises(ValueError, match="this one has 2"):
        line[::2]
    rows = line.rows(4, 1, 8)
    assert [row.tolist() for row in rows] == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert [row.tolist() for row in line.rows(9)] == [[*range(9)], [8, 9]]
    assert "10 tokens of 2 bytes in 4 files" in repr(line)


def test_damage_is_found_by_size_or_by_checksum(tmp_path):
    _, (first, second) = write_small(tmp_path, [3, 2], "<u4")
    assert verify_shards(tmp_path) == []
    data = (tmp_path / second["file"]).read_bytes()
    (tmp_path / second["file"]).write_bytes(data[:-1] + b"\1")
    wrong = f"{second['file']} is damaged: wrong checksum"
    assert shards.shard_damage(tmp_path, second, 4) == wrong
    assert shards.shard_damage(tmp_path, second, 4, deep=False) == ""
    assert verify_shards(tmp_path) == [wrong]
    (tmp_path / second["file"]).write_bytes(data + b"\1")
    wrong = f"{second['file']} has 9 bytes instead of 8"
    assert shards.shard_damage(tmp_path, second, 4, deep=False) == wrong
    (tmp_path / first["file"]).unlink()
    assert verify_shards(tmp_path) == [f"{first['file']} is missing", wrong]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_text_that_is_read_in_pieces_is_the_text(tmp_path, size):
    "Whatever falls between two of them: a character, a mark at the start, a bad byte's line."
    text = "\ufeffab\né日🏴 \ufeffcd\n" * 3
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert "".join(shards._read_chunks(tmp_path / "a.txt", "utf-8", size)) == text[1:]
    pieces = [*read_pieces(tmp_path / "a.txt", size=size)]
    assert "".join(piece for piece, _ in pieces) == text[1:]
    assert [end for _, end in pieces] == [False] * (len(pieces) - 1) + [True]
    for data, line in ((b"\xff", 1), (b"a\n\xff", 2), (b"\n\n\nb\xff\n", 4)):
        (tmp_path / "b.txt").write_bytes(data)
        with pytest.raises(ValueError, match=f"line {line}: byte 0xff is not utf-8.*latin-1"):
            [*shards._read_chunks(tmp_path / "b.txt", "utf-8", size)]


@pytest.mark.parametrize(
    "size, units",
    [
        (1, (1, 1000, "kB")),
        (1000, (1, 1000, "kB")),
        (1001, (2, 1000, "kB")),
        (9_999_999, (10_000, 1000, "kB")),
        (10_000_000, (10, 10**6, "MB")),
        (10_000_001, (11, 10**6, "MB")),
    ],
)
def test_the_unit_of_the_bar(tmp_path, size, units):
    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(size)
    assert shards._bar_units(tmp_path / "a.txt", None) == units
    (tmp_path / "a.txt.gz").write_bytes(b"")
    assert shards._bar_units(tmp_path / "a.txt.gz", None) == (None, 10**6, "MB")
    assert shards._bar_units(["a"], None) == (None, 10**6, "MB")


@pytest.mark.parametrize("largest, dtype", [(65_536, "<u2"), (65_537, "<u4")])
def test_ids_take_two_bytes_where_they_fit(largest, dtype):
    class Wide:
        eos_token_id = 7

        def __len__(self):
            return largest

        def __call__(self, texts, **options):
            assert options == dict(add_special_tokens=False, split_special_tokens=True)
            return dict(input_ids=[[*text.encode()] for text in texts])

    ids = encode_texts(["ab", "", "c"], Wide())
    assert ids.tolist() == [97, 98, 7, 7, 99, 7] and ids.dtype == dtype
    ids = encode_texts(["ab", "", "c", "d"], Wide(), [False, True, False, True])
    assert ids.tolist() == [97, 98, 7, 99, 100, 7]


def test_shards_of_other_settings_are_kept(corpus, tmp_path):
    tokenize = tokenize_to_disk(["one two " * 9] * 3, corpus[1], tmp_path, 1, 100, progress=False)
    with pytest.raises(FileExistsError, match=r"another shard_chars \(100, now 101\)"):
        tokenize_to_disk(["one two " * 9] * 3, corpus[1], tmp_path, 1, 101, progress=False)
    assert [r["documents"] for r in tokenize.index["shards"]] == [2, 1]
    assert [r["text_bytes"] for r in tokenize.index["shards"]] == [144, 72]
    for wrong in (dict(num_proc=0), dict(shard_chars=0)):
        with pytest.raises(ValueError, match="= 0: must be at least 1"):
            tokenize_to_disk(["a"], corpus[1], tmp_path / "b", **wrong)


def test_pieces_of_a_long_file_are_short(tmp_path):
    "Of what was read only its end waits for more: no piece is much longer than asked for."
    text = "some words of a line\n" * 4000
    (tmp_path / "a.txt").write_text(text)
    pieces = [piece for piece, _ in read_pieces(tmp_path / "a.txt", size=10_000)]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 10_000 + 4096 and len(pieces) >= 8
    assert len(pieces[0]) >= 10_000 - 4096


@pytest.mark.parametrize(
    "rule, total", [("total", 13), ("first_exhausted", 6), ("all_exhausted", 20)]
)
def test_rows_mixed_without_reading_them(rule, total):
    "Three rows and ten, half and half: none is seen twice more often than another of its dataset."
    rows = MixedRows(dict(few="abc", many="0123456789"), [1, 1], stopping_strategy=rule, seed=4)
    counts = Counter(rows)
    assert len(rows) == total and rows[-1] == rows[len(rows) - 1] and rows[:2] == [rows[0], rows[1]]
    few = [counts[letter] for letter in "abc"]
    many = [counts[digit] for digit in "0123456789"]
    assert abs(sum(few) - total / 2) <= 0.5 and max(few) - min(few) <= 1
    assert max(many) - min(many) <= 1
    assert rows.report.parts["few"] == dict(
        rows=3, used=sum(few), share=sum(few) / total, epochs=sum(few) / 3
    )
    again = MixedRows(dict(few="abc", many="0123456789"), [1, 1], stopping_strategy=rule, seed=4)
    assert [*again] == [*rows]
    assert [*MixedRows(dict(one="abcdefgh"), seed=1)] != [*MixedRows(dict(one="abcdefgh"), seed=2)]


def test_mixed_rows_know_their_lengths():
    line = np.arange(100, dtype=np.uint16)
    parts = dict(a=TokenRows(line, 10, 0, 41), b=TokenRows(line, 10, 50, 75))
    rows = MixedRows(parts, temperature=2.0)
    assert rows.lengths.tolist() == [len(row) for row in rows]
    assert {*rows.lengths.tolist()} == {5, 7, 10}  # The last rows of both are shorter


def test_the_index_of_shards_is_written_for_people(tmp_path):
    "One space deep, and the shards in their order."
    file = shards.write_index(tmp_path, [dict(number=1), dict(number=0)], fingerprint="x")
    index = dict(
        dtype="<u2", fingerprint="x", complete=True, shards=[dict(number=0), dict(number=1)]
    )
    assert file.read_text() == json.dumps(index, indent=1)
