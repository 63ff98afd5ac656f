"A run with buttons: what it imports, Ctrl-C, and a process that outlives its parent."

import asyncio
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import await_here, in_child, rests
from test_studio import count, until

from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.session import TrainSession


def small(folder, **train):
    return load_config(
        RunConfig,
        dict(runs_dir=str(folder), name="small", train=train),
        (
            "data.path=stdlib data.max_chars=60000 data.max_length=64 tokenizer.vocab_size=400 "
            "model.d_model=32 model.n_heads=2 "
            "model.n_layers=1 model.d_ff=64 train.logging_steps=1 "
            "train.per_device_train_batch_size=4 sampling.max_new_tokens=5 watch_memory=false"
        ).split(),
    )


def test_neither_torch_nor_widgets_are_loaded():
    import subprocess

    code = (
        "import sys, trainkit.widgets.session, trainkit.widgets.panel, trainkit.widgets.form\n"
        "print(sorted({'torch', 'ipywidgets', 'transformers', 'IPython'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def at_rest():
    "Whether the main thread sleeps in `TrainSession.wait`."
    frame = sys._current_frames()[threading.main_thread().ident]
    return Path(
        frame.f_code.co_filename
    ).name == "session.py" and "time.sleep" in linecache.getline(
        frame.f_code.co_filename, frame.f_lineno
    )


def interrupt_when(ready):
    "Ctrl-C as soon as it is so; a time would be too early on a busy machine."

    def strike():
        until(ready)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=strike, daemon=True).start()


def interrupted(how):
    session = TrainSession(
        load_config(RunConfig, dict(train=dict(max_steps=100_000, seed=0))), count
    )
    before = signal.getsignal(signal.SIGINT)
    interrupt_when(at_rest if how == "thread" else lambda: session.snapshot().step > 5)
    session.start(how)
    print(
        session.result().stop_reason,
        session.snapshot().state,
        signal.getsignal(signal.SIGINT) is before,
    )


@pytest.mark.parametrize("how, reason", [("thread", "stopped"), ("foreground", "interrupted")])
def test_an_interrupt_ends_the_step_and_keeps_the_model(how, reason, tmp_path):
    "In a child, since an interrupt that nobody takes would end the tests."
    done = in_child(interrupted, how, folder=tmp_path)
    assert done.stdout.split() == [reason, "stopped", "True"], done


