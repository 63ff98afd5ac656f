"A run on a CPU keeps what its steps free: the kernel's own count of page faults says so."
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

    def forward(self, x): return self.scale * torch.ones(12_000_000).mean() * x


def faults_of_a_run(kept):
    import resource
    from contextlib import nullcontext

    import trainkit.train.trainer
    from trainkit.train.objectives import Loss, objective
    from trainkit.train.config import TrainConfig
    if not kept: trainkit.train.trainer.kept_memory = lambda wanted: nullcontext()
    found = []
    class Count:
        def on_step(self, trainer, record): found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    @objective(counts=lambda batch: dict(mean=1))
    def loss(model, batch): return Loss(dict(mean=(model(batch['x']).mean(), 1, 1.)))
    trainkit.train.trainer.Trainer(Wide(), loss, [dict(x=torch.ones(1))]*16, config=TrainConfig(max_steps=16, progress=False), callbacks=[Count()]).train()
    print(median(after - before for before, after in pairwise(found[3:])))


@pytest.mark.skipif(sys.platform != 'linux', reason='glibc is the C library of Linux')
def test_steps_find_the_memory_of_the_step_before(tmp_path):
    "48 MB a step: without `kept_memory` each page is asked for again in every step, with it in few (another block may lie in the gap)."
    faults = {}
    for kept in (True, False):
        done = in_child(faults_of_a_run, kept, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        faults[kept] = float(done.stdout.split()[-1])
    assert faults[False] > 5*faults[True] + 15, faults # Some 24 where the kernel gives large pages by itself
