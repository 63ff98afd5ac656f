"The tab Next of a run that has ended: it appears, labels lead to DPO, errors are one sentence."

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
from test_studio import count, instances, small_start, until

from trainkit.config import load_config
from trainkit.files import show_bytes
from trainkit.progress import listen
from trainkit.recipes.config import RunConfig
from trainkit.widgets.labeler import PreferenceLabels
from trainkit.widgets.next_steps import (
    LABELS_NEEDED,
    NextSteps,
    TrainedRun,
    export_run,
    export_sizes,
    gather_labels,
    open_round,
    run_prompts,
    what_to_expect,
)
from trainkit.widgets.panel import TrainerPanel
from trainkit.widgets.run_browser import RunBrowser

pytest.importorskip("ipywidgets")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    "The config of a small run by LoRA, and the panel in which it has ended."
    folder = tmp_path_factory.mktemp("runs")
    config = small_start(folder)("lora", "data.max_length=64", "train.max_steps=4")
    panel = TrainerPanel(config, key="tuned", presets={})
    assert len(panel.tabs.children) == 5, "nothing comes next before the first run"
    panel.result()
    yield config, panel
    panel.close()


def press(steps, name):
    action = steps.actions[name]
    action.start_button.click()
    action.wait()
    return action


def test_the_tab_comes_with_the_end_of_the_run(tuned):
    _, panel = tuned
    assert panel.next is not None and panel.tabs.children[5].children == (panel.next.widget,)
    assert panel.tabs.selected_index == 5 and panel.next.run.has_model
    assert [*panel.next.actions][:4] == ["chat", "compare", "label", "train"]


def test_what_can_be_expected_of_a_small_model(tuned):
    "Its weights are counted without loading it."
    _, panel = tuned
    run = panel.next.run
    from trainkit.interop.hf import load_pretrained

    model, _ = load_pretrained(run.model)
    assert run.parameters == sum(p.numel() for p in model.parameters())
    assert "trained on, and little else" in panel.next.actions["chat"].what.value
    for weights, words in ((135e6, "With 135 million parameters it writes fluently"), (2e9, "")):
        large = TrainedRun(run.folder, run.config)
        large.parameters = int(weights)
        text = what_to_expect(large)
        assert text.startswith(words) and bool(text) == bool(words)


