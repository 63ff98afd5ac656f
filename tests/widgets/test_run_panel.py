"What the panel shows of a run: its size, its stages, its end, and the run of an earlier kernel."

import json
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.processes import begin, command
from test_session import small
from test_studio import until

from trainkit.config import load_config, save_config
from trainkit.progress import Progress, Stage, StopNow
from trainkit.recipes.config import RunConfig
from trainkit.recipes.control import read_state, write_state
from trainkit.recipes.runner import run
from trainkit.train.config import Control
from trainkit.train.runs import read_run
from trainkit.widgets.panel import buttons, headline
from trainkit.widgets.session import RunState, TrainSession, find_run


def test_a_packed_model_has_as_many_parameters_as_before():
    "Plan, report, monitor and `num_parameters` count the numbers, not the bytes they lie in."
    from trainkit.lora.inject import trainable_report
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer, count_logical_parameters
    from trainkit.quant.quantize import QuantConfig, quantize_model

    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=64, d_model=64, n_heads=2, n_layers=2, d_ff=128, bias="qkv")
    )
    before = model.num_parameters()
    quantize_model(model, QuantConfig(bits=4))
    assert sum(p.numel() for p in model.parameters()) < before
    assert model.num_parameters() == count_logical_parameters(model) == before
    assert trainable_report(model).total == before


def count(config, resume, callbacks, control):
    "A run of nothing that listens to its buttons, with a long preparation and a long end."
    from trainkit.progress import Progress, listen, tick

    run_state = callbacks[0]
    with listen(control.hear):
        with Progress(config.train.max_steps, "Tokenizing", "row", where="silent") as bar:
            for row in range(config.train.max_steps):
                bar.update(row)
                time.sleep(0.001)
        with control.session():
            run_state.update("start", dict(total_steps=10**6), seconds=0.0)
            step = 0
            while not control.stopping:
                step += 1
                run_state.update("log", dict(step=step, loss=1 / step), seconds=step / 10)
                time.sleep(0.001)
            try:
                while True:  # A step that never ends
                    tick()
                    time.sleep(0.001)
            except StopNow:
                pass
            run_state.update("end", dict(step=step, reason="stopped"))
    return SimpleNamespace(stop_reason="stopped", model=step)


def counting(rows):
    config = load_config(RunConfig, dict(train=dict(max_steps=rows, seed=0)))
    return TrainSession(config, count)


def test_stop_leaves_the_preparation_at_once():
    session = counting(100_000)
    session.start()
    until(lambda: session.snapshot().stage)
    now = session.snapshot()
    assert now.phase == "preparing" and now.stage.title == "Tokenizing"
    assert now.stage.total == 100_000 and "preparing: tokenizing · " in headline(now)
    assert session.stop() and session.wait(60).state == "stopped"
    assert "nothing was written" in session.snapshot().log[-1]
    with pytest.raises(RuntimeError, match="before its first step"):
        session.result()


def test_a_second_stop_leaves_the_step_and_keeps_the_model():
    session = counting(3)
    session.start()
    until(lambda: session.snapshot().step > 5)
    assert session.stop()
    until(lambda: session.snapshot().state == "stopping")
    step = session.snapshot().step
    assert f"stopping: finishing step {step + 1}, then saving" in headline(session.snapshot())
    time.sleep(0.1)
    assert session.snapshot().state == "stopping" and buttons(session.snapshot())["stop"]
    assert session.stop() and not session.stop()
    now = session.wait(60)
    assert (now.state, session.result().model) == ("stopped", step)


def test_a_preparation_that_hears_nothing_is_left_to_itself():
    "A download that hangs in a library: the second press does not wait for it."
    gone = threading.Event()

    def deaf(config, resume, callbacks, control):
        gone.wait(60)
        callbacks[0].add_log("too late")
        return SimpleNamespace(stop_reason="finished")

    session = TrainSession(load_config(RunConfig, {}), deaf)
    session.start()
    assert session.stop() and session.snapshot().state == "stopping"
    assert session.stop() and session.snapshot().state == "stopped"
    session.job = count_to_the_end
    assert session.start()  # Waits for the thread, which may hold the lock of the folder
    until(lambda: session.snapshot().stage)
    assert session.snapshot().stage.title == "Waiting for the run that was stopped"
    gone.set()
    assert session.wait(60).state == "done" and session.result().model == "new"
    assert "too late" not in session.snapshot().log


