"Batches, packing and curricula: no leak, no loss, and a resume at any batch."

import hashlib
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.data.dataloader import CurriculumConfig, cut_batches, cut_rows, easy_first, shuffled
from trainkit.data.dataloader import Batches, collate, token_blocks
from trainkit.data.shards import TokenRows
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.data.dataloader import STRATEGIES, assign, encode_rows, flatten_examples
from trainkit.data.dataloader import group_by_length, pack, packing_efficiency


def model(**changes) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(
            vocab_size=64,
            d_model=32,
            n_heads=4,
            n_kv_heads=2,
            n_layers=2,
            d_ff=64,
            max_seq_len=128,
            **changes,
        )
    )


def examples(count: int = 24, seed: int = 0) -> list[dict]:
    draw, out = np.random.default_rng(seed), []
    for _ in range(count):
        ids = draw.integers(0, 64, draw.integers(2, 20))
        out.append(dict(input_ids=ids, labels=np.where(draw.random(len(ids)) < 0.6, ids, -100)))
    return out


def loss_and_grad(net: Transformer, batches: list[dict]) -> tuple[float, int, torch.Tensor]:
    "Summed loss, learned tokens, and the gradient of the sum."
    net.zero_grad()
    total, count = 0.0, 0
    for batch in batches:
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        if not tokens:
            continue
        loss = net(**batch, num_items_in_batch=1).loss
        loss.backward()
        total, count = total + loss.item(), count + tokens
    return total, count, torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(position="learned", norm="layernorm", activation="gelu_tanh", bias="all")],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_padded_and_padding_free_rows_give_one_loss_and_gradient(strategy, changes):
    net, rows = model(**changes), examples()
    first = [
        {**row, "labels": np.where(np.arange(len(row["labels"])) == 0, -100, row["labels"])}
        for row in rows
    ]
    alone = loss_and_grad(net, [collate([row]) for row in rows])
    packed = pack(rows, 40, strategy)
    ways = dict(
        packed=[collate([row]) for row in packed],
        packed_batches=[collate(packed[i : i + 3]) for i in range(0, len(packed), 3)],
        padded=[collate(rows[i : i + 6]) for i in range(0, len(rows), 6)],
        free=[collate(rows[i : i + 3], padding_free=True) for i in range(0, len(rows), 3)],
        packed_free=[collate([row], padding_free=True) for row in packed],
        no_first=[collate([row]) for row in first],
    )
    for name, batches in ways.items():
        total, count, grad = loss_and_grad(net, batches)
        assert count == alone[1], name
        assert total == pytest.approx(alone[0], rel=1e-5), name
        assert torch.allclose(grad, alone[2], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("free", [False, True])
def test_editing_one_document_leaves_the_others_bit_equal(free):
    net, rows = model().eval(), examples(6)

    def logits(changed: int | None) -> list[torch.Tensor]:
        row = [
            {**r, "input_ids": (r["input_ids"] + 1) % 64 if i == changed else r["input_ids"]}
            for i, r in enumerate(rows)
        ]
        batch = collate(row, padding_free=True) if free else collate([flatten_examples(row)])
        with torch.no_grad():
            out = net(batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
        return list(out.split([len(r["input_ids"]) for r in rows]))

    before = logits(None)
    for changed in range(len(rows)):
        after = logits(changed)
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [
            i != changed for i in range(len(rows))
        ]


def test_padding_beside_packed_rows_changes_nothing():
    net, rows = model().eval(), pack(examples(9), 40, "greedy")
    batch = collate(rows)
    with torch.no_grad():
        together = net(**{k: v for k, v in batch.items() if k != "labels"}).logits
        for i, row in enumerate(rows):
            alone = net(
                torch.tensor(row["input_ids"])[None],
                position_ids=torch.tensor(row["position_ids"])[None].long(),
            ).logits[0]
            assert torch.allclose(together[i, : len(alone)], alone, atol=1e-5)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    room=st.integers(30, 70),
    strategy=st.sampled_from([*STRATEGIES]),
)
def test_packing_keeps_every_token_once(lengths, room, strategy):
    rows = [
        dict(input_ids=np.arange(n) + 1000 * i, labels=np.arange(n) + 1000 * i)
        for i, n in enumerate(lengths)
    ]
    packed = pack(rows, room, strategy)
    assert sorted(t for row in packed for t in row["input_ids"].tolist()) == sorted(
        t for row in rows for t in row["input_ids"].tolist()
    )
    for row in packed:
        assert len(row["input_ids"]) == row["length"] <= room
        assert ((row["labels"] == -100) == (row["position_ids"] == 0)).all()
        assert (row["input_ids"] % 1000 == row["position_ids"]).all()
    if strategy != "greedy":
        assert len(packed) <= len(assign(lengths, room, "greedy")) + (strategy == "first_fit")


WAYS = [
    dict(),
    dict(shuffle=False),
    dict(drop_last=True),
    dict(group_by_length=True),
    dict(group_by_length=True, max_tokens=60),
    dict(max_tokens=60, padding_free=True),
    dict(curriculum=CurriculumConfig(start_length=4, end_length=20, steps=9)),
    dict(
        curriculum=CurriculumConfig(strategy="difficulty_based", steps=9),
        difficulty_fn=lambda row: -len(row["input_ids"]),
    ),
]


@pytest.mark.parametrize("way", range(len(WAYS)))
@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 30), seed=st.integers(0, 3))
def test_any_batch_can_be_taken_up_again(way, stop, seed):
    rows = examples(40)

    def make():
        return Batches(rows, 5, seed, **WAYS[way])

    def stream(batches):
        for _ in range(9):
            yield from batches

    def ids(batches, n):
        return [b["input_ids"].tolist() for _, b in zip(range(n), stream(batches), strict=False)]

    whole, halted, resumed = ids(make(), stop + 12), make(), make()
    assert ids(halted, stop) == whole[:stop]
    resumed.load_state_dict(halted.state_dict())
    assert ids(resumed, 12) == whole[stop:]


