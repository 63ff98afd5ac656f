"A run on a CPU keeps what its steps free: the kernel's own count of page faults says so."

import json
import sys
from itertools import pairwise
from statistics import median

import pytest
import torch
from support.processes import in_child
from torch import nn


class Wide(nn.Module):
    "Makes a block that is larger than any that glibc keeps by itself."

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * torch.ones(12_000_000).mean() * x


def faults_of_a_run(keep):
    import resource
    from contextlib import nullcontext

    import trainkit.train.trainer
    from trainkit.train.objectives import Loss, objective
    from trainkit.train.config import TrainConfig

    if not keep:
        trainkit.train.trainer.keep_freed_memory = lambda wanted: nullcontext()
    counts = []

    class Count:
        def on_step(self, trainer, record):
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    @objective(counts=lambda batch: dict(mean=1))
    def loss(model, batch):
        return Loss(dict(mean=(model(batch["x"]).mean(), 1, 1.0)))

    trainkit.train.trainer.Trainer(
        Wide(),
        loss,
        [dict(x=torch.ones(1))] * 16,
        config=TrainConfig(max_steps=16, progress=False),
        callbacks=[Count()],
    ).train()
    print(median(after - before for before, after in pairwise(counts[3:])))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_steps_find_the_memory_of_the_step_before(tmp_path):
    """48 MB a step: without `keep_freed_memory` every step page-faults anew, with it few do.

    Another block may lie in the gap.
    """
    faults = {}
    for keep in (True, False):
        done = in_child(faults_of_a_run, keep, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        faults[keep] = float(done.stdout.split()[-1])
    assert faults[False] > 5 * faults[True] + 15, (
        faults
    )  # Some 24 where the kernel gives large pages by itself


def growth_of_products(environment):
    import json
    import os

    import torch

    from trainkit.model.transformer import fast_products, onednn_pays
    from trainkit.system import SHAPES_KEPT, bound_kernels, malloc_used

    for name in (
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "DNNL_PRIMITIVE_CACHE_CAPACITY",
        "LRU_CACHE_CAPACITY",
    ):
        os.environ.pop(name, None)
    os.environ.update(environment)
    pays, levels, x, weight = onednn_pays(), [], torch.randn(700, 64), torch.randn(64, 64)
    with torch.no_grad(), fast_products():
        for rows in range(100, 700):
            y = x[:rows] @ weight
            assert torch.allclose(y[-1], x[rows - 1] @ weight, atol=1e-4)
            levels.append(malloc_used() or 0)
    print(
        json.dumps(
            dict(
                pays=pays,
                grown=levels[-1] - levels[2 * SHAPES_KEPT],
                most=bound_kernels(),
                told={k: os.environ[k] for k in environment},
            )
        )
    )


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_code_for_products_does_not_grow_for_ever(tmp_path):
    "Six hundred shapes: after the store is full, nothing more is kept; a user's own bound stays."
    growth = {}
    mine = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    for name, environment in dict(ours={}, theirs=mine).items():
        done = in_child(growth_of_products, environment, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        growth[name] = json.loads(done.stdout.splitlines()[-1])
    assert (growth["ours"]["most"], growth["theirs"]["most"], growth["theirs"]["told"]) == (
        32,
        1024,
        mine,
    )
    if growth["ours"]["pays"] and growth["theirs"]["grown"]:  # Zero where this glibc does not tell
        assert growth["ours"]["grown"] < 10_000_000 < growth["theirs"]["grown"], growth


def growth_of_passes(limit):
    import json
    import random

    import torch

    from trainkit.memory.estimate import peak_memory_used
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import onednn_pays
    from trainkit.model.transformer import Transformer
    from trainkit.system import bound_kernels, keep_freed_memory

    if limit:
        bound_kernels(limit)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, levels = random.Random(0), []
    sizes = dict(d_model=128, n_heads=4, n_layers=3, d_ff=256, max_seq_len=512)
    model = Transformer(ModelConfig(vocab_size=512, **sizes))
    with keep_freed_memory():
        for _ in range(50):
            ids = torch.randint(0, 512, (1, rng.randint(200, 480)))
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad(set_to_none=True)
            levels.append(peak_memory_used() or 0)
    print(json.dumps(dict(pays=onednn_pays(), grown=levels[-1] - levels[9], most=bound_kernels())))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_passes_of_ever_other_widths_do_not_cut_up_the_memory(tmp_path):
    "Pairs are computed without padding, so each pass asks for other products than the one before."
    done = in_child(growth_of_passes, 0, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    if result["pays"]:
        assert result["grown"] < 25_000_000, result  # With 128 shapes kept it was 60 MB
