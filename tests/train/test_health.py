"Health checks and the monitor: faults are found, healthy runs pass, the machine is watched."

import argparse
import json
import math
import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainkit.data.readers import read_text
from trainkit.train import monitors
from trainkit.train.monitors import CHECKS, HealthCheck, check_health
from trainkit.model.config import ModelConfig, count_flops
from trainkit.model.transformer import Transformer
from trainkit.train.monitors import EnergyMeter, SystemMonitor, flops_of, open_gpu
from trainkit.train.objectives import Loss, lm_loss, objective
from trainkit.train.optim import OptimConfig
from trainkit.train.config import TrainConfig
from trainkit.train.reports import write_report
from trainkit.train.runs import RunFolder, read_run
from trainkit.train.loggers import MetricsLog
from trainkit.train.trainer import Trainer
from trainkit.train.config import TrainingError

CONFIG = ModelConfig(vocab_size=128, d_model=32, n_heads=2, n_layers=1, d_ff=96, max_seq_len=64)


def batches(count, seed=0, rows=8, length=32, first=0, last=90_000):
    text = torch.tensor(list(read_text(argparse.__file__).encode()))[first:last]
    starts = torch.randint(
        0, len(text) - length, (count, rows), generator=torch.Generator().manual_seed(seed)
    )
    return [dict(input_ids=w, labels=w) for w in text[starts[..., None] + torch.arange(length)]]


def trainer(
    steps=60, data=None, callbacks=(), objective=lm_loss, seed=0, optim=None, model=None, **knobs
):
    torch.manual_seed(seed)
    return Trainer(
        model or Transformer(CONFIG),
        objective,
        data or batches(steps, seed),
        batches(3, rows=32, first=92_000, last=None),
        TrainConfig(max_steps=steps, **dict(logging_steps=2, progress=False) | knobs),
        callbacks,
        OptimConfig(**dict(learning_rate=1e-2, warmup_steps=10) | (optim or {})),
    )


def checks_of(history):
    "Every check that speaks at any moment of a run."
    return {f.name for n in range(len(history)) for f in check_health(history[: n + 1])}


# What the tables of symptoms of other toolkits list, and the check that covers it here. The
# record shows that it fires; the lessons show the same on runs that have the fault.
FALL = [4 - 0.05 * i for i in range(40)]
TABLE = {
    "overfitting: training loss falls, evaluation loss rises": (
        "overfitting",
        [
            r
            for i, loss in enumerate(FALL)
            for r in (dict(step=i, loss=loss), dict(step=i, eval_loss=3 + 0.02 * (i - 10) ** 2))
        ],
    ),
    "underfitting: both stay high": (
        "plateau",
        [dict(step=i, loss=3.5 + (i == 0), learning_rate=1e-3) for i in range(40)],
    ),
    "NaN loss": (
        "not_a_number",
        [dict(step=i, loss=2.0) for i in range(9)] + [dict(step=9, loss=math.nan)],
    ),
    "poor convergence: the loss rises": (
        "rising_loss",
        [dict(step=i, loss=4 - 0.1 * min(i, 10) + 0.1 * max(0, i - 10)) for i in range(40)],
    ),
    "poor convergence: the learning rate is too small": (
        "small_rate",
        [dict(step=i, loss=4.0, learning_rate=1e-9) for i in range(20)],
    ),
    "poor results: the loss has stopped falling": (
        "plateau",
        [dict(step=i, loss=max(2.0, 4 - 0.1 * i), learning_rate=1e-3) for i in range(99)],
    ),
    "gradient explosion": (
        "exploding_gradient",
        [dict(step=i, loss=2.0, grad_norm=1.0 + 99.0 * (i == 30)) for i in range(31)],
    ),
    "vanishing gradient": (
        "vanishing_gradient",
        [
            dict(step=i, loss=3.0 - 0.01 * min(i, 20), grad_norm=1.0 if i < 20 else 1e-5)
            for i in range(40)
        ],
    ),
    "half precision overflows": (
        "skipped_steps",
        [dict(step=10 * i, loss=FALL[i], skipped_steps=3 * i) for i in range(20)],
    ),
    "slow: the loop waits for data": (
        "waiting_for_data",
        [dict(step=i, loss=FALL[i], data_share=0.6) for i in range(9)],
    ),
    "slow: the GPU is idle": (
        "idle_gpu",
        [dict(step=i, loss=FALL[i], gpu_utilization=12.0) for i in range(9)],
    ),
    "out of memory after hours": (
        "creeping_memory",
        [dict(step=i, loss=FALL[i], memory_gib=1 + 0.02 * i) for i in range(40)],
    ),
}