@pytest.mark.parametrize("way", [0, 4, 6])
def test_workers_change_nothing(way):
    rows = examples(40)
    one, two = Batches(rows, 5, 1, **WAYS[way]), Batches(rows, 5, 1, num_workers=2, **WAYS[way])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    half = iter(two)
    seen = [next(half) for _ in range(3)]
    resumed = Batches(rows, 5, 1, num_workers=2, **WAYS[way])
    resumed.load_state_dict(two.state_dict())
    assert torch.equal(torch.get_rng_state(), before), (
        "the loader drew from the random numbers of the model"
    )
    for a, b in zip(one, [*seen, *resumed], strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert one.state_dict() == resumed.state_dict()


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_every_row_once_an_epoch(way):
    rows = examples(40)
    batches = Batches(rows, 5, 2, **WAYS[way])
    for epoch in range(3):
        assert sorted(np.concatenate(batches.plan(epoch)).tolist()) == list(range(40))


def test_the_order_is_the_same_on_every_machine():
    assert shuffled(10, 0, 0).tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert shuffled(10, 7, 3).tolist() == [3, 5, 4, 7, 8, 0, 9, 2, 1, 6]
    whole = hashlib.sha256()
    for way in WAYS:
        for epoch in range(2):
            whole.update(
                np.concatenate(Batches(examples(40), 5, 2, **way).plan(epoch))
                .astype("<i8")
                .tobytes()
            )
    assert whole.hexdigest() == "fda8494176d26144487551916da20697fcd9a1c762aaa34bd2c59ef0fb911c03"


def test_a_curriculum_survives_shuffling():
    rows, config = examples(400), CurriculumConfig(start_length=5, end_length=20, steps=40)
    batches = Batches(rows, 8, 0, curriculum=config)
    longest = [max(len(rows[i]["input_ids"]) for i in b) for b in batches.plan(0)]
    assert all(
        n <= max(config.limit(i, np.array([0])), 5) for i, n in enumerate(longest[:8])
    ) and max(longest[:8]) < max(longest)
    assert (
        batches.plan(0)[0].tolist()
        != np.argsort([len(r["input_ids"]) for r in rows], kind="stable")[:8].tolist()
    )  # shuffled all the same
    assert (
        np.concatenate(batches.plan(1)).tolist() == shuffled(400, 0, 1).tolist()
    )  # afterwards, everything is allowed
    order = easy_first(
        shuffled(400, 0, 0), np.array([len(r["input_ids"]) for r in rows]), config, 8
    )
    assert np.concatenate(batches.plan(0)).tolist() == order.tolist()
    assert [len(b) for b in cut_batches(order, 8)] == [8] * 50


def test_the_end_token_is_learned_though_it_is_the_padding():
    rows = [dict(input_ids=[5, 6, 2], labels=[-100, 6, 2]), dict(input_ids=[5, 2])]
    batch = collate(rows, pad_id=2)
    assert batch["labels"].tolist() == [[-100, 6, 2], [5, 2, -100]] and batch[
        "attention_mask"
    ].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_a_curriculum_cuts_running_text_and_is_taken_up_exactly():
    """Each token of a block but the first is predicted once an epoch; a resumed run sees the same.

    Pieces are never longer than allowed.
    """
    blocks = token_blocks(np.arange(2000, dtype=np.uint16), 65)
    config = CurriculumConfig(start_length=9, end_length=65, steps=90)

    def make(workers=0):
        return Batches(blocks, 4, 1, curriculum=config, num_workers=workers)

    batches, step = make(), 0
    for epoch in range(3):
        seen = []
        for batch in batches:
            assert batch["input_ids"].shape[1] <= min(config.limit(step, np.zeros(1)), 65)
            seen += batch["labels"][:, 1:][batch["labels"][:, 1:] != -100].tolist()
            step += 1
        assert sorted(seen) == list(range(1, 2000)), epoch
    assert step > 3 * len(Batches(blocks, 4)), "short pieces make more batches"

    def stream(batches, n):
        return [
            b["input_ids"].tolist()
            for _, b in zip(range(n), (b for _ in range(30) for b in batches), strict=False)
        ]

    whole, first = stream(make(), 130), len(make())
    for stop, workers in ((0, 0), (7, 0), (20, 2), (first, 0), (first + 5, 0)):
        halted, resumed = make(workers), make()
        assert stream(halted, stop) == whole[:stop]
        resumed.load_state_dict(halted.state_dict())
        assert stream(resumed, 130 - stop) == whole[stop:], stop
    assert (
        stream(Batches(TokenRows(np.arange(2000), 65, 0, 2000), 4, 1, curriculum=config), 130)
        == whole
    )
    with pytest.raises(ValueError, match="cut: False then"):
        make().load_state_dict({k: v for k, v in make().state_dict().items() if k != "cut"})


@pytest.mark.parametrize("places, rows", [(None, 4), (40, 4), (39, 3), (25, 2), (19, 1), (5, 1)])
def test_a_batch_of_pieces_has_the_places_it_may_have_or_one_row(places, rows):
    "Pieces of ten tokens, four at most."
    order, lengths = np.arange(12), np.full(12, 10)
    config = CurriculumConfig(start_length=10, end_length=1000, steps=10**6)
    batches = cut_rows(order, lengths, config, 4, max_tokens=places)
    assert {len(batch) for batch in batches[:-1]} == {rows}
    assert [row for batch in batches for row, *_ in batch] == [*order]


@pytest.mark.parametrize(
    "sizes, joined",
    [
        ([1] * 7, [2, 2, 3]),
        ([1] * 6, [2, 2, 2]),
        ([4, 4, 1], [4, 5]),
        ([4, 1, 4], [4, 5]),
        ([1, 4], [5]),
        ([1], [1]),
        ([4, 2], [4, 2]),
    ],
)
def test_a_batch_too_small_takes_no_more_than_its_neighbour(sizes, joined):
    from trainkit.data.dataloader import _join_small

    batches = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    made = _join_small(batches, 2)
    assert [len(batch) for batch in made] == joined
    assert np.concatenate(made).tolist() == [*range(sum(sizes))]


def test_a_batch_has_rows_of_one_task():
    rows = [np.arange(2, 3 + n) for n in range(7)]
    tasks = ["a", "b", "a", "b", "b", "a", "c"]
    batches = Batches(rows, 2, shuffle=False, tasks=tasks)
    got = [(batch["task"], batch["input_ids"].shape[0]) for batch in batches]
    assert got == [("a", 2), ("a", 1), ("b", 2), ("b", 1), ("c", 1)] and len(batches) == 5
    assert batches.task_names == ["a", "b", "c"] and batches.peek()["task"] == "a"
    assert sorted(int(i) for plan in batches.plan(0) for i in plan) == [*range(7)]
    for wrong in (dict(tasks=tasks), dict(tasks=["a"], shuffle=False)):
        with pytest.raises(ValueError, match="give one for each, and shuffle=False"):
            Batches(rows, 2, **wrong)


# --- packing and cutting against the slow way


def pack_slowly(lengths, capacity, strategy):
    "Each document in turn looks at every row; of rows with equal room, best fit takes the last."
    order = range(len(lengths))
    if strategy == "best_fit":
        order = sorted(order, key=lambda i: -lengths[i])
    rows, rooms, opened = [], [], []
    for i in order:
        n = lengths[i]
        fitting = [row for row, room in enumerate(rooms) if room >= n]
        if strategy == "greedy":
            fitting = [row for row in fitting if row == len(rows) - 1]
        elif strategy == "best_fit" and fitting:
            least = min(rooms[row] for row in fitting)
            fitting = [row for row in opened if rooms[row] == least][-1:]
        if not fitting:
            rows.append([])
            rooms.append(capacity)
        row = fitting[0] if fitting else len(rows) - 1
        rows[row].append(i)
        rooms[row] -= n
        opened = [other for other in opened if other != row] + [row]
    return rows


@pytest.mark.parametrize("strategy", ["greedy", "first_fit", "best_fit"])
def test_packing_is_the_slow_way_s(strategy):
    draw = random.Random(strategy)
    for capacity in (1, 2, 5, 17, 64):
        for count in (1, 2, 3, 8, 9, 40):
            lengths = [draw.randint(1, capacity) for _ in range(count)]
            rows = assign(lengths, capacity, strategy)
            assert rows == pack_slowly(lengths, capacity, strategy)
            packed = [dict(input_ids=[0] * sum(lengths[i] for i in row)) for row in rows]
            share = sum(lengths) / (capacity * len(rows))
            assert packing_efficiency(packed, capacity) == pytest.approx(share)
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=f"example 1 has {wrong} tokens, and must have"):
            assign([5, wrong], 5, strategy)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("padding_free", [False, True])