def test_buttons_from_many_threads_at_once():
    "Whatever is pressed, the state stays one of the seven, and the run ends."
    session = TrainSession(
        load_config(RunConfig, dict(train=dict(max_steps=100_000, seed=0))), count
    )
    session.start()

    def press(n):
        for i in range(50):
            (session.pause, session.resume, session.snapshot)[(i + n) % 3]()

    threads = [threading.Thread(target=press, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.resume()
    assert session.stop() and session.wait(300).state == "stopped"


def test_pauses_do_not_count(tmp_path):
    session = TrainSession(load_config(RunConfig, dict(train=dict(max_steps=300, seed=0))), count)
    began = time.monotonic()
    session.start()
    until(lambda: session.snapshot().step > 20)
    session.pause()
    time.sleep(1)
    session.resume()
    now = session.snapshot()
    worked = time.monotonic() - began - 1  # However slow the machine is just now
    assert now.seconds < 0.9
    assert now.eta is None or now.eta <= worked * (300 - now.step) / now.step
    session.result()


def theirs(folder, **train):
    "The same run with TRL's loop."
    pytest.importorskip("trl")
    return replace(small(folder, **train), engine="trl")


def losses(result):
    return [r["loss"] for r in result.history if "loss" in r]


def test_the_buttons_of_a_loop_that_is_not_ours(tmp_path):
    "engine: trl in a thread: it pauses, saves and samples on request, stops, and resumes."
    from trainkit.recipes.runner import run

    plain = run(theirs(tmp_path / "plain", max_steps=6, progress=False), verbose=False)
    session = TrainSession(theirs(tmp_path / "runs", max_steps=6))
    assert session.start() and session.pause()  # TRL hears of it after its first step
    until(lambda: rests(session.thread), 120)
    now = session.snapshot()
    assert (now.step, now.state, now.total) == (1, "paused", 6) and list(
        now.curves["loss"][1]
    ) == losses(plain)[:1]
    assert session.save() and session.sample("import")
    until(
        lambda: (
            session.snapshot().checkpoint == 1
            and any(p == "import" for _, p, _ in session.snapshot().samples)
        )
    )
    assert session.stop()
    result = session.result()
    assert (result.steps, result.stop_reason, session.snapshot().state) == (1, "stopped", "stopped")
    assert (result.folder / "model" / "model.safetensors").exists() and (
        result.folder / "trl" / "checkpoint-1"
    ).is_dir()
    assert session.start(resume=True)
    result, now = session.result(), session.snapshot()
    assert (result.steps, now.state, now.start) == (6, "done", 1) and losses(result) == losses(
        plain
    )[1:]
    assert not any("it/s]" in line or "Warning" in line for line in now.log), (
        "what TRL prints does not fill the log"
    )


@pytest.mark.slow
def test_a_loop_that_is_not_ours_in_the_foreground_and_awaited(tmp_path):
    session = TrainSession(theirs(tmp_path / "front", max_steps=100_000))

    def press():
        until(lambda: session.snapshot().step >= 2, 120)
        session.stop()

    pressing = threading.Thread(target=press)
    pressing.start()
    session.start("foreground")
    pressing.join()
    assert session.result().stop_reason == "stopped" and 2 <= session.result().steps < 100_000
    pytest.importorskip("ipywidgets")
    from trainkit.widgets.panel import TrainerPanel

    panel = TrainerPanel(theirs(tmp_path / "awaited", max_steps=100_000), presets={}, key="trl")

    async def main():
        waiting = asyncio.ensure_future(panel.arun())
        while panel.session.snapshot().step < 2:
            await asyncio.sleep(0.01)
        panel.stop_button.click()
        return await waiting

    assert (
        await_here(main()).stop_reason == "stopped"
        and 'aria-label="Loss' in panel.chart.value
        and not panel.resume_button.disabled
    )
    panel.close()


@pytest.mark.slow
def test_a_process_whose_loop_is_not_ours(tmp_path):
    "engine: trl in its own process: paused, killed, and resumed to an undisturbed run's losses."
    from trainkit.recipes.runner import run

    plain = run(theirs(tmp_path / "plain", max_steps=200, progress=False), verbose=False)
    session = TrainSession(theirs(tmp_path / "runs", max_steps=200))
    assert session.start("process") and session.pause()
    until(lambda: session.snapshot().step == 1, 240)
    again = TrainSession.attach(session.folder)  # As another kernel would
    assert again.save()
    until(lambda: again.snapshot().checkpoint == 1)
    assert again.snapshot().step == 1 and again.resume()
    until(lambda: again.snapshot().step >= 4)
    assert (
        again.kill() and again.snapshot().state == "stopped" and again.start("process", resume=True)
    )
    result, now = again.result(), again.snapshot()
    assert (result.steps, now.state, now.start) == (200, "done", 1) and losses(result) == losses(
        plain
    )
    assert now.proof and all(a == b for _, a, b in now.proof)


def begin(config):
    "Start a process, and go away without a word."
    session = TrainSession(config)
    session.start("process")
    os._exit(0)


@pytest.mark.slow
def test_a_process_outlives_who_started_it(tmp_path):
    """After its kernel is gone, another one finds it, pauses, kills and resumes it.

    It ends with the same model.
    """
    import torch
    from trainkit.recipes.runner import run

    plain = run(
        small(tmp_path / "plain", max_steps=800, save_steps=25, progress=False), verbose=False
    )
    config = small(tmp_path / "runs", max_steps=800, save_steps=25)
    in_child(begin, config, folder=tmp_path)
    folder = tmp_path / "runs" / "small"
    until(lambda: (folder / "config.yaml").exists())
    session = TrainSession.attach(folder)
    until(lambda: session.snapshot().step >= 5, 120)
    assert session.pause(save=True) and session.snapshot().pausing
    until(lambda: not session.snapshot().pausing)
    held = session.snapshot().step
    assert (session.snapshot().state, session.snapshot().checkpoint) == ("paused", held)
    time.sleep(0.5)
    assert (
        session.snapshot().step == held and TrainSession.attach(folder).snapshot().state == "paused"
    )
    assert session.save() and session.sample("import")
    until(
        lambda: (
            session.snapshot().state == "paused"
            and any(p == "import" for _, p, _ in session.snapshot().samples)
        )
    )
    session.resume()
    until(lambda: session.snapshot().step >= held + 10)
    assert session.kill() and session.snapshot().state == "stopped"
    assert session.start("process", resume=True)
    result = session.result()
    now = session.snapshot()
    assert (
        now.state == "done"
        and now.start >= held
        and now.proof
        and all(a == b for _, a, b in now.proof)
    )
    assert losses(result) == losses(plain)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            plain.model.state_dict().values(), result.model.state_dict().values(), strict=True
        )
    )
    assert TrainSession.attach(folder).wait(10).state == "done"