@pytest.mark.parametrize("symptom", TABLE)
def test_each_symptom_has_a_check(symptom):
    name, records = TABLE[symptom]
    findings = {f.name: f for f in check_health(records)}
    assert name in findings
    finding = findings[name]
    assert (
        finding.symptom
        and finding.evidence
        and finding.remedy
        and finding.step in range(records[-1]["step"] + 1)
    )
    if any(c.isdigit() for c in finding.evidence):
        return
    assert name == "not_a_number"  # every other one shows numbers


def test_no_check_without_a_symptom():
    assert {name for name, _ in TABLE.values()} == set(CHECKS)


def test_a_gradient_that_cannot_come_through_is_said_and_one_that_is_not_needed_is_not():
    "An objective that blocks nearly all gradient, and a model that needs none any more."

    @objective(counts=lm_loss.counts)
    def shut(model, batch):
        total, count, weight = lm_loss(model, batch).terms["loss"]
        return Loss({"loss": (total.detach() + 1e-9 * (total - total.detach()), count, weight)})

    findings = {f.name: f for f in check_health(trainer(30, objective=shut).train().history)}
    assert "from the beginning" in findings["vanishing_gradient"].evidence, findings
    assert "vanishing_gradient" not in checks_of(trainer(30).train().history)
    learned = [dict(step=i, loss=4 * 0.8**i, grad_norm=0.7**i) for i in range(60)]
    by_nature = [
        dict(step=i, loss=1e-9 * (-1) ** i, grad_norm=1e-9) for i in range(40)
    ]  # As of grpo where all answers earn the same
    for records in (learned, by_nature):
        assert "vanishing_gradient" not in checks_of(records)