def test_the_application_opens_the_last_run(tuned, tmp_path):
    "One that has ended is shown with its tab Next, and Look at it has nothing to do."
    from trainkit.widgets.studio import StudioPanel

    config, panel = tuned
    shutil.copytree(panel.next.run.folder, tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine" / ".control")
    opened = StudioPanel.open(load_config(RunConfig, dict(runs_dir=str(tmp_path))))
    until(lambda: opened.next is not None)
    assert opened.next.run.folder == tmp_path / "mine" and "finished · step 4" in opened.head.value
    assert opened.tabs.selected_index == 5 and opened.look_button.layout.display == "none"
    before = opened.next
    assert opened.look_at_found() and opened.next is before, "it is not drawn again"
    opened.tabs.selected_index = 1
    assert opened.look_at(tmp_path / "mine") and opened.tabs.selected_index == 5
    opened.close()


def test_memory_is_predicted_for_the_longest_row(tuned, tmp_path):
    "In tokens of the model, once it is chosen; a byte is a token at most before that."
    from trainkit.data.tokenization import tokenize_examples
    from trainkit.interop.hf import load_tokenizer
    from trainkit.widgets.panel import _as_long_as_rows, expect_memory

    config, panel = tuned
    rows = [dict(prompt=f"What is {i}?", completion="one two" * i) for i in range(1, 12)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = dict(method="lora", data=dict(path=str(tmp_path / "mine.jsonl"), max_length=512))
    start = str(panel.next.run.model)
    based = load_config(RunConfig, {**words, "init_from": start})
    longest = max(
        len(row["input_ids"])
        for row in tokenize_examples(rows, load_tokenizer(start), kind="prompt_completion")
    )
    fitted, word = _as_long_as_rows(based)
    assert (fitted.data.max_length, word) == (longest, "about") and longest < 512
    pairs = [dict(prompt="a", chosen="b " * 9, rejected="c") for _ in range(9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    words["data"]["path"] = str(tmp_path / "pairs.jsonl")
    dpo = load_config(RunConfig, {**words, "method": "dpo", "init_from": start})
    fitted, word = _as_long_as_rows(dpo)
    assert word == "about" and 9 < fitted.dpo.max_length < 100
    assert "A step will take about" in expect_memory(dpo).text
    unknown, word = _as_long_as_rows(load_config(RunConfig, {**words, "method": "reward"}))
    assert word == "at most" and unknown.data.max_length > fitted.dpo.max_length


def test_a_run_that_is_looked_at_has_the_tab(tuned):
    _, panel = tuned
    before = len(instances())
    shutil.rmtree(panel.session.folder / ".control")  # The kernel of the run is gone
    other = TrainerPanel.attach(panel.session.folder)
    until(lambda: other.next is not None)
    press(other.next, "runs"), press(other.next, "code")
    assert other.next.run.name == panel.next.run.name
    until(lambda: other.finished)
    other.close()
    assert len(instances()) == before, "closing frees what the tab has opened"


def test_a_run_is_opened_from_the_list_of_runs(tuned):
    "Any run of the folder, not only the latest, comes with its settings and its tab Next."
    config, panel = tuned
    folder = panel.session.folder
    given = load_config(RunConfig, dict(name="another", runs_dir=str(folder.parent)))
    other = TrainerPanel(given, key="other", presets={})
    assert other.next is None
    browser = RunBrowser(folder.parent, key="list", open_run=other.look_at)
    browser.list.value = ()
    browser.open_button.click()
    assert "Choose one run" in browser.page.alert.value and other.next is None
    browser.list.value = (folder.name,)
    browser.open_button.click()
    until(lambda: other.next is not None)
    assert other.next.run.name == folder.name and not browser.page.alert.value
    assert other.form.config.method == config.method != given.method
    with pytest.raises(ValueError, match="has not begun"):
        other.look_at(folder.parent / "nothing")
    browser.close(), other.close()
    alone = RunBrowser(folder.parent, key="list")
    assert alone.open_button.layout.display == "none", "nothing opens it"
    alone.close()


def test_no_model_no_tab(tmp_path):
    "Neither for a run without a folder, nor for one that failed before it saved a model."
    panel = TrainerPanel(
        load_config(RunConfig, dict(train=dict(max_steps=5, seed=0))), job=count, key="none"
    )
    panel.result()
    assert panel.next is None and not panel.offer_next() and len(panel.tabs.children) == 5
    panel.session.folder = tmp_path
    assert not panel.offer_next()
    panel.close()


def test_labels_lead_to_a_panel_for_dpo(tuned):
    "It says how many are missing, is filled in, and its run has the tab in its turn."
    _, panel = tuned
    steps, run = panel.next, panel.next.run
    assert steps.actions["train"].start_button.disabled
    held_out, _ = run_prompts(run.config)  # All of them may be held out by DPO as well
    pairs = [
        dict(prompt=held_out[i % len(held_out)], answers=[f"It is {i}.", "No."]) for i in range(30)
    ]
    labels = PreferenceLabels(open_round(run)[0], pairs, repeat=0)
    for i in range(LABELS_NEEDED):
        labels.judge("tie" if i == 3 else "left")
    steps.show_labels()
    assert "23 of 24 preferences: 1 more are" not in steps.actions["train"].what.value
    assert "23 of 24 preferences: 1 more is needed" in steps.actions["train"].what.value
    labels.judge("right")
    steps.show_labels()
    assert not steps.actions["train"].start_button.disabled
    action = press(steps, "train")
    below = steps.panel
    assert action.opened.children == (below.widget,) and not below.form.obstacle
    assert panel.before.layout.display == "none" and below.form.config.name in panel.folded.value
    assert below.found is None, "nothing of the run above is offered again"
    assert below.form.config.method == "dpo" and gather_labels(run)[1] == 24
    below.form.field("train.max_steps").widget.value = "2"
    below.form.field("watch_memory").widget.value = False
    below.start_button.click()
    until(lambda: below.finished and below.next is not None)
    assert below.session.state == "done" and below.next.run.name == f"{run.name}-dpo"
    press(steps, "train")
    assert below.closed and action.opened.children == ()
    assert panel.before.layout.display is None and not panel.folded.value


def test_labels_that_are_taken_back_do_not_count(tmp_path):
    "The row of a pair that was judged in two ways is blank in its file."
    run = TrainedRun(tmp_path, load_config(RunConfig, {}))
    pairs = [dict(prompt=f"{i}?", answers=["Yes.", "No."]) for i in range(3)]
    labels = PreferenceLabels(open_round(run)[0], pairs, repeat=1.0)
    first = labels.plan[0][0]
    while labels.now is not None:
        number, left = labels.plan[len(labels.verdicts)]
        again = sum(v["pair"] == number for v in labels.verdicts)
        chosen = again if number == first else 0  # This one is judged both ways
        labels.judge("left" if left == chosen else "right")
    assert gather_labels(run)[1] == labels.count == 2


def test_sampling_shows_its_progress_and_a_stop_keeps_what_is_there(tuned):
    _, panel = tuned
    steps, shown = panel.next, []
    shutil.rmtree(steps.run.folder / "labels", ignore_errors=True)  # Those would be continued
    action = steps.actions["label"]
    steps.questions.value, steps.typed.value = "typed", "a\nb\nc"
    steps.pairs.value, steps.length.value = 2000, 8
    action.doing.observe(lambda change: shown.append(change["new"]), names="value")
    action.start_button.click()
    assert action.start_button.description == "Stop" and not action.start_button.disabled
    until(lambda: any(re.search(r"twice · [1-9]\d* of 2,000", text) for text in shown))
    action.pressed_at = 0.0  # A second click of a double click does not stop it
    action.start_button.click()
    action.wait()
    assert action.start_button.description == "Close" and not action.doing.value
    status = action.opened.children[0].children[1].value
    count = int(re.search(r"of ([\d,]+) judged", status)[1].replace(",", ""))
    assert 4 <= count < 2000, status  # A few of them twice
    press(steps, "label")
    assert action.start_button.description == "Label answers"


def test_an_error_is_one_sentence_below_its_button(tuned):
    _, panel = tuned
    steps = panel.next
    steps.questions.value, steps.typed.value = "typed", " \n"
    steps.run.config.init_from, init_from = "runs/gone/model", steps.run.config.init_from
    compare = press(steps, "compare")
    steps.run.config.init_from = init_from
    assert 'role="alert"' in compare.alert.value and "runs/gone/model" in compare.alert.value
    assert not compare.start_button.disabled
    assert compare.close_opened is None


def test_what_is_offered_depends_on_the_run(tmp_path, tuned):
    "A judge cannot talk, and a run without a base is not compared with one."
    _, panel = tuned
    run = panel.next.run

    def offered(**changes):
        config = load_config(RunConfig, dict(method="lora", init_from="x") | changes)
        steps = NextSteps(TrainedRun(run.folder, config), TrainerPanel, key="offered")
        names = [*steps.actions]
        steps.close()
        return names

    assert offered(method="reward", init_from="x") == ["report", "runs", "code"]
    assert "compare" not in offered(method="sft", init_from="")


def test_the_list_of_exports_shows_their_sizes(tuned, tmp_path):
    "As large as the file is, but for the tokenizer, which is the same in all of them."
    _, panel = tuned
    steps = NextSteps(panel.next.run, TrainerPanel, key="sizes")
    steps.kind.value = "q4_k_m"
    assert steps.kind.value == "q4_k_m", "showing the sizes does not change what was picked"
    texts = {kind: text for text, kind in steps.kind.options}
    sizes, more = export_sizes(panel.next.run), set()
    for kind in ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"):
        assert texts[kind].endswith(f" · {show_bytes(sizes[kind])}")
        exported = export_run(panel.next.run, kind, tmp_path)
        more.add((exported.path.stat().st_size - sizes[kind]) // 4096)
    assert 0 <= min(more) <= max(more) <= min(more) + 1
    assert sizes["q4_0"] < sizes["q8_0"] < sizes["f16"] and {*texts} == {*sizes}
    steps.close()


def test_an_export_tells_its_progress_and_fails_whole(tuned, tmp_path, monkeypatch):
    _, panel = tuned
    run, told, bars = panel.next.run, [], []
    with listen(bars.append):
        exported = export_run(run, "ollama", tmp_path / "out")
    written = [bar for bar in bars if bar.title == "Writing GGUF"][-1]
    assert written.clock.done == written.total > 3 and "ollama create" in exported.text
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "Modelfile",
        f"{run.name}-q8_0.gguf",
    ]
    (tmp_path / "file").write_text("")
    panel.next.place.value = str(tmp_path / "file")
    action = press(panel.next, "export")
    assert action.alert.value and not action.says.value
    panel.next.place.value = str(tmp_path / "out")
    monkeypatch.setitem(
        sys.modules,
        "google.colab",
        SimpleNamespace(files=SimpleNamespace(download=told.append)),
    )
    action = press(panel.next, "export")
    assert "Written: " in action.says.value
    action.opened.children[0].click()
    assert told[-1].endswith(".gguf") and json.dumps(told[-1])
