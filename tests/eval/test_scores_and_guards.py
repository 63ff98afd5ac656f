"Windows of a long text, and what the sandbox's filter of system calls allows."

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.snapshots import compare

from trainkit import ModelConfig, Transformer
from trainkit.eval import scoring
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