def test_batches_are_cut_where_the_next_row_would_be_too_much(padding_free, drop_last):
    draw = np.random.default_rng(0)
    for count in (1, 6, 7, 30):
        order, lengths = draw.permutation(count), draw.integers(1, 9, count)
        for batch_size in (1, 3, 6, 40):
            plain = [[*order[i : i + batch_size]] for i in range(0, count, batch_size)]
            if drop_last:
                plain = [batch for batch in plain if len(batch) == batch_size]
            found = cut_batches(order, batch_size, drop_last=drop_last)
            assert [[*batch] for batch in found] == plain
            for most in (8, 9, 16, 25):
                wanted = [[]]
                for row in order:
                    more = [lengths[i] for i in (*wanted[-1], row)]
                    places = sum(more) if padding_free else max(more) * len(more)
                    if len(more) > batch_size or places > most:
                        wanted.append([])
                    wanted[-1].append(row)
                if drop_last and len(wanted) > 1:
                    wanted.pop()
                found = cut_batches(order, batch_size, lengths, most, padding_free, drop_last)
                assert [[*batch] for batch in found] == wanted


def test_rows_of_like_length_are_sorted_in_windows():
    order, lengths = np.array([4, 0, 3, 1, 2]), np.array([5, 7, 6, 5, 9])
    assert group_by_length(order, lengths, 3).tolist() == [4, 0, 3, 1, 2]
    assert group_by_length(order, lengths, 2).tolist() == [4, 0, 1, 3, 2]
    assert group_by_length(order, lengths, 9).tolist() == [4, 1, 2, 0, 3]
    rows = [dict(input_ids=[0] * n) for n in np.random.default_rng(0).integers(1, 99, 320)]
    batches = Batches(rows, 2, group_by_length=True, shuffle=False)
    sizes = [len(rows[i]["input_ids"]) for i in batches.order(0)]
    for start in (0, 100, 200, 300):
        assert sizes[start : start + 100] == sorted(sizes[start : start + 100], reverse=True)
    assert sizes[99] < sizes[100]


