"Windows of a long text, and what the sandbox's filter of system calls allows."

import contextlib
import gzip
import lzma
import math
import struct
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.snapshots import compare

from trainkit import ModelConfig, Transformer
from trainkit.eval import scoring, stats
from trainkit.eval.code_eval import _find_place, _seccomp_filter
from trainkit.eval.scoring import windows
from trainkit.eval.stats import sign_flip_p


@given(st.integers(0, 60), st.integers(2, 12), st.integers(1, 11))
def test_each_token_but_the_first_is_counted_once(length, size, stride):
    "After the first window each begins as early as it can, and counts as many as it may."
    stride = min(stride, size - 1)
    counted = []
    for number, (start, end, first) in enumerate(windows(length, size, stride)):
        assert 0 <= start < first < end <= length and end - start <= size
        assert start == max(0, end - size) and (
            end == length or number == 0 or end - first == stride
        )
        counted += range(first, end)
    assert counted == list(range(1, length))


def test_windows_by_hand():
    assert windows(5, 5, 2) == [(0, 5, 1)]
    assert windows(9, 5, 2) == [(0, 5, 1), (2, 7, 5), (4, 9, 7)]
    assert windows(6, 5, 4) == [(0, 5, 1), (1, 6, 5)] and windows(1, 5, 2) == []
    for stride in (0, 5):
        with pytest.raises(
            ValueError, match=f"stride = {stride}: must be at least 1 and less than 5"
        ):
            windows(9, 5, stride)


ARGUMENTS = [(0, 0), (1, 1), (1, 17), (1, 2), (2, 1), (2, 2), (0x10000, 0), (0, 8), (0, 9)]
ARGUMENTS += [(0, n) for n in (10, 15, 0x5412, 0x541C, 0x8901, 0x8902)]
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(code, architecture, number, first=0, second=0):
    "What the kernel's interpreter of the filter would answer."
    memory = {0: number, 4: architecture, 16: first, 24: second}
    steps, at, value = list(struct.iter_unpack("HBBI", code)), 0, 0
    while True:
        kind, yes, no, operand = steps[at]
        at += 1
        if kind == 0x20:
            value = memory[operand]
        elif kind == 0x54:
            value &= operand
        elif kind == 0x06:
            return {0x7FFF0000: "allow", 0x50001: "refuse", 0x50026: "unknown"}.get(operand, "kill")
        else:
            test = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}[
                kind
            ]
            at += yes if test else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_the_filter_of_system_calls_allows(machine):
    code, own = _seccomp_filter(machine), ARCHITECTURES[machine]
    other = next(number for name, number in ARCHITECTURES.items() if name != machine)
    assert verdict(code, other, 0) == "kill"
    lines = []
    for number in range(470):
        answers = [verdict(code, own, number, *arguments) for arguments in ARGUMENTS]
        if {*answers} != {"allow"}:
            same = answers[0] if len({*answers}) == 1 else " ".join(word[0] for word in answers)
            lines.append(f"{number}: {same}\n")
    compare("".join(lines), f"calls_{machine}.txt")


def test_other_machines_have_no_filter():
    assert _seccomp_filter("riscv64") == b""


def test_what_a_program_may_open():
    "It reads libraries and devices, and its folder is the only one that it changes."
    with contextlib.ExitStack() as stack:
        place = _find_place("process", stack)
        *others, (folder, rights) = place.paths
        assert folder == place.folder == place.cwd
        read, write, list_folder, remove, make, truncate, control = 4, 2, 8, 32, 256, 2**14, 2**15
        assert rights == read | write | list_folder | remove | make | truncate
        assert {rights for _, rights in others} == {read | list_folder, read | write | control}
        devices = [path for path, rights in others if rights & write]
        assert devices and all(path.startswith("/dev/") for path in devices)


@pytest.mark.parametrize(
    "differences, p",
    [
        ([], 1.0),
        ([0.0, 0.0], 1.0),
        ([1.0], 1.0),
        ([3.0, 1.0, 1.0], 2 / 8),
        ([1.0, -1.0, 1.0], 1.0),
        ([3.0, -1.0, 1.0], 6 / 8),
        ([0.1, 0.2, 0.0, 0.3], 2 / 8),
        ([0.1, 0.1, 0.1, -0.3], 1.0),  # Not quite 0 in binary numbers
        ([-1.0] * 14, 2 / 2**14),
        ([1.0] * 30, 1 / 501),
    ],
)
def test_how_often_other_signs_make_as_large_a_sum(differences, p):
    "Counted by hand; from 15 differences on, no draw of 500 is as large."
    assert sign_flip_p(np.array(differences), 500) == p


