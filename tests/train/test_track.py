"What a run leaves: whole after a kill, readable, without secrets, with a standalone report."

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.processes import ROOT

from trainkit.train.loggers import MetricsLog
from trainkit.train.runs import INDEX, RunFolder, data_hash, list_runs, read_run
from trainkit.train.reports import compare_runs, run_sections, write_report


def strict(line: str):
    "JSON as the standard has it: no NaN, no Infinity."

    def refuse(word):
        raise ValueError(word)

    return json.loads(line, parse_constant=refuse)


def a_run(path, report_to="none", steps=20, loss=2.0, start=0, **kw):
    folder = RunFolder(path, "train:\n  max_steps: 20\n", dict(versions=dict(torch="2")), **kw)
    log = MetricsLog(folder, report_to)
    log.on_start(None, dict(total_steps=steps, start_step=start))
    if not start:
        log.on_sample(None, dict(step=0, samples=[("Once", " upon <b>")]))
    for step in range(start + 1, steps + 1):
        log.on_log(
            None,
            dict(
                step=step,
                loss=loss / step,
                learning_rate=1e-3,
                grad_norm=float("inf") if step == 3 else 1.0,
                tokens_per_second=1e4,
                seconds=step,
            ),
        )
    log.on_eval(None, dict(step=steps, eval_loss=loss, eval_seconds=0.5, best=True))
    log.on_sample(None, dict(step=steps, samples=[("Once", " upon a time")]))
    log.on_end(None, dict(step=steps, reason="max_steps"))
    folder.close()
    return folder


def test_every_line_is_strict_json(tmp_path):
    folder = a_run(tmp_path / "run", loss=float("nan"))
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    records = [strict(line) for line in lines]
    assert len(records) == 25
    assert [r["loss"] for r in records if r["event"] == "log"] == [None] * 20
    assert read_run(folder.path).series("grad_norm")[1][2] == float("inf")
    assert all(v != v for v in read_run(folder.path).series("loss")[1])


def test_killed_while_writing(tmp_path):
    "SIGKILL among thousands of lines: every line but the last is there, and a resume appends."
    code = (
        "import sys; from trainkit.train.runs import RunFolder\n"
        'f = RunFolder(sys.argv[1], "a: 1")\n'
        'f.record("start", dict(start_step=0))\n'
        "i = 0\n"
        'while True:\n    i += 1; f.record("log", dict(step=i, loss=1/i)); print(i, flush=True)'
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout
    for line in process.stdout:
        if int(line) >= 500:
            break
    process.send_signal(signal.SIGKILL)
    last = int((process.stdout.read().split() or [line])[-1])
    process.wait()
    path = tmp_path / "run" / "metrics.jsonl"
    steps = read_run(tmp_path / "run").series("loss")[0]
    assert steps[:last] == [*range(1, last + 1)] and len(steps) <= last + 1
    path.write_bytes(
        path.read_bytes() + b'{"event": "log", "step": 99999, "lo'
    )  # as if the last write had been cut
    assert read_run(tmp_path / "run").status == "unfinished"
    with RunFolder(tmp_path / "run", resume=True) as folder:
        folder.record("start", dict(start_step=100))
        folder.record("log", dict(step=101, loss=7.0))
    steps, losses = read_run(tmp_path / "run").series("loss")
    assert steps == [*range(1, 102)] and losses[-1] == 7.0


def test_every_cut_of_the_file_is_readable(tmp_path):
    whole = (a_run(tmp_path / "run", steps=3).path / "metrics.jsonl").read_bytes()
    for n in range(0, len(whole), 7):
        (tmp_path / "run" / "metrics.jsonl").write_bytes(whole[:n])
        run = read_run(tmp_path / "run")
        assert len(run.records) in (whole[:n].count(b"\n"), whole[:n].count(b"\n") + 1)
        run.final()


def test_many_processes_want_one_name(tmp_path):
    code = (
        'import sys; from trainkit.train.runs import RunFolder; print(RunFolder(sys.argv[1], "a: '
        '1").path.name)'
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "demo")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(4)
    ]
    names = [process.communicate()[0].strip() for process in processes]
    assert sorted(names) == ["demo", "demo-2", "demo-3", "demo-4"]
    assert all((tmp_path / name / "config.yaml").exists() for name in names)