def count_to_the_end(config, resume, callbacks, control):
    return SimpleNamespace(stop_reason="finished", model="new")


def test_the_time_left_has_the_evaluations_in_it():
    state = RunState()
    train = dict(eval_strategy="steps", eval_steps=10)
    state.update("start", dict(total_steps=100, start_step=0, config=train), seconds=0.0)
    for step in range(1, 11):
        state.update("log", dict(step=step, loss=1.0), seconds=float(step))
    state.update("eval", dict(step=10, eval_loss=1.0, eval_seconds=5.0), seconds=15.0)
    state.update("log", dict(step=11, loss=1.0), seconds=16.0)
    left = state.snapshot("running").eta
    assert left == pytest.approx(89 + 10 * 5)  # Nine during the run, and one at its end


def test_the_end_of_a_stage_is_told_at_once(tmp_path):
    "Else another process would show it for as long as what comes next tells nothing."
    from trainkit.progress import Progress, listen
    from trainkit.recipes.control import StageReport

    report = StageReport(Control(), tmp_path, every=60)
    with listen(report.hear):
        with Progress(None, "Loading the model", "", where="silent"):
            assert read_state(tmp_path)["stage"][0] == "Loading the model"
        assert read_state(tmp_path)["stage"] is None


def test_the_time_of_a_stage_goes_on_while_its_process_tells_nothing(tmp_path):
    save_config(load_config(RunConfig, {}), tmp_path / "config.yaml")
    told = write_state(tmp_path, "preparing", stage=Stage("Loading the model"))
    state = json.loads(told.read_text())
    told.write_text(json.dumps({**state, "time": state["time"] - 90}))
    session = TrainSession.attach(tmp_path)
    assert 90 <= session.snapshot().stage.seconds < 600
    assert "preparing: loading the model · 1:" in headline(session.snapshot())
    write_state(tmp_path, "preparing")
    assert session.snapshot().stages[-1].seconds >= 90


def test_a_page_counts_the_seconds_of_a_silent_stage():
    from trainkit.progress import Progress, listen
    from trainkit.widgets.panel import TrainerPanel

    seen = threading.Event()

    def silent(config, resume, callbacks, control):
        with listen(callbacks[0].hear), Progress(None, "Loading", "", where="silent"):
            seen.wait(300)
        return SimpleNamespace(stop_reason="finished", model="new")

    panel = TrainerPanel(load_config(RunConfig, {}), presets={}, job=silent, key="silent")
    try:
        panel.start()
        until(lambda: "Loading · 0:0" in panel.stages.value)
    finally:
        seen.set()
        panel.session.wait(60)
        panel.close()


def test_a_run_names_what_it_does_before_its_first_step(tmp_path):
    "The memory of a step is predicted for seconds, during which nothing else is heard."
    from trainkit.progress import listen

    heard = []
    config = small(tmp_path, max_steps=1, progress=False)
    config.watch_memory = True
    with listen(lambda bar: heard.append(bar.title if bar else "")):
        run(config, verbose=False)
    assert "Predicting the memory of a step" in heard


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    "A run that was killed at step 5 of 8, as its folder shows it."
    folder = tmp_path_factory.mktemp("found")
    config = small(folder, max_steps=8, save_strategy="steps", save_steps=2, progress=False)

    class Kill(Exception):
        pass

    class AtFive:
        def on_step(self, trainer, record):
            if record["step"] == 5:
                trainer.flush_checkpoint()
                shutil.copytree(trainer.folder, folder / "copy")
                raise Kill

    with pytest.raises(Kill):
        run(config, callbacks=[AtFive()], verbose=False)
    shutil.rmtree(config.folder)
    shutil.rmtree(folder / "copy" / ".control", ignore_errors=True)
    (folder / "copy").rename(config.folder)
    return config


