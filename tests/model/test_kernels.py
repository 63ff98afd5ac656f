"Decoding from packed weights: the numbers of the codes, in each format, rows and threads."

import os
import subprocess
import sys
import gc
import statistics
import weakref

import pytest
import torch
from support.processes import program
from torch import nn

from trainkit import ModelConfig, Transformer, generate
from trainkit.engine import Scheduler
from trainkit.model import kernels
from trainkit.model.attention import KVCache
from trainkit.model.decoding import DecodePlan

pytest.importorskip("numba")

SHAPE = dict(vocab_size=203, d_model=64, n_heads=4, n_kv_heads=2, n_layers=2, d_ff=96)
SHAPES = {
    "llama": {},
    "qwen3": dict(qk_norm=True, bias="qkv", head_dim=32, tie_embeddings=False),
    "gemma": dict(
        norm="rmsnorm1p", activation="geglu", scale_embeddings=True, logit_softcap=5.0, n_kv_heads=1
    ),
    "odd heads": dict(head_dim=24, n_kv_heads=4),  # No multiple of the numbers in a vector
}


def make(**options) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SHAPE, "max_seq_len": 64, **options})).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def rounded(model: Transformer, packed: kernels.PackedModel) -> Transformer:
    twin = Transformer(model.config).eval()
    twin.load_state_dict(model.state_dict())
    twin.lm_head.weight = nn.Parameter(packed.head.unpack())
    for block, matrices in zip(twin.model.layers, packed.matrices, strict=True):
        for path, matrix in zip(kernels.MATRICES, matrices, strict=True):
            block.get_submodule(path).weight = nn.Parameter(matrix.unpack())
    return twin


# Each format is compiled once on a machine, which takes some ten seconds
MORE = ("float32", "bfloat16", "int8", "q8_0")


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *((shape, "q4_0") for shape in SHAPES),
        *(pytest.param("llama", kind, marks=pytest.mark.slow) for kind in MORE),
    ],
)
def test_a_step_is_the_model_with_the_unpacked_numbers(shape, kind):
    model = make(**SHAPES[shape])
    packed = kernels.PackedModel(model, kind)
    caches = [KVCache(2, 50) for _ in range(2)]
    prompt = torch.randint(203, (6, 37))
    gaps = torch.tensor([0, 3, 0, 36, 20, 0])
    with torch.no_grad():
        for cache in caches:
            mask = (torch.arange(37) >= gaps[:, None]).long()
            model(prompt, attention_mask=mask, past_key_values=cache)
        integers = kernels.FORMATS[kind].integers
        product = (lambda w, rows: lambda x: kernels.round_groups(x) @ w.T) if integers else None
        plans = (
            kernels.PackedPlan(packed, caches[0], 6, gaps),
            DecodePlan(rounded(model, packed), caches[1], 6, gaps, product),
        )
        ids, far = torch.arange(6), []
        for _ in range(5):
            ours, plain = (plan.step(ids) for plan in plans)
            far += ((ours - plain).norm(dim=1) / plain.norm(dim=1)).tolist()
            ids = plain.argmax(-1)
        # Another order of sums may round a number of x the other way, which is a step of 1 / 127
        assert statistics.median(far) < 1e-5
        assert max(far) < (2e-2 if integers else 1e-5)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_every_instruction_gives_the_same_bits(kind):
    torch.manual_seed(0)
    matrix = kernels.TiledMatrix.from_weight(torch.randn(20, 64), kind)
    x, results = torch.randn(2, 64), []
    x[1, :32] = 0
    own = kernels.integer_instruction()
    others = {own, (own[0], min(own[1], 8)), ("", 4)}
    if own[0] == "vpdpbusd":  # Then it has the instructions of AVX2 too
        others.add(("pmaddubsw", 8))
    for instruction in others:
        functions = kernels.memory_functions() | dict(INTEGERS=True)
        names = "tile_eight", "tile_four", "tile_two", "tile_one"
        functions |= dict.fromkeys(names, kernels.integer_tile(kind, 1, instruction))
        shift = kernels._shift(kind, instruction[0])
        functions["quantize_group"] = kernels.group_quantizer(shift)
        parts = kernels.product_part, kernels.round_rows
        compiled = kernels.compile_kernels(
            parts, functions, f"test {kind} {instruction}", kernels.FREE_SUMS
        )
        y, blocks = torch.zeros(20), torch.zeros(2 * kernels.BLOCK, dtype=torch.uint8)
        for row in x:
            at = compiled.round_rows(row.data_ptr(), 0, blocks.data_ptr(), 0, 64, 1)
            addresses = (t.data_ptr() for t in (matrix.codes, matrix.scales))
            sizes = 64, *matrix.row_bytes, 0, 0, 0, 20, 1
            compiled.product_part(*addresses, at, y.data_ptr(), *sizes)
            want = kernels.round_groups(row) @ matrix.unpack().T
            assert (y - want).norm() <= 1e-6 * want.norm()
            results.append((instruction, y.tolist()))
    assert all(y in (results[0][1], results[1][1]) for _, y in results)


def test_a_packed_copy_is_used_again_until_the_weights_change():
    model = make()
    first = kernels.packed_copy(model, "q8_0")
    assert kernels.packed_copy(model, "q8_0") is first
    model.model.layers[0].mlp.up_proj.weight.data.neg_()  # Which autograd does not count
    second = kernels.packed_copy(model, "q8_0")
    assert second is not first
    assert kernels.packed_copy(model, "q4_0").kind == "q4_0"
    alive = weakref.ref(model)
    del model, first, second
    gc.collect()
    assert alive() is None


