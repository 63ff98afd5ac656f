"Memory: predictions against torch's own tracker on real tensors, and memory that is given back."

import re
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from support.peak import run_measured
from support.processes import in_child
from trainkit.train.optim import AdamW8bit
from trainkit.memory import estimate, tracker
from trainkit.memory.offload import OffloadedOptimizer
from trainkit.memory.tracker import Ledger
from trainkit.memory.estimate import (
    batch_size,
    computed_tokens,
    free_memory,
    measure_memory,
    memory_report,
    memory_used,
    predict_memory,
)
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import lm_loss

torch.set_num_threads(1)
SMALL = dict(vocab_size=3000, n_layers=2)


def make(kind, dtype=torch.float32, frozen=False, checkpointing=False):
    torch.manual_seed(0)
    if kind == "ours":
        model = Transformer(
            ModelConfig(
                **SMALL,
                d_model=128,
                n_heads=4,
                n_kv_heads=2,
                d_ff=256,
                max_seq_len=256,
                gradient_checkpointing=checkpointing,
            )
        )
    else:
        import transformers as t

        shape = dict(
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=3000,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = {
            "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**shape, num_key_value_heads=2)),
            "qwen": lambda: t.Qwen2ForCausalLM(
                t.Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=True)
            ),
            "gpt2": lambda: t.GPT2LMHeadModel(
                t.GPT2Config(
                    vocab_size=3000,
                    n_embd=128,
                    n_layer=2,
                    n_head=4,
                    n_positions=256,
                    bos_token_id=0,
                    eos_token_id=0,
                )
            ),
        }[kind]()
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=dict(use_reentrant=False)
            )
    model = model.to(dtype)
    if frozen:
        for name, p in model.named_parameters():
            p.requires_grad_("norm" in name or "ln_" in name)
    return model.train()


OPTIMIZERS = {
    "fused": lambda m: torch.optim.AdamW(trained(m), fused=True),
    "loop": lambda m: torch.optim.AdamW(trained(m), foreach=False),
    "foreach": lambda m: torch.optim.AdamW(trained(m), foreach=True),
    "sgd": lambda m: torch.optim.SGD(trained(m), 0.1, momentum=0.9),
}
GRID = [  # kind, batch, length, optimizer, chunked, make's options, mixed precision
    ("ours", 4, 128, "fused", True, {}, None),
    ("ours", 4, 128, "fused", False, {}, None),
    ("ours", 2, 256, "loop", True, dict(checkpointing=True), None),
    ("ours", 8, 64, "foreach", True, dict(frozen=True), None),
    ("ours", 4, 128, "sgd", True, dict(dtype=torch.bfloat16), None),
    ("ours", 2, 64, "fused", True, {}, torch.bfloat16),
    ("llama", 4, 128, "fused", True, {}, None),
    ("llama", 2, 256, "sgd", False, dict(checkpointing=True), None),
    ("llama", 4, 64, "fused", True, dict(frozen=True), None),
    ("llama", 4, 128, "fused", False, dict(dtype=torch.bfloat16), None),
    ("gpt2", 4, 128, "fused", False, {}, None),
    ("gpt2", 2, 64, "loop", True, dict(checkpointing=True), None),
    ("gpt2", 2, 128, "fused", True, {}, torch.bfloat16),
    ("qwen", 4, 128, "fused", True, dict(checkpointing=True), None),
    ("qwen", 1, 256, "foreach", False, dict(frozen=True), None),
]


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def two_steps(model, optimizer, ids, chunked, autocast, between=lambda: None):
    for _ in range(2):
        with torch.autocast(ids.device.type, autocast, enabled=autocast is not None):
            loss = (
                lm_loss(model, dict(input_ids=ids, labels=ids)).total
                if chunked
                else model(input_ids=ids, labels=ids).loss
            )
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        between()


QUICK = {0, 2, 3, 5, 6, 10, 13}  # Each kind, lever and optimizer once; the rest takes as long again
MARKED = [
    row if i in QUICK else pytest.param(*row, marks=pytest.mark.slow) for i, row in enumerate(GRID)
]