def test_a_run_of_an_earlier_kernel_is_found(stopped):
    found = find_run(stopped)
    assert (found.state, found.total, found.checkpoint) == ("stopped", 8, 4)
    assert str(found).startswith("small stopped at step ") and "of 8." in str(found)
    assert find_run(replace(stopped, name="another")) is None
    assert find_run(replace(stopped, method="sft")) is None


def test_a_restart_of_the_kernel_is_no_failure_of_the_run(tmp_path):
    "A thread that trains may be told of it by an error, before the process is gone."
    config = small(tmp_path, max_steps=8, save_strategy="steps", save_steps=2, progress=False)

    class AtFive:
        def on_step(self, trainer, record):
            if record["step"] == 5:
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with pytest.raises(RuntimeError, match="shutdown"):
        run(config, callbacks=[AtFive()], verbose=False)
    assert read_run(config.folder).status == "unfinished"
    (config.folder / ".control" / "state.json").unlink()  # Its process is gone
    found = find_run(config)
    assert (found.state, found.total, found.checkpoint) == ("stopped", 8, 4)


def test_the_cell_offers_to_continue(stopped, tmp_path):
    from trainkit.widgets.panel import TrainerPanel

    shutil.copytree(stopped.folder, tmp_path / "small")
    config = replace(stopped, runs_dir=str(tmp_path))
    cell = replace(config, optim=replace(config.optim, learning_rate=0.5))
    panel = TrainerPanel(cell, presets={}, key="found")
    assert panel.found_box.layout.display is None and not panel.continue_button.disabled
    assert "stopped at step" in panel.found_text.value and not panel.start_button.disabled
    assert panel.form.config.optim.learning_rate == 0.5
    panel.look_button.click()
    assert panel.form.config.optim == config.optim, "its curves are shown with its own settings"
    assert panel.session.snapshot().step >= 4 and 'aria-label="Loss' in panel.chart.value
    panel.continue_button.click()
    result = panel.result()
    assert (result.steps, result.stop_reason) == (8, "finished"), panel.alert.value
    assert result.folder.resolve() == (tmp_path / "small").resolve()
    assert panel.found_box.layout.display == "none"
    again = TrainerPanel(config, presets={}, key="found")
    assert "has taken its 8 steps" in again.found_text.value and again.continue_button.disabled
    again.look_button.click()
    until(lambda: again.next is not None)
    assert again.next.run.folder.resolve() == (tmp_path / "small").resolve()
    again.close()
    attached = TrainerPanel.attach(tmp_path / "small")
    until(lambda: attached.next is not None)
    attached.close()


def test_the_application_offers_the_latest_run(stopped, tmp_path):
    "Also one of another name and method; of two that are active, the one that began last."
    import os

    from trainkit.widgets.studio import StudioPanel, active_runs

    for i, name in enumerate(("small", "later")):
        shutil.copytree(stopped.folder, tmp_path / name)
        os.utime(tmp_path / name / "metrics.jsonl", (i, i))
    panel = StudioPanel.open(replace(stopped, runs_dir=str(tmp_path)))
    assert panel.found is not None and panel.found.folder.name == "later"
    panel.close()
    for name, born, changed in (("small", 1, 20), ("later", 10, 10)):
        state = dict(state="running", pid=1, born=born, host="another", time=changed)
        (tmp_path / name / ".control").mkdir()
        (tmp_path / name / ".control" / "state.json").write_text(json.dumps(state))
    assert [folder.name for folder in active_runs(tmp_path)] == ["later", "small"]
    file = tmp_path / "later" / ".control" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "state": "ended"}))
    assert [folder.name for folder in active_runs(tmp_path)] == ["small"]  # Its kernel lives on