def test_many_signs_are_drawn_like_all_of_them():
    differences = np.arange(-4.0, 11.0)
    every = 1 - 2 * (np.arange(2**14)[:, None] >> np.arange(14) & 1)
    exact = (abs(every @ differences[differences != 0]) >= 45 - 1e-9).mean()
    assert sign_flip_p(differences, 1000) == exact
    more = np.append(differences, 0.5)
    sums = np.append(
        every @ differences[differences != 0] + 0.5, every @ differences[differences != 0] - 0.5
    )
    assert abs(sign_flip_p(more, 20_000) - (abs(sums) >= 45.5 - 1e-9).mean()) < 0.01


def test_a_batch_takes_as_many_tokens_as_there_is_room_for(monkeypatch):
    model = Transformer(ModelConfig(vocab_size=13, d_model=32, n_heads=2, n_layers=1, d_ff=64))
    sizes = []
    plain = scoring._score_batch

    def count(model, parts, pieces, *rest):
        sizes.append(len(pieces))
        return plain(model, parts, pieces, *rest)

    monkeypatch.setattr(scoring, "_score_batch", count)
    monkeypatch.setattr(scoring, "TOKENS", (8, 8))
    scoring.score_pieces(model, [([1, 2, 3, 4], 1)] * 5)
    assert sizes == [2, 2, 1]


# --- intervals and tests by plain arithmetic