@pytest.mark.parametrize("kind, batch, length, optimizer, chunked, options, autocast", MARKED)
def test_prediction_is_what_torchs_own_tracker_finds_on_real_tensors(
    kind, batch, length, optimizer, chunked, options, autocast
):
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):  # It would hook frozen parameters too, which torch refuses
        def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
            return super()._track_module_params_and_buffers(
                module, install_grad_hooks and all(p.requires_grad for p in module.parameters())
            )

    model, ids = make(kind, **options), torch.randint(3000, (batch, length))
    optim, tracker = OPTIMIZERS[optimizer](model), Tracker()
    tracker.track_external(model, optim, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tracker:
            two_steps(model, optim, ids, chunked, autocast, tracker.reset_mod_stats)
    theirs = next(iter(tracker.get_tracker_snapshot("peak").values()))
    ours = predict_memory(
        lambda: make(kind, **options),
        batch,
        length,
        OPTIMIZERS[optimizer],
        chunked_loss=chunked,
        mixed_precision="bf16" if autocast else "no",
    )
    assert abs(ours.peak - theirs["Total"]) < 0.1 * 2**20
    named = {str(getattr(k, "value", k)): v for k, v in theirs.items()}
    assert ours.parts["parameters"] == named["Parameter"]
    assert (
        abs(ours.parts["optimizer"] - named["Optstate"]) < 1000 or ours.parts["activations"] == 0
    )  # Theirs counts what the step needs for a moment as state
    model = make(kind, **options)
    optim = OPTIMIZERS[optimizer](model)
    measured = measure_memory(
        lambda: two_steps(model, optim, ids, chunked, autocast), model, optim, ids
    )
    assert abs(measured.peak - ours.peak) < 1000


def test_an_optimizer_of_8_bits_that_goes_in_pieces_is_predicted_to_the_byte():
    "Of a parameter larger than a piece only the first piece is traced; the others need as much."
    from trainkit.train.optim import UPDATE_CHUNK

    eight, ids = lambda m: AdamW8bit(trained(m), lr=1e-2), torch.randint(3000, (2, 64))
    model = make("ours")
    assert max(p.numel() for p in model.parameters()) > 2 * UPDATE_CHUNK
    ours, optim = predict_memory(lambda: make("ours"), 2, 64, eight), eight(model)
    measured = measure_memory(lambda: two_steps(model, optim, ids, True, None), model, optim, ids)
    assert abs(measured.peak - ours.peak) < 1000
    assert ours.parts["optimizer"] == measured.parts["optimizer"] < ours.parts["parameters"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts what a GPU has allocated")
@pytest.mark.parametrize("chunked, autocast", [(True, None), (False, None), (True, torch.bfloat16)])
def test_prediction_is_the_gpus_own_peak(chunked, autocast):
    "Within 3 % of CUDA's allocator, on a model that dwarfs the workspace of cuBLAS."

    def large():
        return Transformer(
            ModelConfig(
                vocab_size=32000, d_model=1024, n_heads=16, n_layers=8, d_ff=4096, max_seq_len=512
            )
        )

    adam = OPTIMIZERS["fused"]
    predicted = predict_memory(
        large, 8, 512, adam, chunked, "no" if autocast is None else "bf16", device="cuda"
    )
    model, ids = large().cuda(), torch.randint(32000, (8, 512), device="cuda")
    optimizer = adam(model)
    two_steps(model, optimizer, ids[:1, :8], chunked, autocast)  # The workspaces
    optimizer.state.clear()
    measured = measure_memory(
        lambda: two_steps(model, optimizer, ids, chunked, autocast), model, optimizer, ids
    )
    assert abs(measured.seen - predicted.peak) < 0.03 * predicted.peak


def test_accumulation_and_steps_in_backward():
    adamw = OPTIMIZERS["fused"]
    plain, twice, inside = (
        predict_memory(lambda: make("ours"), 1, 16, adamw, **more)
        for more in ({}, dict(accumulation=4), dict(in_backward=True))
    )
    grads = 4 * sum(p.numel() for p in make("ours").parameters())
    assert twice.peak > plain.peak and inside.peak < plain.peak - 0.2 * grads
    assert inside.parts["gradients"] < 0.6 * plain.parts["gradients"]


def test_rounding_to_the_blocks_of_a_gpu():
    fine, coarse = (predict_memory(lambda: make("ours"), 1, 16, block=block) for block in (1, 512))
    assert (
        all(size % 512 == 0 for size in coarse.parts.values())
        and 0 < coarse.peak - fine.peak < 0.05 * fine.peak
    )


def test_ledger_forgets_what_died_and_knows_views():
    with Ledger() as ledger:
        x = torch.zeros(1000)
        y = x[10:]
        assert ledger.total == 4000
        del x
        assert ledger.total == 4000
        del y
        assert ledger.total == 0 == sum(ledger.parts.values())


def test_predicting_leaves_nothing_behind():
    model = make("ours")
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    predict_memory(lambda: Transformer(model.config), 1, 16)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    real = torch.ones(2)
    assert type(real) is torch.Tensor and real.sum() == 2


def test_who_trains_beside_a_prediction_does_not_notice():
    "A panel predicts in one thread while another trains: every parameter moves, torch is intact."
    apply, small = (
        nn.Module._apply,
        ModelConfig(vocab_size=300, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=64),
    )

    def train():
        torch.manual_seed(0)
        model, errors = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]), []
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        for _ in range(100):
            loss = (model(torch.ones(2, 32)) - 3).pow(2).mean()
            loss.backward(), optimizer.step(), optimizer.zero_grad()
            errors.append(loss.item())
        return errors

    alone, inside, done = train(), threading.Event(), threading.Event()

    def asked():
        inside.set(), done.wait(20)
        return Transformer(small)

    threads = [threading.Thread(target=predict_memory, args=(asked, 1, 8)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(20) and train() == alone
    done.set()
    for thread in threads:
        thread.join()
    assert nn.Module._apply is apply


def test_an_error_inside_leaves_no_mode_behind():
    def broken():
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        predict_memory(broken, 1, 16)
    assert (torch.ones(3) + 1).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="max_seq_len"):
        predict_memory(lambda: make("ours"), 1, 1000)


class Holder:
    "As a trainer holds what it trains."

    def __init__(self, width):
        self.model = nn.Linear(width, 2 * width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.model(torch.ones(1, width)).sum().backward()
        self.optimizer.step()
        self.itself = self


def free_a_run():
    free_memory(Holder(2000))  # The first one also pays for imports and for the heap
    holder = Holder(2000)
    full = memory_used()
    free_memory(holder)
    assert full - memory_used() > 0.9 * 16 * 8_004_000
    assert holder.model.weight.is_meta and not holder.optimizer.state
    assert memory_report()["process"] > 0


def test_free_memory_on_a_run(tmp_path):
    "In a fresh process: one that has trained keeps memory that it has freed."
    done = in_child(free_a_run, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_of_a_billion_parameters_in_little_time_and_memory():
    code = (
        "import time; from trainkit.memory.estimate import predict_memory; from "
        "trainkit.model.config import ModelConfig; from trainkit.model.transformer import "
        "Transformer\n"
        "config = ModelConfig(vocab_size=32000, d_model=2048, n_heads=32, n_kv_heads=4, "
        "n_layers=22, d_ff=5632, max_seq_len=2048, tie_embeddings=False)\n"
        "began = time.process_time(); found = predict_memory(lambda: Transformer(config), 2, "
        "2048)\n"
        "print(found.parts['parameters'], time.process_time() - began, "
        "peak_memory())"
    )
    size, seconds, most = map(
        float,
        run_measured(code).split(),
    )
    assert 4.3e9 < size < 4.5e9 and seconds < 30 and most < 1e9


@pytest.mark.parametrize("count", [5, 6, 7])
def test_values_are_followed_up_to_a_size(count, monkeypatch):
    "A tensor of just that size is still followed, and a larger one is not."
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(tracker, "FOLLOWED", 6)
    with FakeTensorMode(), Ledger() as ledger:
        ids = ledger.tell(dict(input_ids=torch.arange(3)))["input_ids"]
        values = vars(ids.new_zeros(count)).get("known")
    assert (values is not None) == (count <= 6)


def test_on_a_cpu_nothing_is_pinned(monkeypatch):
    "Pages are pinned for the copy to a GPU; without one, pinning is an error."
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = OffloadedOptimizer([parameter], lambda groups: torch.optim.SGD(groups, lr=0.5))
    parameter.grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    assert parameter.tolist() == [0.5, 1.5]


def test_small_parameters_of_the_8_bit_optimizer_are_adamw_s():
    "Fewer than 4,096 numbers keep a state in float32, and a large eps tells where it stands."
    both = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(50))
        optimizer = kind([weight], lr=0.05, betas=(0.8, 0.9), eps=0.3, weight_decay=0.1)
        for step in range(4):
            weight.grad = torch.sin(torch.arange(50.0) * (step + 1))
            optimizer.step()
        both.append(weight.detach())
    assert torch.allclose(*both, atol=1e-6)


# --- the parts of a run's prediction, one by one


def tensors(rows, width, *more, name="input_ids"):
    return {name: torch.ones(rows, width, dtype=torch.long), **dict(more)}


class Batches:
    "Batches that know their rows: each is joined to a tensor as wide as its widest row."

    def __init__(self, plan, rows=range(1, 40)):
        self._plan, self.plans, self.rows = "kept", plan, [*rows]

    def plan(self, epoch):
        assert epoch == 0
        self._plan = "drawn"
        return self.plans

    def join(self, rows):
        return tensors(len(rows), max(rows))


def run_of(batches=None, device="cpu", folder=None, epoch_length=0, total_steps=10, **config):
    defaults = dict(
        gradient_accumulation_steps=1,
        per_device_train_batch_size=6,
        async_save=None,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
    )
    return SimpleNamespace(
        config=SimpleNamespace(**{**defaults, **config}),
        accelerator=SimpleNamespace(device=torch.device(device)),
        train_batches=batches,
        eval_batches=batches,
        folder=folder,
        epoch_length=epoch_length,
        total_steps=total_steps,
        model=nn.Linear(3, 5),
    )


@pytest.mark.parametrize("count", [1, 5, 6, 7, 20, 24, 46, 100])
def test_a_long_run_leaves_small_blocks_between_its_steps(count):
    "A step is 4 events, its update is the last; each later step leaves its part of the blocks."
    step = [(2, 4), (-1, 0), (2, 0), (3, 9)]
    events = [(1, 8), *step]
    steps = estimate._several_steps(events, [0, 0, 1, 4, 5], False, [7, 5], (), count)
    played = max(5, min(count, 24))
    left = min(4 * max(0, count - 6), 160)
    out, number = [(0, 4), (-1, 0), (0, 0), (1, 8)], 2
    sizes = iter([600, 1500, 3000, 5000] * 40)
    for i in range(2, played + 1):
        for _ in range(left * (i - 1) // played - left * (i - 2) // played):
            out.append((number, next(sizes)))
            number += 1
        out += [(number, 4), (-1, 0), (number, 0), (number + 1, 9)]
        number += 2
        if i == 2:
            out += [(number, 7), (number + 1, 5)]
            number += 2
    assert steps == out


def test_a_run_that_updates_in_the_backward_pass_has_two_whole_steps():
    first, second, other = [(1, 8), (2, 4), (2, 0)], [(3, 4), (3, 0)], [(4, 6), (1, 3), (4, 0)]
    events = [(0, 5), *first, *second, *other]
    marks = [1, 1, 4, 4, 6]
    steps = estimate._several_steps(events, marks, True, [], [], 5)
    assert steps[:3] == [(0, 8), (1, 4), (1, 0)]
    assert [size for _, size in steps[3:]] == [6, 3, 0, 4, 0] * 4
    apart = estimate._several_steps(events, [*marks[:4], 6], True, [], [9], 6)
    assert [size for _, size in apart] == [8, 4, 0, *[6, 3, 0, 4, 0] * 2, 6, 3, 0]


@pytest.mark.parametrize(
    "rows, width, calls",
    [
        (512, 1024, [64, 128]),  # Just large enough, in tokens and in rows
        (511, 1024, None),
        (700, 1000, [65, 130]),
        (8, 2**17, [1, 2]),
        (7, 2**17, None),
        (6000, 0, None),
    ],
)
def test_a_huge_batch_is_predicted_from_two_smaller_ones(rows, width, calls, monkeypatch):
    asked = []

    def predict(trainer, count, tokens, batch, resident):
        asked.append(count)
        assert (tokens, resident) == (width, False)
        assert batch is None or batch_size(batch) == (count, width)
        return SimpleNamespace(peak=1000 + 7 * count + (count == few))

    few = calls and calls[0]
    monkeypatch.setattr(estimate, "predict_run", predict)
    known = run_of(SimpleNamespace(largest=lambda count: tensors(count, width)))
    for trainer, tokens in ((run_of(), width), (known, None)):
        asked.clear()
        found = estimate.extrapolate(trainer, rows, tokens)
        assert asked == (calls or [])
        if calls:
            assert found == 1001 + 7 * few + (7 * few - 1) * (rows - few) // few
        else:
            assert found is None


@pytest.mark.parametrize(
    "device, rows, tokens, needs, says",
    [
        ("cpu", 8, 32, 10**9, None),
        (
            "cpu",
            8,
            32,
            2 * 10**9,
            "of 8 x 32 tokens needs 2 GB, as predicted, and 1 GB are free on this machine: "
            "take train.per_device_train_batch_size = 4 or less",
        ),
        ("cpu", 2, 0, 2 * 10**9, "of 2 rows needs .*_batch_size = 1 or less"),
        ("cpu", 1, 1024, 10**9 + 1, "of 1 x 1,024 tokens .* take shorter rows"),
        ("cpu", 8, 32, 2 * 10**9 + 1, MemoryError),
        (
            "cuda",
            9,
            32,
            3 * 10**9,
            "and this GPU has 2 GB: take train.per_device_train_batch_size = 3 or less",
        ),
    ],
)
def test_what_a_step_needs_is_compared_with_what_is_free(
    device, rows, tokens, needs, says, monkeypatch
):
    said = []
    monkeypatch.setattr(estimate, "room", lambda trainer: (2 * 10**9, 10**9))
    if says is MemoryError:
        with pytest.raises(MemoryError, match="this machine has 2 GB.*watch_memory = false"):
            estimate.check_size(run_of(device=device), rows, tokens, needs, said.append)
    else:
        estimate.check_size(run_of(device=device), rows, tokens, needs, said.append)
    assert len(said) == (says not in (None, MemoryError))
    if said:
        assert re.search(says, said[0]), said


def test_the_room_of_a_run_is_what_is_free_and_its_own_model(monkeypatch):
    monkeypatch.setattr(estimate, "available_memory", lambda: (1000, 300))
    assert estimate.room(run_of()) == (1000, 300 + 4 * (3 * 5 + 5))


def test_sizes_of_batches():
    pair = tensors(4, 3) | tensors(4, 7, name="chosen_input_ids")
    pair |= tensors(4, 2, name="rejected_input_ids")
    assert batch_size(tensors(4, 3)) == (4, 3) and batch_size(pair) == (4, 12)
    assert batch_size({}) == batch_size(dict(input_ids=torch.ones(3))) == (0, 0)
    assert (computed_tokens(tensors(4, 3)), computed_tokens(pair)) == (12, 48)
    mask = torch.tensor([[1, 1, 0]] * 4)
    assert computed_tokens(pair | dict(chosen_attention_mask=mask)) == 8
    assert computed_tokens(pair | dict(chosen_attention_mask=0 * mask)) == 48
    assert computed_tokens(tensors(4, 3) | dict(attention_mask=mask)) == 12
    for rows, expected in (([1] * 4, 4), ([1] * 99, 6), ([1] * 6, 6), ([], 6), (iter([1]), 6)):
        assert estimate.rows_at_once(run_of(SimpleNamespace(rows=rows))) == expected
    assert estimate.rows_at_once(run_of(SimpleNamespace(batch_size=3, rows=[1] * 9))) == 3


@pytest.mark.parametrize(
    "expected, more",
    [
        (True, {}),
        (False, dict(folder=None)),
        (False, dict(async_save=False)),
        (False, dict(save_strategy="no")),
        (False, dict(save_steps=10)),
        (True, dict(save_steps=9)),
        (True, dict(save_strategy="epoch", save_steps=99, epoch_length=9)),
        (False, dict(save_strategy="epoch", save_steps=1, epoch_length=10)),
        (False, dict(save_strategy="epoch", save_steps=1)),
    ],
)
def test_whether_a_run_computes_while_it_saves(expected, more):
    assert estimate._saves(run_of(**{"folder": "runs", **more})) is expected


def test_the_other_batches_of_a_step_or_a_run():
    "Row i is i + 1 tokens wide; the largest batch is the first one."
    plan = [[9, 9], [1, 2], [3, 9], [1, 2], [0], [4, 5], [6, 7], [7, 8], [2, 3]]
    largest = tensors(2, 10)

    def widths(steps, count=1, batch=largest):
        batches = Batches(plan)
        others = estimate._others(
            run_of(batches, total_steps=steps, gradient_accumulation_steps=count), batch
        )
        assert batches._plan == "kept" or not others
        return [batch_size(other) for other in others]

    assert widths(7) == widths(15, batch=None) == []
    assert widths(8) == [(2, 3)]  # The first two batches
    assert widths(16) == [(2, 3)] and widths(24) == [(2, 3), (1, 1), (2, 6)]
    assert widths(40) == [(2, 3), (1, 1), (2, 6), (2, 8)] == widths(999)
    assert widths(8, 2) == [(2, 3)] and widths(1, 3) == [(2, 3)]  # Of a step, the first batches
    assert widths(1, 4) == [(2, 3), (2, 3)] == widths(1, 9)
    batches = Batches(plan)
    batches.cut = True
    assert estimate._others(run_of(batches, total_steps=99), largest) == []
    assert estimate._others(run_of(object(), total_steps=99), largest) == []


def test_the_sizes_of_batches_that_are_evaluated():
    plan = [[0, 1], [2, 3], [0, 1], [4, 5], [6, 7], [8]]
    batches = Batches(plan)
    found = estimate._evaluated(run_of(batches))
    assert [batch_size(batch) for batch in found] == [(1, 9), (2, 2), (2, 4), (2, 6)]
    assert batches._plan == "kept"
    for more, count in (
        (dict(eval_strategy="no"), 0),
        (dict(eval_steps=10), 0),
        (dict(eval_steps=9), 4),
        (dict(eval_strategy="epoch", eval_steps=10), 4),
        (dict(batches=object()), 0),
    ):
        assert len(estimate._evaluated(run_of(**{"batches": batches, **more}))) == count


def test_the_products_of_a_run_are_counted(monkeypatch):
    "Of 3 products one has the vocabulary in a shape: of it each pass has another."
    monkeypatch.setattr(estimate, "bound_kernels", lambda: 50)
    shapes = (((3, 4), (4, 7)), ((3, 90), (90, 4)), ((5, 6), (6, 3)))
    products = {("mm", (left, (1, 1)), (right, (1, 1))) for left, right in shapes}
    trainer = run_of(SimpleNamespace(widths=lambda passes: {*range(passes // 2)}), total_steps=6)
    trainer.model.config = SimpleNamespace(vocab_size=90)
    assert estimate.kernels_kept(trainer, tensors(2, 3), products) == 1 * 6 + 2 * 3
    trainer.config.gradient_accumulation_steps = 2
    assert estimate.kernels_kept(trainer, tensors(2, 3), products) == 1 * 12 + 2 * 6
    assert estimate.kernels_kept(trainer, tensors(2, 3, ("liked", 1)), products) == 3 * 12
    assert estimate.kernels_kept(trainer, tensors(2, 3, name="x"), products) == 3 * 12
    trainer.total_steps = 100
    assert estimate.kernels_kept(trainer, tensors(2, 3), products) == 50


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ([500_000, 700_000, 600_000], 600_000),
        ([10, 900_000, 141_000], 141_000),
        ([140_001, 10, 900_000], 140_001),
        ([140_000, 10, 900_000], 560_000),  # malloc tells too little
        ([0, 0, 0], 560_000),
    ],
)
def test_the_code_of_a_product_is_measured_three_times(sizes, expected, monkeypatch):
    used = iter([total for size in sizes for total in (1000, 1000 + size)])
    monkeypatch.setattr(estimate, "onednn_pays", lambda: True)
    monkeypatch.setattr(estimate, "malloc_used", lambda: next(used))
    assert estimate.product_memory.__wrapped__() == expected
    monkeypatch.setattr(estimate, "onednn_pays", lambda: False)
    assert estimate.product_memory.__wrapped__() == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux counts it")
def test_the_memory_of_this_process_is_what_the_system_says():
    import psutil

    expected = psutil.Process().memory_info().rss
    assert estimate.memory_used() == pytest.approx(expected, rel=0.05)
    peak = estimate.peak_memory_used()
    assert peak is not None and peak > 0.99 * expected
    reset = estimate.peak_memory_used(forget=True)
    assert reset == pytest.approx(expected, rel=0.05)


# --- what a run's watch notes


def watched(monkeypatch):
    watch, asked = estimate.MemoryWatch(), []
    monkeypatch.setattr(watch, "predict", lambda *args: asked.append(args[1:]))
    watch.before, watch.shared = 1, False
    return watch, asked


@pytest.mark.parametrize(
    "labels, more, as_text",
    [
        ([[5, 5, 5], [5, 5, 5]], {}, True),
        ([[-100, 5, 5], [-100, 5, 5]], {}, True),  # Of the first token nothing is learned anyway
        ([[5, 5, 5], [5, 5, -100]], {}, False),
        ([[5, 5, 5], [5, -101, 5]], {}, True),
        ([[5, 5, 5], [5, 5, 5]], dict(attention_mask=torch.ones(2, 3)), False),
    ],
)
def test_the_largest_batch_of_a_run_is_predicted_at_its_end(labels, more, as_text, monkeypatch):
    "Of running text its size is enough."
    watch, asked = watched(monkeypatch)
    batch = dict(input_ids=torch.ones(2, 3).long(), labels=torch.tensor(labels), **more)
    small = tensors(1, 5)
    monkeypatch.setattr(estimate, "peak_memory_used", lambda: 2**30 + 1)
    monkeypatch.setattr(estimate, "memory_used", lambda: 7)
    trainer = run_of()
    for batches in ([small, batch], [small]):
        trainer.step_batches = batches
        watch.on_step(trainer, {})
    assert (watch.most, watch.largest, watch.batch is batch) == (6, (2, 3), True)
    assert (watch.measured, watch.held) == (2**30, 7)
    watch.on_end(trainer, {})
    watch.on_end(trainer, dict(reason="an error: of some kind"))
    assert asked == [(2, 3, None if as_text else batch)]
    watch.known[2, 3, 6] = None
    watch.on_end(trainer, dict(reason="an error: of some kind"))
    assert len(asked) == 2
    watch.before = 0
    watch.on_end(trainer, {})
    assert len(asked) == 2


def test_the_peak_of_a_run_is_not_lower_than_before_it(monkeypatch):
    watch, asked = watched(monkeypatch)
    watch.highest, watch.predicted, watch.measured = 3 * 2**30, 2**29, None
    for seen, noted in ((2.0, 3.0), (4.0, 4.0)):
        record = dict(memory_peak_gib=seen)
        watch.on_log(run_of(), record)
        assert record == dict(memory_peak_gib=noted, step_memory_predicted_gib=0.5)
        record = dict(peaks=dict(memory_peak_gib=seen))
        watch.on_end(run_of(), record)
        assert record == dict(peaks=dict(memory_peak_gib=noted), step_memory_predicted_gib=0.5)
    assert asked == []  # No batch came
    monkeypatch.setattr(estimate, "trim_malloc", lambda: None)
    monkeypatch.setattr(estimate, "memory_used", lambda: 50)
    monkeypatch.setattr(estimate, "peak_memory_used", lambda forget=False: 80)
    watch.before, watch.highest, watch.held = 10, 70, 0
    watch.restart(run_of())
    assert (watch.before, watch.highest) == (10, 80)
    watch.held = 30
    watch.restart(run_of())
    assert watch.before == 10 + 50 - 30
    watch.held = 60
    watch.restart(run_of())
    assert watch.before == 30


def test_what_an_object_holds_is_emptied_four_levels_deep():
    "Weights go where they take no memory, gradients and the state of an optimizer vanish."
    from trainkit.memory.estimate import _empty

    layer, near, far = torch.nn.Linear(2, 2), torch.ones(3), torch.ones(3)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    weights = [*layer.parameters()]
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    near.grad = torch.ones(3)
    holder = SimpleNamespace(parts=[near, dict(far=[far])], optimizer=optimizer)
    _empty(holder, set())
    assert near.numel() == 0 and near.grad is None and not optimizer.state
    assert all(p.grad is None for p in weights) and far.numel() == 3
    _empty([[[[far]]]], set())
    assert far.numel() == 0
    _empty([layer], set())
    assert layer.weight.is_meta


def test_a_gpu_has_room_for_what_torch_has_reserved_and_does_not_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2)
    accelerator = SimpleNamespace(device=torch.device("cuda"))
    assert estimate.room(SimpleNamespace(accelerator=accelerator)) == (10, 3 + 2)


def test_what_a_step_takes_is_the_rise_of_the_peak(monkeypatch):
    peaks = iter([100, 350])
    monkeypatch.setattr(estimate, "peak_memory_used", lambda forget=False: next(peaks))
    assert estimate.measure_memory(lambda: None).seen == 250