def test_a_run_renamed_in_the_form_is_found_by_its_cell(tmp_path):
    "The run of a panel in which the name was changed; a pause leaves a checkpoint."
    from trainkit.widgets.panel import TrainerPanel

    config = small(tmp_path, max_steps=4000, save_strategy="steps", save_steps=4000)
    panel = TrainerPanel(config, presets={}, key="renamed")
    panel.form.set(replace(config, name="mine"))
    panel.start_button.click()
    until(lambda: panel.session.snapshot().step > 3)
    panel.pause_button.click()
    until(lambda: panel.session.snapshot().checkpoint)
    panel.stop_button.click()
    panel.session.wait()
    panel.close()
    found = find_run(config)
    assert found is not None and found.folder.name == "mine" and found.checkpoint
    assert find_run(replace(config, prompts=["Another"])) is None


def test_a_run_in_another_process_is_followed_and_stopped(tmp_path):
    "As a shell starts it; the panel of a new kernel finds it, and its Stop works."
    from trainkit.widgets.panel import TrainerPanel

    config = small(tmp_path, max_steps=100_000, progress=False)
    save_config(config, tmp_path / "config.yaml")
    words = ["train", str(tmp_path / "config.yaml")]
    child = begin(command, words, tmp_path, {}, folder=tmp_path)
    try:
        until(lambda: (found := find_run(config)) is not None and found.step > 3)
        panel = TrainerPanel(config, presets={}, key="elsewhere")
        assert f"is running (process {child.pid}" in panel.found_text.value
        assert panel.session.snapshot().state == "running" and panel.start_button.disabled
        step = panel.session.snapshot().step
        until(lambda: panel.session.snapshot().step > step)
        panel.stop_button.click()
        until(lambda: panel.session.snapshot().state == "stopped")
        child.join(120)
        assert child.exitcode == 0
        assert panel.result().stop_reason == "stopped"
        panel.close()
    finally:
        child.kill()


def test_a_cell_that_is_run_again_keeps_its_run():
    from trainkit.widgets.panel import TrainerPanel

    config = load_config(RunConfig, dict(train=dict(max_steps=3, seed=0)))
    first = TrainerPanel(config, job=count, presets={}, key="again")
    first.form.field("optim.learning_rate").widget.value = "2e-3"
    first.prompt.value = "The sea"
    first.start_button.click()
    until(lambda: first.session.snapshot().step > 3)
    second = TrainerPanel(config, job=count, presets={}, key="again")
    assert first.closed and second.session.snapshot().state == "running"
    # The curves and the settings above them are of one run
    assert second.form.read() == second.session.config and second.prompt.value == "The sea"
    assert second.form.field("optim.learning_rate").widget.value == "0.002"
    second.show_code()
    assert "0.002" in second.code.value
    other = replace(config, name="other")
    third = TrainerPanel(other, job=count, presets={}, key="again")
    until(lambda: second.session.snapshot().state == "stopping")
    second.session.stop()
    assert third.session.state == "idle" and second.session.wait(60).state == "stopped"
    third.close()


def test_two_presses_leave_the_evaluation_and_lose_no_step(tmp_path):
    "A real run: model and checkpoint are whole, and it resumes with the same losses."
    plain = run(small(tmp_path / "plain", max_steps=6, progress=False), verbose=False)
    control = Control()

    class Press:
        def on_step(self, trainer, record):
            if record["step"] == 3:
                control.stop()
                control.stop()

    config = small(tmp_path, max_steps=6, progress=False)
    stopped = run(config, callbacks=[Press()], control=control, verbose=False)
    assert (stopped.steps, stopped.stop_reason, stopped.metrics) == (3, "stopped", {})
    assert (stopped.folder / "model" / "model.safetensors").exists() and stopped.report.exists()
    assert read_state(stopped.folder)["state"] == "ended"
    rest = run(config, resume=True, verbose=False)
    losses = [r["loss"] for r in rest.history if "loss" in r]
    assert rest.steps == 6 and rest.metrics
    assert losses == [r["loss"] for r in plain.history if "loss" in r][3:]


