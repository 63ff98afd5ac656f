"Where each symptom of a run begins: numbers on both sides of every bound."

import time
from types import SimpleNamespace

from support.snapshots import compare

from trainkit.train import monitors as m
from trainkit.train import trainer as loop
from trainkit.train.sharding import zero_settings


def log(every=10, **columns):
    "Records from columns of numbers; None is a number that was not logged."
    length = max(map(len, columns.values()))
    return [
        dict(step=every * (i + 1))
        | {k: v[i] for k, v in columns.items() if i < len(v) and v[i] is not None}
        for i in range(length)
    ]


FALL = [4 * 0.95**i for i in range(40)]
JITTER = [(-1) ** (i * (i + 1) // 2) * 0.01 for i in range(60)]


def losses():
    for n, top in [(5, 9), (6, 3.0), (6, 3.01), (6, 9)]:
        yield m.rising_loss, f"{n} of {top}", log(loss=[2.0] * (n - 3) + [top] * 3)
    for n, up in [(19, 2), (20, 0), (20, 0.06), (20, 0.07), (20, 0.5), (60, 0.5)]:
        flat = [2.0] * (n // 2) + [2.0 + up] * (n - n // 2)
        yield m.rising_loss, f"{n} and {up} more", log(loss=flat)
    for up in (0.2, 0.22, 0.24, 0.26, 0.28):
        noisy = [1 + 9 * JITTER[i] + up * (i > 20) for i in range(40)]
        yield m.rising_loss, f"noise and {up} more", log(loss=noisy)
    for evals in (
        [3, 2],
        [3, 2, 2.1],
        [2, 2.1, 2.1],
        [2, 2.01, 2.03],
        [2, 2.02, 2.03],
        [3, 2, 2.5, 2.1, 2.5],
    ):
        yield m.overfitting, str(evals), log(eval_loss=evals, loss=FALL[: len(evals)])
    yield m.overfitting, "both rise", log(eval_loss=[2, 2.5, 2.6], loss=[1, 2, 3])
    yield m.overfitting, "longer", log(eval_loss=[None, None, 3, 2, 4, 5], loss=FALL[:9])
    for rate, n in [(0, 6), (1.9e-7, 6), (2e-7, 6), (1e-7, 5)]:
        yield m.small_rate, f"{n} of {rate}", log(learning_rate=[rate] * n, loss=FALL[:n])
    yield m.small_rate, "rising", log(learning_rate=[i * 1e-8 for i in range(8)], loss=FALL[:8])
    yield m.small_rate, "few losses", log(learning_rate=[1e-8] * 8, loss=FALL[:5])
    for n, late in [(22, 2.0), (23, 2.0), (24, 2.0), (24, 0.029), (24, 0.031), (30, 0.03)]:
        half = n // 2
        yield m.plateau, f"{n} at {late}", log(loss=[3.0] * half + [late] * (n - half))
    for slope in (0.0005, 0.0006, 0.0007, 0.0008, 0.0009, 0.001):
        still = [3.0] * 20 + [2 - slope * i for i in range(20)]
        yield m.plateau, f"slope {slope}", log(loss=still)
    for end in (1.1e-4, 1e-4, 0.9e-4):
        rates = [1e-3] * 39 + [end]
        yield m.plateau, f"rate {end}", log(loss=[3.0] * 20 + [2.0] * 20, learning_rate=rates)
    for key, value in [("loss", float("nan")), ("eval_loss", float("inf")), ("loss", "nan")]:
        yield m.not_a_number, f"{key} {value}", log(loss=[1, 2])[:1] + [{"step": 7, key: value}]
    for reason in ("TrainingError: loss is nan.\nmore", "TrainingError: late", "Interrupt nan"):
        yield m.not_a_number, reason.splitlines()[0], [dict(step=3, reason=reason)]


def gradients():
    for n in (9, 10, 40, 48):
        for now in (2e-6, 1e-6, 0.9e-6):
            norms = [1.0] * (n - max(5, n // 8)) + [now] * max(5, n // 8)
            yield m.vanishing_gradient, f"{n} {now}", log(grad_norm=norms, loss=[3.0] * n)
    for ratio in (1.1e-3, 1e-3):
        norms = [5.0] * 35 + [5 * ratio] * 5
        yield m.vanishing_gradient, f"ratio {ratio}", log(grad_norm=norms, loss=[3.0] * 40)
    for now in (1.1e-6, 1e-6):
        norms = [1e-5] * 7 + [now] * 5
        yield m.vanishing_gradient, f"small {now}", log(grad_norm=norms, loss=[3.0] * 12)
    for now in (0.29, 0.31):
        yield (
            m.vanishing_gradient,
            f"loss {now}",
            log(grad_norm=[1e-7] * 12, loss=[3.0] * 9 + [now] * 3),
        )
    yield m.vanishing_gradient, "loss 0", log(grad_norm=[1e-7] * 12, loss=[0.005] * 9 + [9e-4] * 3)
    for n, now in [(6, 9), (7, 9), (8, 9), (8, 6), (8, 6.1), (40, 9)]:
        yield m.exploding_gradient, f"{n} {now}", log(grad_norm=[1.0] * (n - 1) + [now])
    for high in (4.4, 4.5, 4.6):
        norms = [1.0] * 20 + [high] + [1.0] * 10 + [9.0, 1.0]
        yield m.exploding_gradient, f"after {high}", log(grad_norm=norms)
    yield m.exploding_gradient, "nothing before", log(grad_norm=[0.0] * 12 + [9.0])


def machines():
    for every, n in [(13, 2), (13, 3), (14, 2), (14, 3), (19, 2), (20, 2), (20, 3)]:
        counts = [0, 1, 30][-n:]
        yield m.skipped_steps, f"{n} at {every}", log(every, skipped_steps=counts)
    for lost in (0, 1, 2, 3):
        counts = [5 + i * lost / 5 for i in range(11)]
        yield m.skipped_steps, f"{lost} in 50", log(skipped_steps=counts)
    for shares in (
        [0.3] * 3,
        [0.3] * 4,
        [0.9] + [0.24] * 4,
        [0.1] * 4 + [0.25] * 4,
        [0, 0.2, 0.3, 1],
    ):
        yield m.waiting_for_data, str(shares), log(data_share=shares)
    yield m.waiting_for_data, "answers", log(data_share=[0.5] * 4, completion_length=[3])
    for busy in ([9] * 4, [9] * 5, [90] + [60] * 5, [90] * 9 + [59] * 5, [59] * 9 + [90] * 5):
        yield m.idle_gpu, f"{busy[0]} {busy[-1]} {len(busy)}", log(gpu_utilization=busy)
    for key in ("gpu_memory_gib", "memory_gib"):
        for n, rise in [(14, 0.1), (15, 0.1), (16, 0.1), (16, 0.007), (16, 0.008)]:
            used = [1 + rise * i for i in range(n)]
            yield m.creeping_memory, f"{key} {n} {rise}", log(**{key: used})
    for flat in (2, 3, 4):
        used, level = [1.0] * 10, 1.0
        for i in range(10):
            level += 0.1 * (i >= flat)
            used.append(level)
        yield m.creeping_memory, f"{flat} flat", log(memory_gib=used)
    yield (
        m.creeping_memory,
        "one buffer",
        log(memory_gib=[1.0] * 9 + [1.01 * 1.001**i for i in range(8)] + [2]),
    )
    yield m.creeping_memory, "comes down", log(memory_gib=[1 + i / 9 for i in range(20)] + [2])


def test_each_symptom_begins_at_the_same_number():
    lines = [
        f"{check.__name__} {name}: {check(records)}\n"
        for check, name, records in [*losses(), *gradients(), *machines()]
    ]
    compare("".join(lines), "symptoms.txt")


def test_what_a_series_is_made_of():
    values = [1.0, 3.0, 2.0, 6.0, 5.0, 9.0]
    numbers = [
        f"{function.__name__} of {n}: {function(values[:n]):.10g}\n"
        for function in (m.noise, m.trend, m.most_change)
        for n in (1, 2, 3, 6)
    ]
    compare("".join(numbers), "series.txt")


def test_the_share_of_the_peak_is_operations_in_a_time(monkeypatch):
    "3 passes of 10 operations in 2 seconds are 3 times a peak of 5; evaluations are not counted."
    watch = m.SystemMonitor(peak_flops=5.0)
    watch.last, watch.flops, watch.cost, watch.passes = (
        10,
        lambda rows, length: rows * length,
        {},
        3,
    )
    watch.clock, watch.rows, watch.work = time.perf_counter() - 100, 0, 0.0
    monkeypatch.setattr(watch, "read", dict)
    watch.on_step(None, dict(shapes=[(2, 3), (4, 1), (2,)]))
    assert (watch.rows, watch.work) == (8, 10) and watch.cost == {(2, 3): 6, (4, 1): 4}
    record = dict(tokens=30, tokens_per_second=10)
    watch.on_log(None, record)
    assert (record["samples_per_second"], record["mfu"]) == (4, 3)
    assert (watch.last, watch.rows, watch.work) == (30, 0, 0)
    again = dict(tokens=30, tokens_per_second=10)
    watch.on_log(None, again)
    assert "mfu" not in again and "samples_per_second" not in again


def test_the_means_are_of_the_samples_since_the_last_reading(monkeypatch):
    watch = m.SystemMonitor()
    monkeypatch.setattr(m, "usage", lambda: dict(memory_gib=2.0))
    watch.samples = [dict(a=9.0), dict(a=1.0, b=4.0), dict(a=3.0, b=5.0), dict(a=5.0)]
    assert watch.read() == dict(a=3.0, memory_gib=2.0) and watch.samples == [dict(a=5.0)]
    watch.samples += [dict(a=1.0)]
    assert watch.read() == dict(a=1.0, memory_gib=2.0) and watch.peaks["a"] == 3.0


def test_what_deepspeed_is_told():
    "The memory side of its file, and the rest as the trainer does it."
    given = {
        "zero_optimization": {"overlap_comm": "auto", "reduce_bucket_size": 5},
        "aio": {"a": 1},
        "optimizer": {"type": "Adam"},
        "train_micro_batch_size_per_gpu": 8,
    }
    assert zero_settings(given, "zero2", 0.5, bf16=True) == {
        "aio": {"a": 1},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"reduce_bucket_size": 5, "stage": 2},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    assert "torch_autocast" not in zero_settings({}, "zero1")


def test_the_rows_of_a_step_that_went_wrong(monkeypatch):
    "The batch that went wrong, or all of the step; its rows in the order of the epoch."

    def place(found, epoch, batch, index=0, **more):
        monkeypatch.setattr(loop, "find_nonfinite", lambda done: found)
        plan = lambda epoch: [[10 * epoch + i, 100 + i] for i in range(9)]  # noqa: E731
        run = SimpleNamespace(
            window_size=3,
            train_batches=SimpleNamespace(**({} if more else {"plan": plan})),
            train_start=dict(epoch=0, index=index),
        )
        return loop.Trainer._locate(run, None, epoch, batch)

    assert place((1, "loss"), 0, 2) == " (batch 4 of epoch 1, rows 3, 103: loss)"
    assert place((0, ""), 1, 0, 5) == " (batch 1 of epoch 2, rows 10, 100)"
    assert place((0, ""), 0, 0, 5) == " (batch 1 of epoch 1, rows 5, 105)"
    assert (
        place((None, "x"), 0, 1) == " (batches 2 to 4 of epoch 1, rows 1, 101, 2, 102, 3, 103: x)"
    )
    assert place((None, "x"), 2, 3, none=True) == " (batches 4 to 6 of epoch 3: x)"
