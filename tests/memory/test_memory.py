"Memory: predictions against torch's own tracker on real tensors, and memory that is given back."

import threading
import warnings

import pytest
import torch
from torch import nn

from support.peak import run_measured
from support.processes import in_child
from trainkit.train.optim import AdamW8bit
from trainkit.memory import tracker
from trainkit.memory.offload import OffloadedOptimizer
from trainkit.memory.tracker import Ledger
from trainkit.memory.estimate import (
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