def test_a_preview_shows_the_base_s_own_tokens(tmp_path):
    "Also those of a GGUF file, and both answers of a pair."
    from trainkit.interop.gguf import export_gguf
    from trainkit.interop.hf import save_pretrained
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
    from trainkit.tokenizer.chat import set_template
    from trainkit.widgets.panel import preview_data

    rows = [dict(prompt=f"What is {i}?", chosen="A number.", rejected="No.") for i in range(30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = BPETokenizer.train(
        ["What is a number? No."] * 9, 270, special_tokens=["<|endoftext|>"], progress=False
    )
    set_template(tokenizer, "chatml")
    model = Transformer(
        ModelConfig(vocab_size=len(tokenizer), d_model=32, n_heads=2, n_layers=1, d_ff=32)
    )
    save_pretrained(model, tokenizer, tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "base.gguf", progress=False)
    config = load_config(
        RunConfig,
        dict(
            method="dpo",
            init_from=str(tmp_path / "base.gguf"),
            data=dict(path=str(tmp_path / "pairs.jsonl")),
        ),
    )
    page = preview_data(config)
    assert page.count(">chosen: ") == 2 and page.count('class="learned"') > 8


def test_steps_between_two_lines_of_the_log_are_shown(tmp_path):
    "A process tells its step at least once a second, and a silent stage from its first moment."
    from trainkit.recipes.control import Remote, StageReport

    session = TrainSession.attach(begun(tmp_path))
    stages = StageReport(Control(), tmp_path)
    trainer = SimpleNamespace(control=Control(), seconds=4.5)
    with trainer.control.session(), stages.followed(tmp_path) as remote:
        assert isinstance(remote, Remote)
        remote.on_step(trainer, dict(step=3))
        remote.look(trainer)
        now = session.snapshot()
        assert (now.state, now.step, now.seconds) == ("running", 3, 4.5)
        for title in ("Reading", "Predicting"):  # The second one comes at once after the first
            with Progress(None, title, "", where="silent") as bar:
                stages.hear(bar)
                assert session.snapshot().stage.title == title
            stages.hear(bar)
        remote.on_step(trainer, dict(step=4))
        remote.look(trainer)
        assert session.snapshot().step == 3, "once a second is enough"


def begun(folder):
    "A run folder as a process leaves it at its first step."
    save_config(load_config(RunConfig, dict(name=folder.name)), folder / "config.yaml")
    lines = [dict(event="start", total_steps=9, start_step=0, time=0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_state(folder, "running")
    return folder


def test_a_new_run_forgets_the_curves_of_the_last_one():
    from trainkit.widgets.panel import TrainerPanel

    config = load_config(RunConfig, dict(name="again", train=dict(max_steps=5, seed=0)))
    panel = TrainerPanel(config, job=count, key="again", presets={})
    panel.start_button.click()
    until(lambda: panel.chart.value)
    assert panel.resume_button.layout.display == "none", "nothing can be continued now"
    panel.stop_button.click(), panel.stop_button.click()
    panel.session.wait(60)
    panel.form.field("train.max_steps").widget.value = "100000"
    panel.start_button.click()
    assert not panel.chart.value and not panel.others.value
    panel.stop_button.click()
    panel.session.wait(60)
    panel.close()


def test_pairs_that_a_run_would_cut_are_named_before_start(tmp_path):
    from trainkit.interop.hf import save_pretrained
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
    from trainkit.tokenizer.chat import set_template
    from trainkit.widgets.panel import preview_rows

    rows = [dict(prompt="long " * 9 * i, chosen="A number.", rejected="No.") for i in range(1, 9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = BPETokenizer.train(
        ["long"] * 9, 258, special_tokens=["<|endoftext|>"], progress=False
    )
    set_template(tokenizer, "chatml")
    model = Transformer(
        ModelConfig(vocab_size=len(tokenizer), d_model=32, n_heads=2, n_layers=1, d_ff=32)
    )
    save_pretrained(model, tokenizer, tmp_path / "model")
    config = load_config(
        RunConfig,
        dict(
            method="dpo",
            init_from=str(tmp_path / "model"),
            data=dict(path=str(tmp_path / "pairs.jsonl"), eval_fraction=0.0),
            dpo=dict(max_length=100, truncation="prompt"),
        ),
    )
    warning, page = preview_rows(config)
    assert "prompts lost their beginning" in warning and "max_length = 100" in warning
    assert page.count(">chosen: ") == 2
    config.dpo.max_length = 1000
    assert not preview_rows(config)[0]
