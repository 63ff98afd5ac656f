"The search for a setup that fits, where a step takes what a simple rule says."

import pytest
from support.snapshots import compare

from trainkit.memory import planner
from trainkit.memory.planner import MACHINES, Machine, Setup, find_machine, plan_memory
from trainkit.train.runs import data_hash

MB = 10**6


def bytes_of(setup):
    "Weights, moments and activations, each changed by its own lever."
    weights = 40 * MB if setup.lora_rank else 100 * MB
    weights = weights * (setup.bits or 16) // 16 if setup.lora_rank else weights
    moments = 0 if setup.offload else 10 * MB if setup.lora_rank else 200 * MB
    moments = moments // 4 if "8bit" in setup.optim else moments
    moments -= 30 * MB * setup.in_backward * (not setup.lora_rank)
    rows = setup.batch_size * setup.seq_len * (20_000 if setup.checkpointing else 80_000)
    rows = rows // 2 if setup.mixed_precision != "no" else rows
    return weights + moments + rows + (not setup.chunked_loss) * setup.batch_size * MB


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.setattr(
        planner,
        "predict_setup",
        lambda model, setup: type("Report", (), {"peak": bytes_of(setup)})(),
    )


def test_the_levers_are_pulled_in_order(rule):
    lines = []
    for megabytes in (900, 628, 627, 500, 380, 330, 300, 250, 200, 150, 120, 100, 60, 30, 5):
        for start in (Setup(), Setup(batch_size=6, seq_len=100, accumulation=3, chunked_loss=True)):
            names = []
            plan = plan_memory(
                None, megabytes * MB, start, progress=lambda *bar, to=names: to.append(bar)
            )
            assert names == plan.waterfall[1:]
            lines.append(f"{megabytes} MB from {start}\n{plan}\n{plan.levers} {plan.fits}\n\n")
    for levers in (["accumulate"], ["checkpointing"], ["shorter rows"], ["LoRA", "4 bits"], []):
        levers = [name for name in levers if name in planner.LEVERS]
        plan = plan_memory(None, 200 * MB, Setup(), levers)
        lines.append(f"only {levers}\n{plan}\n\n")
    for cards in (1, 2, 3):
        machine = Machine(1, cards, "fp16")
        plan = plan_memory(None, machine, Setup(batch_size=64, seq_len=400))
        lines.append(f"{cards} cards\n{plan}\n\n")
    compare("".join(lines), "waterfalls.txt")


def test_each_prediction_is_announced(rule):
    said: list[str] = []
    plan = plan_memory(None, 300 * MB, Setup(), before=said.append)
    assert said[:2] == ["as asked", "accumulate"]
    assert {*said} == {name for name, _ in plan.waterfall} | {*plan.skipped}


def test_a_lever_and_a_machine_by_name(rule):
    with pytest.raises(ValueError, match="no lever 'LORA'; there are .*Did you mean 'LoRA'"):
        plan_memory(None, 1, Setup(), ["LORA"])
    lines = [f"{name}: {machine.usable} {machine}\n" for name, machine in MACHINES.items()]
    for text in (
        "t4",
        "rtx3060",
        "RTX-3060",
        "A100 40",
        "1 GB",
        "1.5GiB",
        10**9,
        "0",
        -1,
        "t5",
        "x",
    ):
        try:
            lines.append(f"{text!r}: {find_machine(text).usable}\n")
        except ValueError as error:
            lines.append(f"{text!r}: ValueError {error}\n")
    assert find_machine(MACHINES["T4"]) is MACHINES["T4"]
    compare("".join(lines), "machines.txt")


def test_a_fingerprint_of_data_never_changes():
    import torch

    items = ["ab", b"c", {"b": 1, "a": "é"}, torch.arange(3), ["x"]]
    assert [data_hash([item]) for item in items] == [
        "5dff2b3fa79721a8",
        "eca8daf67b07b6ec",
        "b5060f27f53274f5",
        "087a8bd09e888af3",
        "a1576c0a006ed08e",
    ]
    assert data_hash(["ab", "c"]) != data_hash(["a", "bc"]) != data_hash(["a", "b", "c"])
