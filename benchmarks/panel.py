"""What a panel costs the run that it shows, and how soon it reacts to a click.

A small model trains in a thread, as in a notebook; the panel looks at it five times a second
and writes its charts into widgets, which serialize them as for a page (there is no page: the
cost of a browser is not in these figures). Runs with a panel and without take turns; a click
is timed from `click()` to the widget that shows the new state.

Then the widgets that list many things: a labeler with 200,000 pairs, a browser of 500 runs.

    python benchmarks/panel.py [--steps 600] [--rounds 5] [--many-only]
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
WORDS = (
    "data.path=stdlib data.max_chars=60000 data.max_length=64 tokenizer.vocab_size=400 "
    "model.d_model=64 model.n_heads=2 model.n_layers=2 "
    "model.d_ff=128 train.logging_steps=1 train.eval_strategy=no train.save_strategy=no "
    "train.per_device_train_batch_size=8 train.progress=false"
).split()


def rate(session):
    "Steps a second of the run alone, without what comes before and after it."
    end = session.snapshot()
    return end.step / end.seconds


def cpu_seconds(do):
    "What a call takes on the processor, and what it returns."
    start = time.process_time()
    result = do()
    return time.process_time() - start, result


def measure_many(folder, pairs=200_000, runs=500, steps=200):
    "What the labeler and the run browser take where there is much to list."
    from trainkit.train.runs import RunFolder
    from trainkit.widgets.labeler import PreferenceLabeler, PreferenceLabels
    from trainkit.widgets.run_browser import RunBrowser

    rows = [
        dict(prompt=f"Question {i}?", answers=[f"yes {i} " * 20, f"no {i} " * 20])
        for i in range(pairs)
    ]
    path = folder / "labels.jsonl"
    yield f"labeler: {pairs:,} new pairs, s", cpu_seconds(lambda: PreferenceLabels(path, rows))[0]
    seconds, labeler = cpu_seconds(lambda: PreferenceLabeler(path, key="many"))
    labeler.apart = 0.0  # No click is taken for the second half of a double click
    yield f"labeler: open the file with {pairs:,} pairs, s", seconds
    clicks = [cpu_seconds(labeler.buttons["left"].click)[0] for _ in range(50)]
    assert labeler.labels.count == len(clicks)
    labeler.close()
    yield "labeler: from a verdict to the next pair, ms", 1000 * statistics.median(clicks)
    for i in range(runs):
        with RunFolder(folder / f"runs/run{i}", f"optim:\n  learning_rate: {i / 1e5}\n") as run:
            for step in range(1, steps + 1):
                run.record("log", dict(step=step, loss=9 / step, grad_norm=0.5, learning_rate=0.1))
            run.record("end", dict(step=steps, reason="finished"))
    for what in ("first time, all logs are read", "from the index"):
        seconds, page = cpu_seconds(lambda: RunBrowser(folder / "runs", key="many"))
        yield f"run browser: {runs} runs of {steps} lines, {what}, s", seconds
    yield (
        "run browser: a filter by a knob, s",
        cpu_seconds(lambda: setattr(page.words, "value", "learning_rate>4e-3"))[0],
    )
    page.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many-only", action="store_true")
    args = parser.parse_args()
    if not args.many_only:
        measure_panel(args)
    print("\n| CPU time | |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for what, value in measure_many(Path(folder)):
            print(f"| {what} | {value:.2f} |")


def measure_panel(args):
    import ipywidgets
    import torch

    from trainkit.config import load_config
    from trainkit.recipes.config import RunConfig
    from trainkit.widgets.session import TrainSession
    from trainkit.widgets.panel import TrainerPanel

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            RunConfig,
            dict(runs_dir=str(Path(folder) / "runs"), name="seen"),
            [*WORDS, f"train.max_steps={args.steps}"],
        )
        ratios, clicks, sizes = [], [], []
        for _ in range(args.rounds):
            bare = TrainSession(config)
            bare.start()
            bare.wait()
            panel = TrainerPanel(config, key="bench")
            sent = []
            panel.chart.observe(lambda change: sent.append(len(change["new"])), names="value")  # noqa: B023
            panel.start()
            panel.session.wait()
            ratios.append(rate(panel.session) / rate(bare))
            sizes.append(statistics.median(sent))
            panel.close()
        panel = TrainerPanel(
            load_config(
                RunConfig,
                dict(runs_dir=str(Path(folder) / "runs"), name="clicks"),
                [*WORDS, "train.max_steps=1000000"],
            ),
            key="clicks",
        )
        panel.start()
        while panel.session.snapshot().step < 20:
            time.sleep(0.01)
        for i in range(20):
            start = time.perf_counter()
            panel.pause_button.click()
            word = "Resume" if i % 2 == 0 else "Pause"
            while panel.pause_button.description != word:
                time.sleep(0.0005)
            clicks.append(1000 * (time.perf_counter() - start))
            time.sleep(0.1)
        panel.stop()
        panel.session.wait()
        panel.close()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, 1 thread; Python "
        f"{platform.python_version()}, torch {torch.__version__}, "
        f"ipywidgets {ipywidgets.__version__}\n"
    )
    print("| | median | worst |\n|---|---|---|")
    print(f"| speed with a panel / without | {statistics.median(ratios):.3f} | {min(ratios):.3f} |")
    print(
        f"| from a click to the widget that shows it, ms | {statistics.median(clicks):.1f} | "
        f"{max(clicks):.1f} |"
    )
    print(f"| a chart, kB | {statistics.median(sizes) / 1000:.1f} | {max(sizes) / 1000:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