def test_healthy_records_stay_silent():
    "Noise of every size, few records and many, fast and slow learning; looked at again and again."
    draw, loud = random.Random(1), []
    for i in range(30):
        n, sigma, tau = (
            draw.choice((50, 150, 600)),
            draw.choice((0.02, 0.1, 0.3)),
            draw.choice((2, 5, 20)),
        )

        def loss(j, n=n, tau=tau):
            return 2 + 2.5 * math.exp(-j * tau / n) - 0.3 * math.log1p(5 * j / n)

        history = [
            dict(
                step=j + 1,
                loss=loss(j) + draw.gauss(0, sigma),
                learning_rate=1e-3,
                grad_norm=math.exp(draw.gauss(0, 0.3)),
                skipped_steps=min(j, 3),
                data_share=0.05,
                gpu_utilization=90 + draw.gauss(0, 3),
                memory_gib=2 - 1 / (j + 1) + draw.gauss(0, 0.003),
            )
            for j in range(n)
        ]
        loud += [
            (i, f.name, f.step)
            for k in range(0, n, 1 + n // 60)
            for f in check_health(history[: k + 1])
        ]
    assert loud == []


@pytest.mark.slow
def test_healthy_runs_stay_silent():
    loud = {}
    for seed in range(18):
        schedule = ("linear", "cosine", "constant_with_warmup")[seed % 3]
        t = trainer(
            (100, 150, 300)[seed // 3 % 3],
            seed=seed,
            max_grad_norm=float(seed % 2),
            eval_strategy="steps",
            eval_steps=20,
            logging_steps=(1, 2, 5)[seed // 2 % 3],
            optim=dict(learning_rate=(3e-3, 1e-2)[seed // 9], lr_scheduler_type=schedule),
        )
        t.train()
        if findings := checks_of(t.history):
            loud[seed] = findings
    assert loud == {}


def test_a_slow_loader_is_found_on_a_real_run():
    class Slow(list):
        def __iter__(self):
            took = 0.01
            for batch in super().__iter__():
                time.sleep(3 * took)  # however slow the machine is just now
                began = time.perf_counter()
                yield batch
                took = time.perf_counter() - began

    t = trainer(16, Slow(batches(16)), watch := [HealthCheck(lambda line: None)])
    t.train()
    assert [f.name for f in watch[0].findings] == ["waiting_for_data"]


def test_a_loss_that_breaks_is_said_and_kept(tmp_path):
    "The callback warns once, the folder keeps it with its step, and reading repeats it."
    lines = []

    def bad(model, batch):
        loss = lm_loss(model, batch)
        return (
            loss
            if next(count) < 9
            else type(loss)({k: (s * math.nan, n, w) for k, (s, n, w) in loss.terms.items()})
        )

    count = iter(range(99))
    folder = RunFolder(tmp_path / "run")
    t = trainer(20, callbacks=[MetricsLog(folder), HealthCheck(lines.append)], objective=bad)
    with pytest.raises(TrainingError):
        t.train()
    assert len(lines) == 1 and "is NaN" in lines[0] and "checkpoint" in lines[0]
    records = read_run(folder.path).records
    (event,) = (r for r in records if r["event"] == "health")
    assert event["name"] == "not_a_number" and event["step"] == 10 and event["remedy"]
    assert [f.name for f in check_health(records)] == ["not_a_number"]
    assert "Health: The loss is NaN" in (folder.path / "log.txt").read_text()


def test_a_long_run_is_not_looked_at_over_and_over():
    "Work grows with the length of the run, not with its square."
    seen = []
    watch = HealthCheck(seen.append, {"count": lambda records: seen.append(len(records))})
    for step in range(50_000):
        watch.on_log(None, dict(step=step, loss=1.0))
    looks = [n for n in seen if isinstance(n, int)]
    assert sum(looks) < 50_000 and max(looks) <= 256
    assert watch.records[-1]["step"] > 49_000 and watch.records[0]["step"] < 1000


def test_each_finding_is_said_once():
    lines = []
    watch = HealthCheck(lines.append)
    for i in range(400):
        watch.on_log(None, dict(step=i, loss=4 - 0.1 * min(i, 10) + 0.02 * max(0, i - 10)))
    assert sum("The loss rises" in line for line in lines) == 1


# The monitor


def models():
    from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, Qwen3Config

    kw = dict(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    for config in (
        Qwen3Config(**kw),
        Gemma2Config(**kw),
        GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    ):
        yield AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for model in models():
        ids = torch.zeros(3, 100, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        assert 3 * flops_of(model)(3, 100) == pytest.approx(counter.get_total_flops(), rel=0.01), (
            type(model).__name__
        )
        assert all(p.device.type == "cpu" for p in model.parameters())


def fake_nvml(fail_after=10**9):
    calls = iter(range(10**9))

    def rates(handle):
        if next(calls) >= fail_after:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(gpu=93, memory=40)

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUtilizationRates=rates,
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(used=20 * 2**30),
        nvmlDeviceGetPowerUsage=lambda h: 287_500,
    )


def no_thread():
    return not any(t.name == "monitor" for t in threading.enumerate())


def test_monitor_in_a_run(tmp_path):
    "Its numbers reach log, history and checks, its peaks the last record; the model is the same."
    folder = RunFolder(tmp_path / "run")
    t = trainer(12, callbacks=[SystemMonitor(every=0.02, nvml=fake_nvml()), MetricsLog(folder)])
    t.train()
    bare = trainer(12)
    bare.train()
    assert all(
        torch.equal(a, b)
        for a, b in zip(t.model.parameters(), bare.model.parameters(), strict=True)
    )
    run = read_run(folder.path)
    for key in (
        "gpu_utilization",
        "gpu_memory_used_gib",
        "gpu_power_watts",
        "cpu_percent",
        "memory_gib",
        "samples_per_second",
        "mfu",
    ):
        assert len(run.series(key)[0]) == 6, key
        assert key in t.history[-1]
    for a, b in zip(
        run.series("tokens_per_second")[1], run.series("samples_per_second")[1], strict=True
    ):
        assert a / b == pytest.approx(32)
    end = run.records[-1]
    assert (
        end["event"] == "end"
        and end["peaks"]["gpu_utilization"] == 93
        and end["peaks"]["memory_gib"] >= max(run.series("memory_gib")[1]) - 1e-9
    )
    assert run.records[0]["monitor"] == "cuda" and no_thread()
    json.dumps(run.final())


def write_zone(folder, name, microjoules, most=262_143_328_850):
    "A folder of Linux's powercap, in its format."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")


@pytest.mark.parametrize(
    "zones, joules, seen",
    [
        ({"intel-rapl:0": "package-0"}, 5, "RAPL (package-0)"),
        ({"intel-rapl:0": "package-0", "intel-rapl:1": "package-1"}, 10, "package-0, package-1"),
        ({"intel-rapl:0": "package-0", "intel-rapl:0:0": "core"}, 5, "RAPL (package-0)"),
        ({"intel-rapl:0": "package-0", "intel-rapl:0:2": "dram"}, 10, "package-0, dram"),
        ({"intel-rapl:0": "package-0", "intel-rapl:1": "psys"}, 5, "RAPL (package-0)"),
        ({"intel-rapl:0": "psys"}, 5, "RAPL (psys)"),
        ({"intel-rapl:0": "package-0", "intel-rapl-mmio:0": "package-0"}, 5, "RAPL (package-0)"),
    ],
)
def test_each_joule_is_counted_once(tmp_path, zones, joules, seen):
    "Whatever zones a machine has: 5 J in each of them, and a counter that wraps."
    for folder, name in zones.items():
        write_zone(tmp_path / folder, name, 9_000_000, most=10_000_000)
    meter = EnergyMeter(powercap=tmp_path)
    for folder, name in zones.items():
        write_zone(tmp_path / folder, name, 4_000_000, most=10_000_000)
    assert meter.read()["cpu_joules"] == pytest.approx(joules) and seen in meter.sees
    assert meter.read()["cpu_joules"] == pytest.approx(joules)  # Nothing more was taken


def test_why_there_is_no_energy(tmp_path, monkeypatch):
    "No folder, a virtual machine's empty one, and a counter that only root may read."
    for folder in (tmp_path / "none", tmp_path):
        meter = EnergyMeter(powercap=folder)
        assert meter.read() == {} and f"no RAPL counter in {folder}" in meter.sees
    write_zone(tmp_path / "intel-rapl:0", "package-0", 1)
    real = Path.read_text

    def guarded(path, *args, **knobs):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **knobs)

    monkeypatch.setattr(Path, "read_text", guarded)
    meter = EnergyMeter(powercap=tmp_path)
    assert meter.read() == {} and "energy_uj may be read by root only" in meter.sees


def test_energy_of_a_gpu(tmp_path):
    "By its counter of millijoules; without one, by its power over time; broken, not at all."
    values = iter([1000, 3500])
    with_counter = fake_nvml()
    with_counter.nvmlDeviceGetTotalEnergyConsumption = lambda h: next(values)
    assert EnergyMeter(with_counter, tmp_path).read() == {"gpu_joules": 2.5}
    meter = EnergyMeter(fake_nvml(), tmp_path)
    meter.clock -= 10
    assert meter.read()["gpu_joules"] == pytest.approx(2875, rel=1e-2)
    blind = fake_nvml()
    del blind.nvmlDeviceGetPowerUsage
    assert EnergyMeter(blind, tmp_path).totals == {}


def test_flops_and_energy_of_a_run_stand_in_its_report(tmp_path, monkeypatch):
    "Cumulative in the log, summed over resumes in the report; without a meter it says so."
    zone = tmp_path / "powercap" / "intel-rapl:0"
    write_zone(zone, "package-0", 0)
    monkeypatch.setattr(monitors, "POWERCAP", str(zone.parent))

    class Works:
        def on_step(self, trainer, record):
            write_zone(zone, "package-0", int((zone / "energy_uj").read_text()) + 1_000_000)
            if trainer.state.step == self.last:
                trainer.control.stop()

    folder = RunFolder(tmp_path / "run")

    for last in (6, 10):
        works = Works()
        works.last = last
        callbacks = [works, SystemMonitor(every=9), MetricsLog(folder)]
        parts = trainer(10, callbacks=callbacks, output_dir=str(tmp_path / "run"), save_steps=2)
        parts.train(resume="auto")
    found = read_run(folder.path)
    flops = 3 * count_flops(CONFIG, 8, 32)
    assert found.series("flops")[1][:3] == [2 * flops, 4 * flops, 6 * flops]
    assert found.series("cpu_joules")[1] == pytest.approx([2, 4, 6, 2, 4])
    assert found.total_spent("flops") == 10 * flops
    assert found.total_spent("cpu_joules") == pytest.approx(10)
    page = write_report(folder.path).read_text()
    assert "RAPL (package-0)" in page and "energy of the processor, kJ" in page
    monkeypatch.setattr(monitors, "POWERCAP", str(tmp_path / "none"))
    bare = RunFolder(tmp_path / "bare")
    trainer(2, callbacks=[SystemMonitor(every=9), MetricsLog(bare)]).train()
    page = write_report(bare.path).read_text()
    assert "not measured: no RAPL counter in" in page and "energy of the" not in page


def test_monitor_counts_what_is_trained():
    "Frozen weights save a third of the work, nearly."
    factors = []
    for frozen in (False, True):
        model = Transformer(CONFIG)
        for name, p in model.named_parameters():
            p.requires_grad = not frozen or "norm" in name
        monitor = SystemMonitor(peak_flops=1e9)
        trainer(2, model=model, callbacks=[monitor]).train()
        factors.append(monitor.passes)
    assert factors[0] == 3 and 2 < factors[1] < 2.02


def test_a_gpu_that_goes_away_does_not_end_the_run():
    t = trainer(30, callbacks=[SystemMonitor(every=0.005, nvml=fake_nvml(fail_after=3))])
    assert t.train().steps == 30 and no_thread()


class Fails:
    "A callback that fails when it hears of one event."

    def __init__(self, event):
        setattr(self, event, self.fail)

    def fail(self, trainer, record):
        raise OSError("no right to write there")


@pytest.mark.parametrize("event", ["on_start", "on_log", "on_save", "on_end"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_callback_that_fails_leaves_no_thread_behind(tmp_path, event, place):
    """Each callback that saw the start sees the end once, and the error is the failure's.

    Wherever the failing one stands, and whichever of its methods fails.
    """

    class Told:
        def __init__(self):
            self.events = []

        def on_start(self, trainer, record):
            self.events.append("start")

        def on_end(self, trainer, record):
            self.events.append("end")

    callbacks, heard, last = (
        [SystemMonitor(every=0.005, nvml=fake_nvml()), MetricsLog(RunFolder(tmp_path / "run"))],
        Told(),
        Told(),
    )
    t = trainer(
        4,
        callbacks=[*callbacks[:place], Fails(event), *callbacks[place:], heard],
        output_dir=str(tmp_path / "run"),
    )
    t.callbacks = [heard, *t.callbacks[:-1], last]
    with pytest.raises(OSError, match="no right to write there"):
        t.train()
    assert no_thread() and heard.events == ["start", "end"]
    assert last.events == (
        [] if event == "on_start" else ["start", "end"]
    )  # who has not heard of the start hears of no end
    assert t.control.state == "idle"
    t.callbacks = [c for c in t.callbacks if not isinstance(c, Fails)]
    assert (
        t.train(resume="auto").steps == 4 and heard.events[2:] == ["start", "end"] and no_thread()
    )


def test_callbacks_that_fail_at_the_end_are_all_named():
    class Loses:
        def on_step(self, trainer, record):
            raise KeyError("of the run")

    t = trainer(
        4, callbacks=[Fails("on_end"), SystemMonitor(nvml=fake_nvml()), Fails("on_end"), Loses()]
    )
    with pytest.raises(KeyError, match="of the run") as caught:
        t.train()
    assert (
        any("failed at the end, too: OSError: no right" in note for note in caught.value.__notes__)
        and no_thread()
    )


def test_monitor_of_a_model_that_nobody_knows():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Transformer(CONFIG)

        def forward(self, *args, **kw):
            return self.inner(*args, **kw)

    t = trainer(4, model=Odd(), callbacks=[SystemMonitor()])
    record = t.train().history[-1]
    assert record["samples_per_second"] > 0 and "mfu" not in record


def test_no_gpu_no_library(monkeypatch):
    if not torch.cuda.is_available():
        assert open_gpu() == (None, "cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    if not torch.cuda.is_available():
        assert "limited" in open_gpu()[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert open_gpu()[0] is None and "pip install nvidia-ml-py" in open_gpu()[1]


def test_a_model_that_writes_its_own_batches_does_not_wait_for_data():
    "In RL most of the time is generation, which no data worker can take over."
    records = [dict(step=i, loss=0.1, data_share=0.6, completion_length=12.0) for i in range(9)]
    assert (
        not check_health(records)
        and check_health([{**r, "completion_length": None} for r in records])[0].name
        == "waiting_for_data"
    )
    records = [dict(step=i, loss=0.1, data_share=0.6, on_policy=0.5) for i in range(9)]
    assert not check_health(records)
    assert check_health([r | dict(on_policy=0.0) for r in records])


@pytest.mark.parametrize("platform, unit", [("linux", 1024), ("darwin", 1)])
def test_peak_memory_of_any_system_is_in_gib(platform, unit, monkeypatch):
    "`getrusage` counts kilobytes, on macOS bytes."
    import resource

    peak = SimpleNamespace(ru_maxrss=512 * 2**30 // unit)
    monkeypatch.setattr(monitors.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: peak)
    assert monitors.usage()["memory_peak_gib"] == 512


def test_each_look_sees_the_latest_record_once():
    "Also of a long run, of which every second record is kept, and later every fourth."
    looks = []
    watch = HealthCheck(lambda line: None, {"steps": lambda rs: looks.append([*rs]) or None})
    run = SimpleNamespace(state=SimpleNamespace(step=0))
    for step in range(1, 2001):
        before = len(looks)
        watch.on_log(run, dict(step=step, loss=1.0))
        if len(looks) > before:
            assert sum(record["step"] == step for record in looks[-1]) == 1
    assert [look[-1]["step"] for look in looks[:20]] == [*range(1, 21)]
    gaps = [b[-1]["step"] - a[-1]["step"] for a, b in pairwise(looks)]
    assert all(
        gap <= max(1, look[-1]["step"] // 16) for gap, look in zip(gaps, looks, strict=False)
    )
    assert max(map(len, looks)) <= 257