def test_no_secret_in_any_file(tmp_path, monkeypatch):
    secret = 'c0rrect-horse-&-"battery"'
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = RunFolder(tmp_path / "run", f"token: {json.dumps(secret)}\n", dict(note=secret))
    log = MetricsLog(folder, ["tensorboard", "trackio"])
    log.on_start(None, dict(total_steps=1, config=dict(token=secret)))
    log.on_log(None, dict(step=1, loss=1.0, note=secret))
    log.on_sample(None, dict(step=1, samples=[("say", secret)]))
    log.on_end(None, dict(step=1, reason=f"error: 401 for {secret}"))
    write_report(folder, f"with {secret}")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            text = path.read_bytes().decode("utf-8", "replace")
            assert "c0rrect-horse" not in text, path.name


def test_tensorboard_reads_it_back(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = a_run(tmp_path / "run", "tensorboard")
    board = accumulator.EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [e.step for e in board.Scalars("train/loss")] == [*range(1, 21)]
    assert [round(e.value, 5) for e in board.Scalars("train/loss")] == [
        round(2 / step, 5) for step in range(1, 21)
    ]
    assert [e.value for e in board.Scalars("eval/loss")] == [2.0]
    assert b"upon a time" in board.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0]


TRACK = (
    'import sys; sys.path[:0] = ["tests", "tests/train"]; from test_track import a_run; '
    "from trainkit.train.runs import read_run\n"
    "print(a_run(sys.argv[1], sys.argv[2]).path.name)"
)