@pytest.mark.parametrize("length, start", [(2, 0), (3, 1), (7, 5), (8, 5), (9, 0), (50, 0)])
def test_a_line_is_cut_so_that_each_token_is_predicted_once(length, start):
    ids = np.arange(40 + start)
    rows = [row.tolist() for row in token_blocks(ids, length)]
    assert [row[0] for row in rows] == [0, *(row[-1] for row in rows[:-1])]
    assert sum((row[1:] for row in rows), []) == [*range(1, len(ids))]
    assert all(len(row) == length for row in rows[:-1]) and 2 <= len(rows[-1]) <= length
    assert [row.tolist() for row in token_blocks(ids[:2], length)] == [[0, 1]]
    with pytest.raises(ValueError, match="1 token: too few to train on, 2 are needed"):
        token_blocks(ids[:1], length)
    with pytest.raises(ValueError, match="max_length = 1: a row needs at least 2 tokens"):
        token_blocks(ids, 1)


@pytest.mark.parametrize("limits", [[3, 3, 4, 6, 99], [2, 5, math.inf], [4] * 40, [math.inf]])
@pytest.mark.parametrize("batch_size, most", [(1, None), (3, None), (3, 9), (4, 8)])
def test_running_text_is_cut_into_even_pieces(limits, batch_size, most):
    "No piece is longer than the limit of its batch, and each token is predicted once."

    class Limits:
        def limit(self, step, lengths):
            assert lengths.max() == 8
            return limits[min(step, len(limits) - 1)]

    order, lengths = np.array([2, 0, 3, 1, 4]), np.array([8, 2, 7, 3, 5])
    batches = cut_rows(order, lengths, Limits(), batch_size, 0, most)
    pieces = []
    for number, batch in enumerate(batches):
        if batch.ndim == 1:  # Whole rows
            assert limits[min(number, len(limits) - 1)] == math.inf
            pieces += [(int(row), 0, int(lengths[row])) for row in batch]
            continue
        limit = min(limits[min(number, len(limits) - 1)], 8)
        room = batch_size if most is None else max(1, min(batch_size, most // limit))
        assert len(batch) == room or number == len(batches) - 1
        assert max(stop - start for _, start, stop in batch) <= limit
        pieces += [tuple(map(int, piece)) for piece in batch]
    wanted = {int(row): [*range(1, lengths[row])] for row in order}
    found = {row: [] for row in wanted}
    for row, start, stop in pieces:
        found[row] += range(start + 1, stop)
    assert found == wanted and [*dict.fromkeys(row for row, *_ in pieces)] == order.tolist()
    if limits == [4] * 40:  # Seven to predict are 3, 2 and 2, not 3, 3 and 1
        assert [stop - start for row, start, stop in pieces if row == 0] == [4, 3, 3]
    assert all(map(len, batches))
    full = cut_rows(order, lengths, Limits(), batch_size, 0, most, True)
    assert len(full) in (len(batches), len(batches) - 1)


@pytest.mark.parametrize("most", [None, 8, 24])
@pytest.mark.parametrize("steps", [2, 100])
def test_an_epoch_may_end_before_the_curriculum_does(steps, most):
    curriculum = CurriculumConfig(start_length=3, end_length=8, steps=steps)
    rows = [np.arange(n) for n in (8, 2, 7, 3, 5)]
    batches = Batches(rows, 2, curriculum=curriculum, max_tokens=most)
    for _ in range(3):
        learned = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        assert min(learned) > 0 and sum(learned) == 25 - 5


def test_sizes_of_the_batches_that_come():
    rows = [dict(input_ids=[0] * n) for n in (3, 9, 4, 4, 7)]
    batches = Batches(rows, 2, shuffle=False)
    assert batches.widths(1) == {(2, 9)} and batches.widths(3) == {(2, 9), (2, 4), (1, 7)}
    assert batches.widths(2) == {(2, 9), (2, 4)} and batches.widths(9) == batches.widths(3)
    assert batches.largest()["input_ids"].shape == (2, 9)
    assert batches.largest(1)["input_ids"].shape == (1, 9)
    assert batches.largest(9)["input_ids"].shape == (2, 9)
    assert len(batches) == batches.batches_of(7) == 3
    few = Batches(rows, 3, max_tokens=12)
    counts = [len(few.plan(epoch)) for epoch in range(6)]
    few._plan = -1, []
    assert [few.batches_of(epoch) for epoch in range(6)] == counts and len({*counts}) > 1
    first = next(iter(batches))
    assert torch.equal(batches.peek()["input_ids"], batches.join(rows[2:4])["input_ids"])
    batches.index = 3
    assert torch.equal(batches.peek()["input_ids"], first["input_ids"])
    with pytest.raises(ValueError, match="5 rows cannot fill one batch of 6"):
        Batches(rows, 6, drop_last=True)
    assert len(Batches(rows, 5, drop_last=True)) == 1
    Batches(rows, 2, max_tokens=9)
    with pytest.raises(ValueError, match="a row has 9 tokens, more than max_tokens = 8"):
        Batches(rows, 2, max_tokens=8)
    with pytest.raises(ValueError, match="batch_size = 0: must be at least 1"):
        Batches(rows, 0)


def test_texts_are_encoded_a_few_at_a_time():
    class Counting:
        eos_token_id, vocab_size = 7, 65_536

        def encode_batch(self, texts, allowed_special):
            sizes.append(len(texts))
            return [[*text.encode()] for text in texts]

    sizes = []
    ids = encode_rows([dict(text=text) for text in ("ab", "", "c", "d", "e")], Counting(), 2)
    assert ids.tolist() == [97, 98, 7, 7, 99, 7, 100, 7, 101, 7] and ids.dtype == np.uint16
    assert sizes == [2, 2, 1]
    Counting.vocab_size = 65_537
    assert encode_rows([], Counting()).dtype == np.uint32


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_the_easiest_rows_come_first_in_the_shuffled_order(batch_size):
    "What may come is what the curriculum allows, and at least enough for a batch."

    class Rising:
        def limit(self, progress, levels):
            assert levels.tolist() == sorted(levels.tolist())
            return math.inf if progress * batch_size >= 8 else levels[int(progress * batch_size)]

    draw = np.random.default_rng(1)
    order, difficulty = draw.permutation(14), draw.integers(0, 6, 14)
    for done in (0, 3, 8):
        found = easy_first(order, difficulty, Rising(), batch_size, done).tolist()
        left, wanted = [*order.tolist()], []
        levels = np.sort(difficulty)
        for start in range(0, 14, batch_size):
            at = done + start
            limit = math.inf if at >= 8 else levels[at]
            want = min(batch_size, 14 - start)
            allowed = [i for i in left if difficulty[i] <= limit]
            if len(allowed) < want:
                hardest = sorted(left, key=lambda i: (difficulty[i], i))[:want]
                allowed = [i for i in left if i in hardest]
            wanted += allowed[:want]
            left = [i for i in left if i not in wanted]
        assert found == wanted and sorted(found) == [*range(14)]
