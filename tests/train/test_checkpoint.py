"Checkpoints under real accidents: killed processes, full disks, files that change."

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.processes import FORK, in_child, serve
from torch import nn

from trainkit.train import checkpoint
from trainkit.train.checkpoint import (
    FILES,
    load_checkpoint,
    checkpoint_problem,
    read_manifest,
    save_checkpoint,
    write_tensors,
)
from trainkit.config import seed_everything
from trainkit.train.checkpoint import run_lock
from trainkit.train.optim import OptimConfig, make_optimizer, make_schedule
from trainkit.train.checkpoint import find_checkpoints, latest_checkpoint, rotate_checkpoints


def learn(folder: Path, ready, steps: int = 40) -> None:
    "A run that saves every other step and resumes from what it finds."
    warnings.simplefilter("error")
    with run_lock(folder):
        seed_everything(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 64))
        config = OptimConfig(learning_rate=1e-2, warmup_steps=5)
        optimizer = make_optimizer(model, config)
        schedule = make_schedule(optimizer, config, steps)
        step, trace = 0, []
        if newest := latest_checkpoint(folder / "checkpoints"):
            state = load_checkpoint(newest, model, optimizer, schedule)
            step, trace = state["step"], state["trace"]
        ready.send("ready")
        while step < steps:
            x = torch.from_numpy(np.random.normal(size=(16, 64))).float() * random.random()
            loss = (model(x) - x.roll(1)).pow(2).mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step(), schedule.step()
            time.sleep(0.005)  # A kill finds it at work
            step += 1
            trace.append(loss.item())
            if step % 2 == 0:
                path = save_checkpoint(
                    folder / "checkpoints", model, optimizer, schedule, dict(step=step, trace=trace)
                )
                rotate_checkpoints(folder / "checkpoints", 2, keep=[path])


def start(folder: Path):
    "The run in a fresh process, as soon as it has read what there is to read."
    serve()
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=learn, args=(folder, there))
    process.start()
    there.close()
    assert here.recv() == "ready"
    return process


def finish(process) -> int:
    process.join()
    return process.exitcode


