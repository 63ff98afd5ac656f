"""Hashes that are stored: a cache, a split or a label of yesterday is found again tomorrow.

tests/snapshots/hashes.txt contains them. Where one changes, what was stored under it is lost.
"""

import struct
from hashlib import blake2b, sha256

import numpy as np
import torch
from support.snapshots import compare
from torch import nn

from trainkit.align.distillation import row_key
from trainkit.align.reference import model_fingerprint, pairs_fingerprint
from trainkit.data.dataset import hash_position
from trainkit.data.dedup import content_key
from trainkit.parallel import content_hash
from trainkit.train.checkpoint import hash_part
from trainkit.train.runs import data_hash
from trainkit.widgets.labeler import _digest, _pair_id

PAIR = dict(prompt=[1, 2], chosen=[3], rejected=[4, 5])
ROW = np.array([5, 6, 7, 8])


def layer():
    linear = nn.Linear(2, 1, bias=False)
    linear.weight.data.copy_(torch.tensor([[0.5, -2.0]]))
    return linear


HASHES = {
    "pairs": lambda: pairs_fingerprint([PAIR]),
    "weights": lambda: model_fingerprint(layer()),
    "row of a teacher": lambda: row_key(ROW, np.array([-100, 6, 7, -100])).hex(),
    "packed row": lambda: row_key(ROW, ROW, np.array([0, 1, 0, 1])).hex(),
    "state": lambda: hash_part(dict(step=3, weight=torch.tensor([1.5, 2.0]))),
    "data": lambda: data_hash(["ab", b"c", np.arange(3), dict(text="é")]),
    "content": lambda: content_hash("a", [1, 2.5], dict(b=None), np.arange(2, dtype=np.int32), {3}),
    "text": lambda: str(content_key("text")),
    "place of a row": lambda: repr(hash_position("text", 7)),
    "pair of answers": lambda: _pair_id(dict(prompt="é", answers=["a", "b"])),
    "lines": lambda: _digest([b"one\n", b"two\n"]),
}


def test_what_is_stored_is_found_again():
    compare("".join(f"{name} -> {make()}\n" for name, make in HASHES.items()), "hashes.txt")


def test_hashes_by_hand():
    "Two of them, computed as their docstrings describe."
    ids = b"".join(
        struct.pack(">q", len(side)) + struct.pack(f"={len(side)}q", *side)
        for side in ([1, 2], [3], [4, 5])
    )
    assert pairs_fingerprint([PAIR]) == blake2b(ids, digest_size=16).hexdigest()
    items = b"".join(struct.pack("<q", len(x)) + x for x in (b"ab", b"c"))
    assert data_hash(["ab", b"c"]) == sha256(items).hexdigest()[:16]
    assert row_key(ROW, np.full(4, -100)) is None
    same = row_key(np.array([5, 6, 7, 9]), np.array([-100, 6, 7, -100]))
    assert same.hex() == HASHES["row of a teacher"](), "what follows the last learned token is free"