@pytest.mark.parametrize("level, z", [(0.5, 0.6744898), (0.9, 1.6448536), (0.95, 1.9599640)])
def test_the_ends_of_a_share_are_z_standard_errors_away(level, z):
    "Of their own standard error, as Wilson's interval is defined."
    for n in (1, 2, 10, 97):
        for successes in {0, 1, n // 2, n - 1, n}:
            ours = stats.proportion(successes, n, level)
            for end in (ours.low, ours.high):
                away = z * math.sqrt(end * (1 - end) / n)
                assert away == pytest.approx(abs(successes / n - end), rel=1e-6) or end in (0, 1)
            assert ours.low <= successes / n <= ours.high
            assert (ours.value, ours.n, ours.level) == (successes / n, n, level)
        assert (stats.proportion(0, n).low, stats.proportion(n, n).high) == (0, 1)
    for wrong in ((-1, 3), (4, 3), (0, 0)):
        with pytest.raises(ValueError, match="successes out of|nothing to take a share of"):
            stats.proportion(*wrong)
    for wrong in (0, 1, -0.1, 1.1):
        with pytest.raises(ValueError, match="it is a share such as 0.95"):
            stats.proportion(1, 2, wrong)
    assert (
        stats.win_rate([1, 0.5, 0, 0.5]) == stats.proportion(2, 4)
        and stats.proportion(0.5, 1).value == 0.5
    )
    with pytest.raises(ValueError, match="outcome 1 is 0.25"):
        stats.win_rate([1, 0.25])


@pytest.mark.parametrize("n", [1, 2, 5, 14, 15, 40])
def test_flipped_signs_are_counted(n):
    "All of them for up to 14 differences; of a sample the first is what was seen."
    draw = np.random.default_rng(n)
    d = np.round(draw.normal(0.3, 1, n), 1)
    d[d == 0] = 0.7
    found = stats.sign_flip_p(np.concatenate([d, np.zeros(3)]), resamples=4000)
    if n <= 14:
        signs = np.array([*product((-1, 1), repeat=n)])
        sums = np.abs(signs @ d)
        assert found == (sums >= abs(d.sum()) - 1e-9).mean()
    else:
        sums = np.abs((draw.integers(0, 2, (20_000, n)) * 2 - 1) @ d)
        assert found == pytest.approx((sums >= abs(d.sum()) - 1e-9).mean(), abs=0.03)
    assert stats.sign_flip_p(np.ones(n)) == (
        2 / 2**n if n <= 14 else pytest.approx(2 / 2**n, abs=4e-4)
    )
    assert stats.sign_flip_p(np.ones(40), resamples=9) == 0.1
    assert stats.sign_flip_p(np.zeros(n)) == 1.0


def test_draws_with_repetition_come_in_blocks():
    shapes = [rows.shape for rows in stats._resamples(2**19, 5, 0)]
    assert shapes == [(2, 2**19), (2, 2**19), (1, 2**19)]
    assert [rows.shape for rows in stats._resamples(2**21, 1, 0)] == [(1, 2**21)]
    (rows,) = stats._resamples(3, 1000, 0)
    assert rows.shape == (1000, 3) and np.bincount(rows.flat).min() > 900
    values = np.arange(10.0)
    scores = np.concatenate([values[rows].mean(1) for rows in stats._resamples(10, 500, 7)])
    found = stats.bootstrap(values, level=0.8, resamples=500, seed=7)
    assert (found.low, found.high) == pytest.approx((*np.quantile(scores, [0.1, 0.9]),))
    assert (found.value, found.n, found.level) == (4.5, 10, 0.8)
    alone = stats.bootstrap([2.0])
    assert math.isnan(alone.low) and math.isnan(alone.high) and str(alone) == "2 (n = 1)"
    with pytest.raises(ValueError, match="example 1 has the score inf"):
        stats.bootstrap([0, math.inf])


@pytest.mark.parametrize("higher", [True, False])
def test_which_of_two_models_is_better(higher):
    a, b = np.zeros(8), np.array([1.0] * 7 + [-0.1])
    found = stats.compare(a, b, ("old", "new"), higher)
    assert found.better == ("b" if higher else "a") and found.p_value == 4 / 256
    assert str(found).startswith(f"{'new' if higher else 'old'} is better: new − old = +0.863 (")
    assert stats.compare(b, a, higher_is_better=higher).better == ("a" if higher else "b")
    few = stats.compare(a[:4], b[:4])  # One of sixteen, in two directions: 0.125
    assert (few.better, few.p_value) == ("", 0.125)
    assert stats.compare(a[:4], b[:4], level=0.87).better == "b"
    assert str(few).startswith("no difference seen with n = 4: b − a = +1 (")


# --- scores of texts, a token at a time


class Letters:
    "A tokenizer of bytes below 40."

    def encode(self, text, *more, **options):
        return [byte % 40 for byte in text.encode()]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size, stride", [(4, 1), (4, 3), (7, None), (16, None)])
def test_texts_are_scored_as_one_token_after_the_other(size, stride, whole, monkeypatch):
    "In small batches of logits and tokens; with its parts, and as a model without any."
    monkeypatch.setattr(scoring, "TOKENS", (9, 1000))
    monkeypatch.setattr(scoring, "LOGITS", (80, 240))
    score_batch = scoring._score_batch

    def in_bounds(model, parts, pieces, room, packed):
        sizes = [len(ids) for ids, _ in pieces]
        assert room == 2 and packed == (not whole)
        used = sum(sizes) if packed else max(sizes) * len(sizes)
        assert len(sizes) == 1 or used <= (6 if whole else 9)  # Of whole logits 240 are 6 tokens
        assert packed or min(sizes) >= 0.8 * max(sizes)
        batches.append(len(sizes))
        return score_batch(model, parts, pieces, room, packed)

    batches = []
    monkeypatch.setattr(scoring, "_score_batch", in_bounds)
    torch.manual_seed(0)
    shape = dict(vocab_size=40, d_model=16, n_heads=2, n_layers=1, d_ff=24, max_seq_len=16)
    model = Transformer(ModelConfig(**shape)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    if whole:
        monkeypatch.setattr(scoring, "split_head", lambda model: None)
    texts = ["a", "ab", "héllo", "abc abc abc abc", "x" * 16, "the end of this text", "bc"]
    step = stride or size // 2
    found = [*scoring.score_texts(model, Letters(), texts, size, stride)]
    for text, score in zip(texts, found, strict=True):
        ids = Letters().encode(text)
        nats, hits = 0.0, 0
        for at in range(1, len(ids)):
            # The window that counts this token, and what it reads before it
            end = next(end for end in range(size, 999, step) if at < end)
            start = max(0, min(end, len(ids)) - size)
            with torch.no_grad():
                logits = model(torch.tensor([ids[start:at]])).logits[0, -1]
            nats -= float(logits.log_softmax(-1)[ids[at]])
            hits += int(logits.argmax()) == ids[at]
        assert score.nats == pytest.approx(nats, abs=1e-3) and score.hits == hits
        assert (score.tokens, score.n_bytes) == (len(ids) - 1, len(text.encode()))
    assert max(batches) > 1


def test_numbers_of_a_score_by_hand():
    score = scoring.TextScore(6 * math.log(2), 3, 4, 2) + scoring.TextScore(0.0, 1, 8, 0)
    assert score.loss == pytest.approx(1.5 * math.log(2))
    assert score.perplexity == pytest.approx(2**1.5) and score.bits_per_byte == pytest.approx(0.5)
    assert score.token_accuracy == 0.5
    empty = scoring.TextScore(0.0, 0, 0)
    assert (empty.loss, empty.bits_per_byte, empty.token_accuracy) == (0, 0, 0)
    one = scoring.TextScore(math.log(2), 1, 1, 1)
    assert (one.loss, one.token_accuracy) == (math.log(2), 1) and one.bits_per_byte == 1
    assert scoring.bits_per_byte(math.log(2), 5, 1) == 5
    with pytest.raises(ValueError, match="n_bytes = 0: there is no text to divide by"):
        scoring.bits_per_byte(1.0, 1, 0)
    assert scoring.perplexity(699.9) < math.inf == scoring.perplexity(700)
    bits = scoring.unigram_bits(np.array([0, 0, 1]), np.array([0, 1, 2, 0]), 5)
    assert bits == pytest.approx(-2 * math.log2(3 / 8) - math.log2(2 / 8) - math.log2(1 / 8))
    text, more = "abcd " * 50, "abcd " * 20
    ids = np.zeros(3, int)
    found = scoring.baselines([text], [more, "x"], ids, ids, 4)
    test = f"{more}\nx".encode()
    size = {name: round(value * len(test)) for name, value in found.items()}
    assert size["gzip"] == 8 * len(gzip.compress(test, 9))
    assert size["xz"] == 8 * len(lzma.compress(test, preset=6))
    after = lzma.compress(text.encode() + test, preset=6), lzma.compress(text.encode(), preset=6)
    assert size["xz after the training text"] == 8 * (len(after[0]) - len(after[1]))
    assert found["token frequencies"] * len(test) == pytest.approx(-3 * math.log2(4 / 7))


def test_a_tie_of_answers_counts_as_a_guess():
    for values, answer, share, first in (
        ([-1.0, -2.0, -3.0], 0, 1, 0),
        ([-1.0, -2.0, -3.0], 1, 0, 0),
        ([-2.0, -1.0, -1.0], 1, 1 / 2, 1),
        ([-2.0, -1.0, -1.000001, -1.0], 3, 1 / 3, 1),
        ([-1.0, -1.001], 1, 0, 0),
        ([0.0, 2e-5], 0, 0, 1),
        ([0.0, 5e-6], 0, 1 / 2, 0),
    ):
        assert scoring.best_share(values, answer) == (share, first)


@pytest.mark.parametrize(
    "choices, answer, right",
    [
        (["one", "two", "three"], 2, 2),
        (["one", "two", "three"], "b", 1),
        (["one", "two", "three"], " two ", 1),
        (["one", "two", "three"], "0", 0),
        (["2", "1", "0"], "0", 2),  # A text goes before a number
        (["one", "two"], "C", None),
        (["one", "two"], 2, None),
        (["one", "two"], -1, None),
        (["one", "two"], True, None),
        (["one", "two"], "", None),
        (dict(text=["one", "two"], label=["B", "A"]), "A", 1),
        ('["one", "two"]', "B", 1),
    ],
)
def test_which_choice_is_meant(choices, answer, right):
    row = dict(question="Which?", choices=choices, answer=answer)
    if right is None:
        with pytest.raises(ValueError, match=r"none of the 2 choices: give its number \(0 to 1\)"):
            scoring.read_choices(row)
    else:
        question, texts, found = scoring.read_choices(row)
        assert (question, found) == ("Which?", right) and len(texts) in (2, 3)