def proof(path: Path) -> dict:
    return read_manifest(path)["proof"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert finish(start(folder)) == 0
    return proof(folder / "checkpoints" / "checkpoint-40")


def kill_while_writing(folder: Path, process):
    "SIGKILL as soon as a half-written checkpoint is seen."
    while process.is_alive():
        if any(
            name.startswith(".checkpoint")
            for name in (
                os.listdir(folder / "checkpoints") if (folder / "checkpoints").exists() else ()
            )
        ):
            break
    process.kill()


def kill_at_random(folder: Path, process):
    time.sleep(random.Random(len(os.listdir(folder))).uniform(0, 0.1))
    process.kill()


def interrupted(folder: Path, kills) -> int:
    hit = 0
    for kill in kills:
        process = start(folder)
        kill(folder, process)
        hit += finish(process) == -signal.SIGKILL
        for path in find_checkpoints(folder / "checkpoints"):
            assert checkpoint_problem(path) == ""
    assert finish(start(folder)) == 0
    return hit


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_run_ends_as_the_uninterrupted_one(tmp_path, uninterrupted):
    assert interrupted(tmp_path, [kill_while_writing, kill_at_random]) >= 1
    assert proof(tmp_path / "checkpoints" / "checkpoint-40") == uninterrupted
    assert [p.name for p in find_checkpoints(tmp_path / "checkpoints")] == [
        "checkpoint-38",
        "checkpoint-40",
    ]
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_twenty_kills(tmp_path, uninterrupted):
    draw = random.Random(0)
    assert (
        interrupted(
            tmp_path, [draw.choice([kill_while_writing, kill_at_random]) for _ in range(20)]
        )
        >= 5
    )
    assert proof(tmp_path / "checkpoints" / "checkpoint-40") == uninterrupted


def pair(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    return model, make_optimizer(model, OptimConfig())


def step(model, optimizer):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_any_changed_byte_is_refused_or_harmless(tmp_path):
    model, optimizer = pair()
    step(model, optimizer)
    path = save_checkpoint(tmp_path, model, optimizer, state=dict(step=1, note="x"))
    draw, harmless = random.Random(0), 0
    for _ in range(150):
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        file = copy / draw.choice([*FILES, "manifest.json"])
        data = bytearray(file.read_bytes())
        if draw.random() < 0.7:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            del data[draw.randrange(len(data)) :]
        file.write_bytes(data)
        other, memory = pair(seed=1)
        before = {k: v.clone() for k, v in other.state_dict().items()}
        try:
            state = load_checkpoint(copy, other, memory)
        except ValueError as error:
            assert str(copy) in str(error)
            assert same(other.state_dict(), before) and not memory.state_dict()["state"]
        else:  # White space in the manifest
            assert (
                file.name == "manifest.json"
                and state == dict(step=1, note="x")
                and same(other.state_dict(), model.state_dict())
            )
            harmless += 1
        shutil.rmtree(copy)
    assert harmless < 30


def test_checkpoint_of_transformers_is_named_and_skipped(tmp_path):
    model, optimizer = pair()
    ours = save_checkpoint(tmp_path, model, optimizer, state=dict(step=5))
    theirs = tmp_path / "checkpoint-500"
    theirs.mkdir()
    (theirs / "trainer_state.json").write_text("{}")
    with pytest.warns(UserWarning, match="checkpoint-500: it was not written by trainkit"):
        assert latest_checkpoint(tmp_path) == ours
    with pytest.raises(ValueError, match="no manifest.json"):
        load_checkpoint(theirs, model)


def save_too_much(folder):
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save_checkpoint(folder, nn.Linear(10, 10), state=dict(step=1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save_checkpoint(folder, nn.Linear(1000, 1000), state=dict(step=2))
    except OSError as error:
        print(error.errno, error)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_file_too_large_for_the_disk_leaves_the_old_ones(tmp_path):
    folder = tmp_path / "checkpoints"
    number, message = in_child(save_too_much, folder, folder=tmp_path).stdout.split(" ", 1)
    assert (
        int(number) == errno.EFBIG
        and "Nothing was written" in message
        and "checkpoint-2" in message
    )
    assert (
        os.listdir(folder) == ["checkpoint-1"] and checkpoint_problem(folder / "checkpoint-1") == ""
    )


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounts a small disk"
)
def test_full_disk(tmp_path):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("may not mount here")
    try:
        save_checkpoint(tmp_path, nn.Linear(10, 10), state=dict(step=1))
        with pytest.raises(OSError, match="the disk is full") as caught:
            save_checkpoint(tmp_path, nn.Linear(1000, 1000), state=dict(step=2))
        assert caught.value.errno == errno.ENOSPC
        assert (
            os.listdir(tmp_path) == ["checkpoint-1"]
            and checkpoint_problem(tmp_path / "checkpoint-1") == ""
        )
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        with pytest.raises(OSError, match="read-only"):
            save_checkpoint(tmp_path, nn.Linear(10, 10), state=dict(step=3))
        assert os.listdir(tmp_path) == ["checkpoint-1"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
def test_lock_dies_with_the_run_though_a_forked_worker_lives(tmp_path):
    code = f"""
import os, time
from trainkit.train.checkpoint import run_lock
with run_lock({str(tmp_path)!r}):
    if (child := os.fork()) == 0:
        time.sleep(30)
        os._exit(0)
    print(child, flush=True)
    time.sleep(30)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(RuntimeError, match=f"process {process.pid}"), run_lock(tmp_path):
            pass
        process.kill()
        process.wait()
        os.kill(child, 0)  # The worker is still there
        with run_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers_go_on_exactly(tmp_path, kind):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = dict(vocab_size=64, bos_token_id=1, eos_token_id=2)

    def make(seed):
        torch.manual_seed(seed)
        model = (
            LlamaForCausalLM(
                LlamaConfig(
                    **small,
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    tie_word_embeddings=True,
                    attention_dropout=0.1,
                )
            )
            if kind == "llama"
            else GPT2LMHeadModel(
                GPT2Config(**small, n_embd=32, n_layer=2, n_head=2, n_positions=64)
            )
        ).train()
        return model, make_optimizer(model, OptimConfig(learning_rate=1e-2))

    def steps(model, optimizer, n):
        for _ in range(n):
            ids = torch.randint(0, 64, (2, 16))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make(0)
    steps(model, optimizer, 3)
    path = save_checkpoint(tmp_path, model, optimizer, state=dict(step=3))
    steps(model, optimizer, 3)
    other, memory = make(1)
    load_checkpoint(path, other, memory)
    assert other.get_input_embeddings().weight is other.get_output_embeddings().weight
    steps(other, memory, 3)
    assert same(other.state_dict(), model.state_dict())
    assert proof(save_checkpoint(tmp_path / "a", model, optimizer, state=dict(step=6))) == proof(
        save_checkpoint(tmp_path / "b", other, memory, state=dict(step=6))
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    ],
)
def test_other_optimizers_go_on_exactly(tmp_path, make):
    model, _ = pair()
    optimizer = make(model.parameters())
    for _ in range(3):
        step(model, optimizer)
    path = save_checkpoint(tmp_path, model, optimizer, state=dict(step=3))
    for _ in range(3):
        step(model, optimizer)
    other, _ = pair(seed=1)
    memory = make(other.parameters())
    load_checkpoint(path, other, memory)
    for _ in range(3):
        step(other, memory)
    assert same(other.state_dict(), model.state_dict())


def test_warnings_only_where_something_is_wrong(tmp_path):
    model, optimizer = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path, model, optimizer, state=dict(step=1))
        load_checkpoint(latest_checkpoint(tmp_path), model, optimizer)


def test_what_a_killed_save_left_goes_with_the_next_run(tmp_path):
    "Only under the lock, and only a run's own files; between two renames the new model is whole."
    from trainkit.train.checkpoint import run_lock

    for name in (
        ".model.ab12cd3_",
        "..model.ab12cd3_.x8cav3ky",
        ".best_model.abcdefgh",
        ".adapter.abcdefgh.old",
        ".control",
        ".mine.abcdefgh",
        ".env.template",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_text(name)
    (tmp_path / ".metrics.jsonl.abcdefgh").write_text("torn")
    (tmp_path / "best_model").mkdir()
    (tmp_path / ".model.zzzzzzzz").mkdir()
    (tmp_path / ".model.zzzzzzzz" / "w").write_text("new")
    (tmp_path / ".model.zzzzzzzz.old").mkdir()
    with run_lock(tmp_path):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".control",
        ".env.template",
        ".lock",
        ".mine.abcdefgh",
        "adapter",
        "best_model",
        "model",
    ]
    assert (tmp_path / "model" / "w").read_text() == "new"


@pytest.mark.parametrize("length", range(1, 9))
def test_the_data_of_a_file_are_aligned(length, tmp_path):
    "Whatever the names are, the first number stands at a multiple of eight bytes."
    from trainkit.train.checkpoint import write_tensors

    write_tensors(tmp_path / "x", {"n" * length: torch.arange(3.0)})
    data = (tmp_path / "x").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    assert begin % 8 == 0 and len(data) == begin + 12


def test_a_checkpoint_that_was_only_not_renamed_is_kept(tmp_path):
    "A kill between the last byte and the name loses nothing; half a checkpoint goes."
    from trainkit.train.checkpoint import run_lock

    model, optimizer = pair()
    home = tmp_path / "checkpoints"
    whole = save_checkpoint(home, model, optimizer, None, dict(step=5))
    os.replace(whole, home / f".{whole.name}.ab12cd3_")
    other = save_checkpoint(home, model, optimizer, None, dict(step=6))
    os.replace(other, home / f".{other.name}.ab12cd3_")
    (home / f".{other.name}.ab12cd3_" / "model.safetensors").unlink()
    with run_lock(tmp_path):
        pass
    assert [path.name for path in home.iterdir()] == [whole.name]


# --- files and folders in small pieces


def slow_hash(data, size):
    "Of the hashes of all pieces; of nothing there is one empty piece."
    pieces = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
    return sha256(b"".join(sha256(piece).digest() for piece in pieces)).hexdigest()


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 33, 500])
def test_a_file_is_hashed_in_pieces(length, tmp_path, monkeypatch):
    "However it comes in, and with more pieces than the cores have taken."
    monkeypatch.setattr(checkpoint, "HASH_CHUNK", 16)
    data = bytes(i * i % 251 for i in range(length))
    (tmp_path / "x").write_bytes(data)
    wanted = slow_hash(data, 16)
    assert checkpoint.file_hash(tmp_path / "x") == wanted
    for step in (1, 7, 16, 40, 1000):
        digest = checkpoint.PieceHash()
        for at in range(0, length, step):
            digest.update(memoryview(data)[at : at + step])
        assert digest.hexdigest() == wanted


def test_tensors_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "HASH_CHUNK", 16)
    syncs = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(5, 7),
        "a": torch.randn(3).double(),
        "c": torch.arange(9, dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "turned": torch.randn(4, 6).T,
        "one": torch.tensor(3, dtype=torch.int16),
    }
    asked = []
    facts = write_tensors(tmp_path / "x", tensors, lambda: asked.append(1) is not None)
    data = (tmp_path / "x").read_bytes()
    assert facts == dict(bytes=len(data), hash=slow_hash(data, 16))
    back = load_file(tmp_path / "x")
    assert {*back} == {*tensors} and all(torch.equal(back[k], t) for k, t in tensors.items())
    sizes = [t.numel() * t.element_size() for t in tensors.values()]
    head = 8 + int.from_bytes(data[:8], "little")
    assert head % 8 == 0 and len(data) == head + sum(sizes)
    assert len(asked) == sum(-(-size // 16) for size in (head, *sizes))
    assert 1 <= len(syncs) <= len(data) // 64
    with pytest.raises(InterruptedError):
        write_tensors(tmp_path / "x", tensors, lambda: True)
    with pytest.raises(TypeError, match="odd is torch.complex64"):
        write_tensors(tmp_path / "x", dict(odd=torch.zeros(1, dtype=torch.complex64)))


def some_checkpoints(folder, first, *steps):
    path = save_checkpoint(folder, nn.Linear(1, 1), state=dict(step=first))
    for step in steps:
        shutil.copytree(path, folder / f"checkpoint-{step}")


@pytest.mark.parametrize(
    "limit, keep, left",
    [
        (None, [], [1, 2, 3, 10]),
        (0, [], [1, 2, 3, 10]),
        (4, [], [1, 2, 3, 10]),
        (3, [], [2, 3, 10]),
        (1, [], [10]),
        (1, [1], [1, 10]),
        (2, [1], [1, 10]),
        (3, [1, 2], [1, 2, 10]),
        (9, [], [1, 2, 3, 10]),
    ],
)
def test_the_oldest_checkpoints_go(tmp_path, limit, keep, left):
    some_checkpoints(tmp_path, 10, 2, 1, 3)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-0").mkdir()  # Not whole: it does not count, and stays
    gone = rotate_checkpoints(tmp_path, limit, [tmp_path / f"checkpoint-{n}" for n in keep])
    steps = [int(path.name.split("-")[1]) for path in find_checkpoints(tmp_path)]
    assert steps == [0, *left]
    assert [int(path.name.split("-")[1]) for path in gone] == sorted({1, 2, 3, 10} - {*left})
    with pytest.raises(ValueError, match="save_total_limit = -1: must be 0"):
        rotate_checkpoints(tmp_path, -1)


def test_an_abandoned_future_is_put_aside(tmp_path):
    some_checkpoints(tmp_path, 1, 2, 3)
    assert checkpoint.set_aside(tmp_path, 3) is None
    assert checkpoint.set_aside(tmp_path, 1) == tmp_path / "abandoned-1"
    assert sorted(path.name for path in (tmp_path / "abandoned-1").iterdir()) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    some_checkpoints(tmp_path, 2)
    assert checkpoint.set_aside(tmp_path, 1) == tmp_path / "abandoned-2"
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_what_differs_is_named_a_few_at_a_time():
    saved = {f"w{i}": torch.zeros(2) for i in range(4)} | dict(both=torch.zeros(2, 3))
    wanted = {f"v{i}": torch.zeros(2) for i in range(2)} | dict(both=torch.zeros(3))
    with pytest.raises(ValueError, match="v0 is not in the checkpoint; and 2 more$"):
        checkpoint.check_weights(saved, wanted)
    saved.pop("w3"), wanted.pop("v1")
    with pytest.raises(ValueError, match=r"both is \(2, 3\) float32 in the .* and \(3,\) float32"):
        checkpoint.check_weights(saved, wanted)
    for names, more in ((["a", "b", "c"], ""), (["a", "b", "c", "d"], ", …")):
        text = checkpoint._other_groups([names], [["a"]])
        assert text.endswith(f"only there: {', '.join(sorted({*names} - {'a'})[:3])}")
        text = checkpoint._other_groups([["z"]], [names])
        assert text.endswith(f"only there: z; only here: a, b, c{more}")
    text = checkpoint._other_groups([["a", "b"]], [["a"], ["b"]])
    assert "(1 there, 2 here)" in text
    base = checkpoint.tensor_hashes({f"w{i}": torch.ones(i + 1) for i in range(4)})
    for count, more in ((1, "w3 of this"), (2, "w2 and 1 more of"), (4, "w0 and 3 more of")):
        weights = {f"w{i}": torch.ones(i + 1) for i in range(4 - count)}
        assert f"than {more}" in checkpoint.base_problem(base, weights)
    assert checkpoint.base_problem(base, {f"w{i}": torch.ones(i + 1) for i in range(4)}) == ""


@pytest.mark.parametrize("free, asynchronous", [(199, False), (200, True)])
def test_a_copy_is_made_where_two_fit(tmp_path, free, asynchronous, monkeypatch):
    tensors = {"model.safetensors": dict(a=torch.zeros(5, 4), b=torch.zeros(8).byte())}
    snapshot = checkpoint.Snapshot(1, tensors, b" " * 12, {}, {})
    assert snapshot.bytes == 80 + 8 + 12
    monkeypatch.setattr(checkpoint, "available_memory", lambda: (10**9, free))
    monkeypatch.setattr(checkpoint.CheckpointWriter, "write", lambda *args: None)
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(snapshot)
    writer.wait()
    assert writer.asynchronous is asynchronous


@pytest.mark.parametrize("step", [-1, True, 1.0, None])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(ValueError, match="must be a whole number from 0 up"):
        checkpoint.take_snapshot(nn.Linear(1, 1), state=dict(step=step))
    assert checkpoint.take_snapshot(nn.Linear(1, 1), state=dict(step=0)).step == 0


@pytest.mark.parametrize(("more", "age"), [(1, "a newer"), (-1, "an older")])
def test_a_checkpoint_of_another_format_says_which(more, age):
    format = checkpoint.FORMAT + more
    said = checkpoint._check_manifest(dict(format=format))
    assert said == f"was written by {age} version (format {format}, here {checkpoint.FORMAT})"


def test_on_windows_one_byte_far_behind_the_text_is_locked(tmp_path, monkeypatch):
    "A gigabyte behind it, so that others can read which process has the lock."
    locked = []
    windows = SimpleNamespace(
        LK_NBLCK=2, locking=lambda file, how, size: locked.append((os.lseek(file, 0, 1), how, size))
    )
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    monkeypatch.setattr(sys, "platform", "win32")
    with open(tmp_path / "lock", "w") as file:
        checkpoint.lock_file(file.fileno())
    assert locked == [(1 << 30, 2, 1)]


def test_warnings_of_checkpoints_name_the_line_that_asked(tmp_path, monkeypatch):
    state = checkpoint.rng_state()

    def resume():
        checkpoint.set_rng_state(state | dict(cuda=[torch.zeros(1)]))

    def taken(descriptor):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(checkpoint, "lock_file", taken)
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.warns(UserWarning) as caught:
        resume()
        with run_lock(tmp_path / "run"):
            latest_checkpoint(tmp_path)
    assert [w.filename for w in caught] == [__file__] * 3


def test_the_manifest_of_a_checkpoint_is_written_for_people(tmp_path):
    path = save_checkpoint(tmp_path, nn.Linear(2, 2), state=dict(step=1))
    text = (path / "manifest.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=2)