@pytest.mark.slow
def test_a_process_that_fails_says_why(tmp_path):
    config = small(tmp_path, max_steps=5)
    config.data.path = str(tmp_path / "missing.txt")
    session = TrainSession(config)
    session.start("process")
    with pytest.raises(RuntimeError, match="missing.txt"):
        session.result()
    now = session.snapshot()
    assert (
        now.state == "failed"
        and "missing.txt" in now.error
        and any("missing.txt" in line for line in now.log)
    )
    assert Path(now.folder).name == "small"


def many_at_once(folder, count):
    "Sessions of one process at once: the result of each, and a model that is saved later."
    import torch

    from trainkit.interop import hf
    from trainkit.interop.hf import load_pretrained, save_pretrained

    meeting, verify = threading.Barrier(count, timeout=120), hf._verify

    def together(*args):
        if not over:
            meeting.wait()  # All of them open what they wrote at the same moment
        verify(*args)

    hf._verify, over = together, []

    def write(name, line):
        return (folder / name).write_text("\n".join(map(line, range(300))))

    write("words.txt", lambda i: f"The {i} little words that {i * 7} say more than {i * i} others.")
    write("others.txt", lambda i: f"Other {i} words say less.")
    words = (
        f"data.path={folder}/words.txt data.eval_file={folder}/others.txt data.max_length=32 "
        "tokenizer.vocab_size=300 model.d_model=32 model.n_heads=2 "
        "model.n_layers=1 model.d_ff=64 model.tie_embeddings=true train.max_steps=2 "
        "train.per_device_train_batch_size=2 sampling.max_new_tokens=2 watch_memory=false"
    )
    sessions = [
        TrainSession(
            load_config(RunConfig, dict(runs_dir=str(folder), name=f"run-{i}"), words.split())
        )
        for i in range(count)
    ]
    streams, kinds = (sys.stdout, sys.stderr), torch.get_default_dtype()
    for session in sessions:
        session.start("thread")
    for i, session in enumerate(sessions):
        result = session.result()
        model, tokenizer = load_pretrained(folder / f"run-{i}" / "model")
        wanted, actual = result.model.state_dict(), model.state_dict()
        assert wanted.keys() == actual.keys() and all(
            torch.equal(wanted[n], actual[n]) for n in wanted
        )
        assert (folder / f"run-{i}" / "report.html").exists() and not [
            *(folder / f"run-{i}").glob(".model*")
        ]
    over.append(True)
    save_pretrained(model, tokenizer, folder / "later")
    assert (sys.stdout, sys.stderr, torch.get_default_dtype()) == (*streams, kinds)
    print("all is well")


@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_many_runs_of_one_process_save_at_once(count, tmp_path):
    "In a child, since what broke here broke every later save of the process."
    done = in_child(many_at_once, tmp_path, count, folder=tmp_path)
    assert done.stdout.endswith("all is well\n"), done


TWO_PANELS = """
import sys, tempfile, time
from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel

words = (
    "data.path=stdlib data.max_chars=60000 data.max_length=64 tokenizer.vocab_size=400 "
    "model.d_model=32 model.n_heads=2 model.n_layers=1 model.d_ff=64 train.max_steps=5 "
    "train.per_device_train_batch_size=4 sampling.max_new_tokens=5 watch_memory=false"
).split()
folder = tempfile.mkdtemp()
panels = [
    TrainerPanel(load_config(RunConfig, dict(runs_dir=folder, name=name), words), key=name)
    for name in ("a", "b")
]
assert "transformers" not in sys.modules
for panel in panels:
    panel.start_button.click()
from transformers import AutoTokenizer
print(*[panel.result().steps for panel in panels], AutoTokenizer.__name__)
"""


@pytest.mark.slow
def test_two_runs_and_a_cell_import_transformers_at_the_same_time(tmp_path):
    "It replaces itself while it is imported, and a second thread would keep what it replaces."
    done = subprocess.run(
        [sys.executable, "-c", TWO_PANELS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-3:] == ["5", "5", "AutoTokenizer"]