def test_threads_and_company_change_no_bit():
    model = make()
    packed = kernels.PackedModel(model, "q4_0")
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            plan = kernels.PackedPlan(packed, KVCache(2, 8), 1)
            results.append(torch.cat([plan.step(torch.tensor([i])) for i in range(8)]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_read_at_once_have_the_bits_of_single_steps(threads):
    packed = kernels.PackedModel(make(n_kv_heads=1), "q4_0")
    before = torch.get_num_threads()
    ids, plans = torch.randint(203, (30,)), []
    try:
        torch.set_num_threads(threads)
        plans = [kernels.PackedPlan(packed, KVCache(2, 30)) for _ in range(2)]
        single = torch.cat([plans[0].step(i[None]) for i in ids])
        together = torch.cat([plans[1].read(part) for part in ids.split([1, 5, 9, 15])])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(single, together)
    for ours, theirs in zip(plans[0].cache.keys, plans[1].cache.keys, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="is full"):
        plans[1].read(ids[:1])


def test_large_pages_change_no_number():
    numbers = torch.arange(2**22, dtype=torch.float32)
    kernels.use_large_pages([numbers[1:], numbers[:5], torch.zeros(3), numbers[2**20 : 2**21]])
    assert torch.equal(numbers, torch.arange(2**22, dtype=torch.float32))


def test_generate_and_the_scheduler_write_the_same_text():
    model = make()
    rows = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [3, 3]]
    packed = kernels.PackedModel(model, "q4_0")
    alone = [generate(model, row, 9, temperature=0, weights=packed) for row in rows]
    assert generate(model, rows, 9, temperature=0, weights=packed) == alone
    scheduler = Scheduler(model, rows=3, weights="q4_0")
    requests = scheduler.generate(rows, 9, temperature=0, eos_token_id=())
    assert [row + r.tokens for row, r in zip(rows, requests, strict=True)] == alone
    with torch.no_grad():
        model.lm_head.weight.neg_()
    scheduler.forget()
    [again] = scheduler.generate(rows[:1], 9, temperature=0, eos_token_id=())
    assert rows[0] + again.tokens == generate(model, rows[0], 9, temperature=0, weights="q4_0")
    assert rows[0] + again.tokens != alone[0]


def test_without_a_kernel_the_rounded_numbers_are_multiplied(monkeypatch):
    model = make()
    want = generate(model, [1, 2], 9, temperature=0, weights="q4_0")
    plain = generate(model, [1, 2], 9, temperature=0)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels.packing_reason(model) == "numba is not installed"
    assert generate(model, [1, 2], 9, temperature=0, weights="q4_0") == want
    assert generate(model, [1, 2], 9, temperature=0, weights="float32") == plain
    with pytest.raises(ValueError, match="numba is not installed"):
        Scheduler(model, rows=1, weights="q8_0")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(position="learned"), "position"),
        (dict(layer_windows=[4, 0]), "layer_windows"),
        (dict(layer_rope_theta=[1e4, 0.0]), "layer_rope_theta"),
        (dict(layer_rope_theta=[0.0, 0.0]), "layer_rope_theta"),
        (dict(d_ff=100), "multiples of 32"),
        (dict(attn_softcap=5.0), "attn_softcap"),
    ],
)
def test_what_has_no_kernel_is_named(options, reason):
    assert reason in kernels.packing_reason(make(**options))


def test_nan_in_a_weight_is_an_error_and_no_thread_waits_for_ever():
    model = make()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0] = torch.nan
    with pytest.raises((FloatingPointError, ValueError)):
        generate(model, [1, 2], 4, temperature=0, weights="q4_0")


FORK = """
import os, sys
from trainkit.model import kernels
kernels.in_threads(lambda number, count: None, 2)  # So there are threads
kernels._ONE_AT_A_TIME.acquire()  # As if another one were in a step
child, done = os.fork(), []
if not child:
    kernels.in_threads(lambda number, count: done.append(number), 2)
    os._exit(sorted(done) != [0, 1])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_has_threads_of_its_own(tmp_path):
    done = program(FORK, tmp_path)
    assert done.returncode == 0, done.stderr


# In a process of its own: what goes wrong here waits for ever
AT_ONCE = """
import threading

import torch
from trainkit import ModelConfig, Transformer
from trainkit.model import kernels
from trainkit.model.attention import KVCache

kernels._THREADS = 2  # Also where the machine has one processor
torch.set_num_threads(2)
torch.manual_seed(0)
packed = kernels.PackedModel(Transformer(ModelConfig(203, 64, 4, 2, 96)).eval(), "q4_0")


def logits(count):
    plan = kernels.PackedPlan(packed, KVCache(2, count), 1)
    return torch.cat([plan.step(torch.tensor([i])) for i in range(count)])


counts, equal = (20, 31, 20), []
wanted = [logits(count) for count in counts]


def compare(count, want):
    equal.extend(torch.equal(logits(count), want) for _ in range(40))


each = [threading.Thread(target=compare, args=a, daemon=True) for a in zip(counts, wanted)]
for thread in each:
    thread.start()
for thread in each:
    thread.join()
assert equal == [True] * 120, equal
"""


def test_several_threads_take_steps_with_one_packed_model(tmp_path):
    done = program(AT_ONCE, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_processor_without_conversion_of_halves_computes_the_same(tmp_path):
    "LLVM would call a function that is not there, and end the process."
    program = (
        "import torch; from trainkit import ModelConfig, Transformer, generate; "
        "torch.manual_seed(0); m = Transformer(ModelConfig(300, 64, 2, 1, 64)).eval(); "
        "print(generate(m, [1, 2], 20, temperature=0, weights='q8_0'))"
    )
    told = []
    for cpu in ({}, dict(NUMBA_CPU_NAME="generic")):
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **cpu}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(done.stdout.splitlines()[-1])
    assert told[0] == told[1]