def test_trackio_stays_on_this_machine(tmp_path):
    pytest.importorskip("trackio")
    import sqlite3

    environment = os.environ | {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRACK, str(tmp_path / "io"), "trackio"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip().splitlines()[-1:] == ["io"], done.stderr
    assert "dashboard" not in done.stdout  # what it prints goes to the log
    rows = [
        json.loads(m)
        for (m,) in sqlite3.connect(tmp_path / "trackio" / "trainkit.db").execute(
            "select metrics from metrics order by step"
        )
    ]
    assert [r["train/loss"] for r in rows if "train/loss" in r] == [
        2 / step for step in range(1, 21)
    ]


SECRET = "c0rrect-horse-battery"


def test_wandb_offline(tmp_path):
    "Offline, in the run folder, each number once after a resume, and no secret."
    pytest.importorskip("wandb")
    home = tmp_path / "home"
    home.mkdir()
    code = (
        'import sys; sys.path[:0] = ["tests", "tests/train"]; from test_track import a_run\n'
        'path = a_run(sys.argv[1], "wandb").path; a_run(path, "wandb", steps=24, start=10, '
        "resume=True); print(path.name)"
    )
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "XDG"))}
    environment = quiet | {
        "HOME": str(home),
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
        "MY_API_KEY": SECRET,
        "WANDB_SILENT": "true",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "w"), "--password", SECRET],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "w"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "w"]
    strays = [
        p.relative_to(home)
        for p in home.rglob("*")
        if p.is_file() and p.suffix != ".log" and "netrc" not in p.name and "trainkit" not in str(p)
    ]
    assert all(p.parts[0] in (".config", ".cache", ".local") for p in strays), (
        strays
    )  # its own settings and caches, nothing of the run
    assert not (ROOT / "wandb").exists()
    runs = sorted((tmp_path / "w").rglob("*.wandb"))
    assert len(runs) == 2 and len({p.stem for p in runs}) == 1  # the same run, twice opened
    steps = [wandb_steps(path) for path in runs]
    assert steps == [[*range(1, 21)], [*range(21, 25)]]
    for path in (tmp_path / "w").rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_wandb_files_a_run_under_the_project_of_the_environment(tmp_path, monkeypatch):
    import types

    heard = []
    fake = types.SimpleNamespace(
        Settings=lambda **more: more,
        init=lambda **more: (
            heard.append(more)
            or types.SimpleNamespace(
                define_metric=lambda *a, **k: None, finish=lambda *a, **k: None
            )
        ),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    from trainkit.train.loggers import open_wandb

    folder = types.SimpleNamespace(path=tmp_path)
    open_wandb(folder, "trainkit", {}, 0)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_wandb(folder, "trainkit", {}, 0)
    assert [h["project"] for h in heard] == ["trainkit", "mine"]


def wandb_steps(path):
    """Steps of the training loss in a wandb file: LevelDB's log format, in blocks of 32 KiB.

    The blocks hold pieces of protobuf records.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, whole, steps = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block holds no header
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind not in (1, 4):
            continue  # 1 full, 2 first, 3 middle, 4 last
        record, whole = wandb_internal_pb2.Record.FromString(whole), b""
        values = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "train/loss" in values:
            steps.append(values.get("_step", record.history.step.num))
    return steps


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_tracker_is_named_before_anything_runs(tmp_path, monkeypatch, name):
    import trainkit.train.loggers

    monkeypatch.setattr(trainkit.train.loggers, "find_spec", lambda n: None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        MetricsLog(RunFolder(tmp_path / "run"), name)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_warns_once_and_the_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path / "run", "a: 1")
    folder.files["metrics.jsonl"].close()
    folder.files["metrics.jsonl"] = open("/dev/full", "a", buffering=1)
    log = MetricsLog(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            log.on_log(None, dict(step=step, loss=1.0))
    assert [str(w.message) for w in caught if "cannot be written" in str(w.message)] != []
    assert len([w for w in caught if "cannot be written" in str(w.message)]) == 1
    assert (folder.path / "log.txt").read_text().count("loss 1") == 3


@pytest.mark.skipif(
    os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0,
    reason="root may write anywhere",
)
def test_a_read_only_place_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="run"):
        RunFolder(tmp_path / "run")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "runs").write_text("I am a file")
    with pytest.raises(OSError, match="runs"):
        RunFolder(tmp_path / "runs" / "demo")


def test_reading_needs_no_torch():
    code = (
        'import sys; import trainkit.train.loggers; print("torch" in sys.modules, '
        '"accelerate" in sys.modules)'
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False False"
    )


def test_compare_and_list(tmp_path):
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b", loss=4.0, data="other")
    both = compare_runs(a.path, b.path)
    assert both.part("data") == {"data_hash": (None, "other")}
    assert both.part("result")["eval_loss"] == (2.0, 4.0)
    assert both.part("config") == {}
    assert sorted(run.name for run in list_runs(tmp_path)) == ["a", "b"]


def test_a_resumed_run_logs_each_step_once(tmp_path):
    "In the file itself, not only for our reader; undone steps go, earlier ones are unchanged."
    folder = a_run(tmp_path / "run", steps=20)
    before = (folder.path / "metrics.jsonl").read_text().splitlines()
    a_run(folder.path, steps=30, start=10, resume=True)
    records = [strict(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["event"] == "log"] == [*range(1, 31)]
    assert [r["event"] for r in records].count("end") == 1 and [r["event"] for r in records].count(
        "start"
    ) == 2
    assert (folder.path / "metrics.jsonl").read_text().splitlines()[:12] == before[:12]
    assert (folder.path / "log.txt").read_text().count("step 15  loss") == 2  # the diary keeps both


def test_tensorboard_forgets_what_a_resume_undid(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = a_run(tmp_path / "run", "tensorboard")
    a_run(folder.path, "tensorboard", steps=24, loss=4.0, start=10, resume=True)
    board = accumulator.EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [(e.step, round(e.value, 4)) for e in board.Scalars("train/loss")] == [
        (s, round((2 if s <= 10 else 4) / s, 4)) for s in range(1, 25)
    ]


def test_curves_are_drawn_from_the_first_step(tmp_path, real_curves):
    "One record is a picture, and a run that is killed has left one."
    log = MetricsLog(RunFolder(tmp_path / "run"), draw_every=0)
    log.on_start(None, dict(total_steps=9, start_step=0))
    log.on_log(
        None,
        dict(
            step=1,
            loss=2.0,
            learning_rate=1e-3,
            grad_norm=1.0,
            tokens_per_second=5.0,
            memory_gib=1.0,
        ),
    )
    text = (tmp_path / "run" / "curves.svg").read_text()
    for words in (
        "Loss: train is 2 at step 1",
        "Learning rate: ",
        "Gradient norm: ",
        "Tokens a second: ",
        "Memory in GB: ",
    ):
        assert words in text, words


@pytest.mark.browser
def test_curves_in_a_browser(tmp_path, browser):
    path = a_run(tmp_path / "run").path / "curves.svg"
    page = browser.new_page(viewport=dict(width=1000, height=900))
    page.goto(path.as_uri())
    boxes = page.evaluate(
        '[...document.querySelectorAll("svg svg")].map(s => { const b = s.getBoundingClientRect(); '
        "return [b.x, b.y, b.width, b.height] })"
    )
    assert len(boxes) >= 4
    for i, (x, y, w, h) in enumerate(boxes):
        for u, v, p, q in boxes[:i]:
            assert x >= u + p - 1 or u >= x + w - 1 or y >= v + q - 1 or v >= y + h - 1, (
                "pictures lie on each other"
            )


def test_numbers_from_a_loop_of_ones_own(tmp_path, capsys):
    with MetricsLog(RunFolder(tmp_path / "own"), console=True) as tracker:
        tracker.log(dict(loss=2.0))
        tracker.log(dict(loss=1.0, eval_loss=3.0, note="text"), 10)
        tracker.update(dict(loss=0.5))
    assert tracker.current_step == 11
    assert read_run(tmp_path / "own").series("loss") == ([1, 10, 11], [2.0, 1.0, 0.5])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(
        re.fullmatch(r"\d\d:\d\d:\d\d  step \d+  loss .*", line) for line in lines
    )


def test_report_of_a_long_run_stays_small(tmp_path):
    with RunFolder(tmp_path / "long", "a: 1") as folder:
        folder.record("start", dict(total_steps=50_000, start_step=0))
        for step in range(1, 50_001, 5):
            folder.record(
                "log",
                dict(
                    step=step,
                    loss=2 + 1 / step,
                    grad_norm=1.0,
                    learning_rate=1e-4,
                    tokens_per_second=8e3 + step % 7,
                ),
            )
        for step in range(0, 50_000, 500):
            folder.record("sample", dict(step=step, samples=[("p", "x" * 400)]))
    assert write_report(folder).stat().st_size < 100_000


@pytest.mark.browser
@pytest.mark.parametrize(
    "width, scheme, page_colour", [(1200, "light", "255, 255, 255"), (420, "dark", "17, 17, 17")]
)
def test_report_in_a_browser(tmp_path, browser, width, scheme, page_colour):
    "It loads nothing else, even with a section that tries; fits a phone; follows the colours."
    folder = a_run(tmp_path / "run")
    evil = '<img src="http://127.0.0.1:9/x.png"><script>document.title = "owned"</script>'
    path = write_report(
        folder,
        "A <title>",
        [
            *run_sections(read_run(folder.path)),
            ("Wide", "<pre>" + "word" * 200 + "</pre>"),
            ("Evil", evil),
        ],
    )
    page = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
    asked, problems = [], []
    page.on("requestfinished", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.goto(path.as_uri())
    assert asked == [path.as_uri()]
    assert any("Content Security Policy" in text for text in problems)
    assert page.title() == "A <title>"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({page_colour})"
    assert page.locator("svg[role=img]").count() >= 4 and page.locator("h2").all_inner_texts()[
        :3
    ] == ["Result", "Curves", "Samples"]
    assert re.search(r"upon <b>\s*$", page.locator("pre").first.inner_text())
    sizes = page.evaluate(
        '[...document.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height)'
    )
    assert min(sizes) >= 9, "words too small to read"


def test_a_fingerprint_is_of_the_numbers_wherever_they_are():
    "A tensor that learns, or lies on a GPU, is its numbers."
    import torch

    here = torch.arange(3.0)
    others = [here.clone().requires_grad_(), *([here.cuda()] if torch.cuda.is_available() else [])]
    assert {data_hash([t]) for t in others} == {data_hash([here])} != {data_hash([here + 1])}


def long_log(path, steps, starts=((0, 0),)):
    "A log with spikes, a NaN, evaluations and resumes: (line of each resume, its step)."
    import random

    draw, step, after = random.Random(0), 0, dict(starts)
    with open(path, "w", encoding="utf-8") as file:
        for line in range(steps):
            if line in after:
                step = after[line]
                file.write(
                    json.dumps(
                        dict(
                            event="start",
                            time="2026-01-01T00:00:00",
                            start_step=step,
                            total_steps=steps,
                        )
                    )
                    + "\n"
                )
            step += 1
            loss = (
                None
                if line == steps // 3
                else 1000.0
                if line in (steps // 2, steps // 4)
                else -1000.0
                if line == steps // 5
                else 2 + draw.random()
            )
            file.write(
                json.dumps(
                    dict(
                        event="log",
                        time="2026-01-01T00:00:01",
                        step=step,
                        loss=loss,
                        grad_norm=draw.random(),
                        learning_rate=1 / step,
                        tokens_per_second=100.0,
                    )
                )
                + "\n"
            )
            if line % 500 == 499:
                file.write(
                    json.dumps(dict(event="eval", time="t", step=step, eval_loss=1 + draw.random()))
                    + "\n"
                )
        file.write(json.dumps(dict(event="end", time="t", step=step, reason="finished")) + "\n")


@pytest.mark.parametrize("starts", [((0, 0),), ((0, 0), (20_000, 14_000), (50_000, 30_000))])
def test_of_a_long_log_a_bounded_part_is_kept_and_it_agrees_with_the_whole(tmp_path, starts):
    from trainkit.train.runs import Run, read_metrics

    path = tmp_path / "metrics.jsonl"
    long_log(path, 70_000, starts)
    part, whole = (
        Run(tmp_path, records=read_metrics(path, bytes_)) for bytes_ in (4 * 2**20, 2**40)
    )
    assert len(part.records) < 10_000 < 35_000 < len(whole.records)
    assert (
        part.final() == whole.final()
        and part.keys() == whole.keys()
        and part.status == whole.status == "finished"
        and part.started == whole.started
    )
    assert part.series("eval_loss") == whole.series("eval_loss")
    for key in ("loss", "grad_norm"):
        (steps, values), (every, full) = part.series(key), whole.series(key)
        real, all_real = ([v for v in some if v == v] for some in (values, full))
        assert (steps[0], steps[-1], min(real), max(real)) == (
            every[0],
            every[-1],
            min(all_real),
            max(all_real),
        ), key
        assert (len(real) < len(values)) == (len(all_real) < len(full))
        known = dict(zip(every, full, strict=True))
        assert all(v != v or known[step] == v for step, v in zip(steps, values, strict=True))
        assert (
            max(b - a for a, b in zip(steps, steps[1:], strict=False)) < 1000
        )  # No hole in the picture


def test_a_log_of_somebody_else_breaks_no_command(tmp_path):
    "Wrong types and absurd numbers in a log, an environment and an index."
    from support.processes import call

    lines = [
        "3",
        "{}",
        "[]",
        '{"event": 3}',
        '{"event": "log", "step": "x", "loss": 1}',
        '{"event": "log", "step": [1], "loss": 1}',
        '{"event": "log", "step": 1e999, "loss": 1}',
        '{"event": "start", "start_step": "x"}',
        '{"event": "sample"}',
        '{"event": "sample", "samples": 3, "step": 1}',
        '{"event": "log", "step": null, "loss": 1, "time": []}',
        '{"event": "log", "step": 1, "loss": ' + "9" * 400 + "}",
        '{"event": "log", "step": 1, "loss": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"event": "end", "reason": 3, "time": 4}',
    ]
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(
            "\n".join([*lines, '{"event": "log", "step": 2, "loss": 3.5}'])
        )
        (tmp_path / "runs" / name / "config.yaml").write_text("[" * 100_000)
        (tmp_path / "runs" / name / "environment.json").write_text("[]")
    for words in (["show", "a", "--report"], ["list"], ["compare", "a", "b"]):
        done = call("runs", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_an_evaluation_that_a_kill_cut_off_from_its_run_stands_there_once(tmp_path):
    "The last evaluation follows the end; killed before the report, a resumed run repeats it."

    def begin(start):
        return dict(start_step=start, total_steps=4)

    with RunFolder(tmp_path / "a") as folder:
        folder.record("start", begin(0))
        for event, step in (
            ("log", 2),
            ("eval", 2),
            ("log", 4),
            ("eval", 4),
            ("end", 4),
            ("eval", 4),
        ):
            folder.record(
                event, dict(step=step, eval_loss=1.0) if event == "eval" else dict(step=step)
            )
    with RunFolder(tmp_path / "a", resume=True) as folder:
        folder.rewind(4, again=True)
        folder.record("start", begin(4))
        for event in ("end", "eval"):
            folder.record(event, dict(step=4, eval_loss=1.0))
    evaluations = [
        (r["event"], r["step"]) for r in read_run(tmp_path / "a").records if r["event"] != "start"
    ]
    assert evaluations == [
        ("log", 2),
        ("eval", 2),
        ("log", 4),
        ("eval", 4),
        ("end", 4),
        ("eval", 4),
    ]
    unchanged = folder.path / "metrics.jsonl"
    assert unchanged.read_text().count('"eval"') == 3


def test_compared_runs_show_every_curve_that_was_logged(tmp_path):
    "The known curves in their order, and after the losses what an evaluation measured besides."
    folders = [RunFolder(tmp_path / name) for name in "ab"]
    keys = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")
    for folder in folders:
        log = MetricsLog(folder)
        log.on_start(None, dict(total_steps=9, start_step=0))
        for step in range(1, 9):
            log.on_log(None, dict(step=step, **dict.fromkeys(keys, 1 / step)))
            log.on_eval(None, dict(step=step, eval_loss=1 / step, eval_exact_match=step / 9))
        folder.close()
    page = compare_runs(*(folder.path for folder in folders)).pictures
    titles = re.findall(
        "Exact match|Evaluation loss|Loss|Gradient norm|Learning rate|Tokens a second|MFU", page
    )
    assert [*dict.fromkeys(titles)] == [
        "Loss",
        "Evaluation loss",
        "Exact match",
        "Gradient norm",
        "Learning rate",
        "Tokens a second",
        "MFU",
    ]


def test_a_list_of_runs_has_the_columns_that_some_run_has(tmp_path):
    "Empty where another run has not come so far; a column that no run has is left out."
    a_run(tmp_path / "whole")
    RunFolder(tmp_path / "begun").close()
    rows = {row["run"]: row for row in list_runs(tmp_path).rows()}
    columns = ["step", "loss", "eval_loss", "best_eval_loss", "tokens_per_second", "seconds"]
    assert [*rows["whole"]] == [*rows["begun"]] == ["run", "started", *columns, "status"]
    values = [20, 0.1, 2.0, 2.0, 1e4, 20]
    assert [rows["whole"][name] for name in columns] == values
    assert [rows["begun"][name] for name in columns] == [None] * 6
    log = MetricsLog(folder := RunFolder(tmp_path / "other" / "loss"))
    log.on_log(None, dict(step=1, loss=3.0))
    folder.close()
    (row,) = list_runs(tmp_path / "other").rows()
    assert [*row] == ["run", "started", "step", "loss", "status"]


def test_a_short_index_of_runs_only_grows(tmp_path):
    "Two processes that list the same folder do not overwrite what the other one has read."
    for step in (1, 2, 3):
        with RunFolder(tmp_path / "run", resume=step > 1) as folder:
            folder.record("log", dict(step=step, loss=1.0 / step))
        assert [run.name for run in list_runs(tmp_path)] == ["run"]
        assert (tmp_path / INDEX).read_bytes().count(b"\n") == step


@pytest.mark.parametrize(("lines", "after"), [(102, 103), (103, 1)])
def test_an_index_is_rewritten_when_it_has_a_hundred_lines_too_many(tmp_path, lines, after):
    for step in (1, 2):
        with RunFolder(tmp_path / "run", resume=step > 1) as folder:
            folder.record("log", dict(step=step, loss=1.0))
        if step == 1:
            list_runs(tmp_path)
            index = tmp_path / INDEX
            index.write_bytes(index.read_bytes() * lines)
    list_runs(tmp_path)
    assert index.read_bytes().count(b"\n") == after


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_tracker_that_is_too_old_is_named_with_what_to_install(name, monkeypatch):
    from trainkit.train import loggers

    monkeypatch.setattr(loggers.metadata, "version", lambda _: "0.0.9")
    monkeypatch.setattr(loggers, "find_spec", lambda _: True)
    with pytest.raises(ImportError, match=rf'{name} 0.0.9 is too old; pip install "{name}>='):
        loggers.check_report_to(name)
    assert loggers.check_report_to("all") == []
