"Many processes: two on gloo equal one, checkpoints fit any number, killed workers are named."

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.processes import ROOT, ranked, shell, together

from trainkit.data.dataloader import Batches
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.optim import OptimConfig
from trainkit.train.config import TrainConfig
from trainkit.train.sharding import ZeRO
from trainkit.train.trainer import Trainer

ROWS = [
    dict(
        input_ids=(row := [(7 * i + j * j) % 97 for j in range(6 + 5 * i % 23)]),
        labels=[-100] * (i % 6) + row[i % 6 :],
    )
    for i in range(53)
]


def trainer(folder="", batch_size=8, tied=True, **config):
    "A run over masked rows of 6 to 28 tokens; last windows and batches are partial."
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=97,
            d_model=32,
            n_heads=4,
            n_layers=2,
            d_ff=48,
            max_seq_len=32,
            tie_embeddings=tied,
        )
    )
    config = (
        dict(
            output_dir=str(folder),
            max_steps=8,
            gradient_accumulation_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            save_total_limit=0,
            progress=False,
            max_grad_norm=0.3,
            mixed_precision="no",
        )
        | config
    )
    loss = config.pop("loss", None)
    from trainkit.train.objectives import lm_loss

    return Trainer(
        model,
        loss or lm_loss,
        Batches(ROWS, batch_size, seed=3),
        Batches(ROWS[:5], 2),
        TrainConfig(**config),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=2),
    )


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def work(folder, resume, strategies):
    "What one of several processes does by each strategy, and what it found."
    out = {}
    for name in strategies:
        strategy, _, untied = name.partition("-")
        os.environ["TRAINKIT_STRATEGY"] = strategy
        t, results = trainer(folder / name, batch_size=4, tied=not untied), {}
        size, step = sum(p.numel() * 4 for p in t.model.parameters()), t.step

        def then(group, t=t, results=results, size=size, step=step):
            step(group)
            if t.state.step == 2 and t.shards is not None:
                results |= dict(
                    share=t.shards.local_bytes() / size,
                    kinds=sorted({type(p).__name__ for p in t.shards.sharded.parameters()}),
                )

        t.step = then
        result = t.train(resume=resume)
        results |= dict(
            history=result.history,
            processes=t.accelerator.num_processes,
            wrapped=type(t.wrapped_model).__name__,
            tokens=result.tokens,
        )
        if t.accelerator.is_main_process:
            torch.save(weights(t.model), folder / name / "weights.pt")
        results |= dict(sum=float(weights(t.model).double().sum()), again=t.evaluate()["eval_loss"])
        out[name] = results
    print(json.dumps(out), flush=True)
    torch.distributed.barrier(), torch.distributed.destroy_process_group()
    os._exit(0)  # threads of gloo may abort what is left of the interpreter


def run_processes(n, folder, resume, *strategies, **env):
    folder.mkdir(exist_ok=True)
    return together(n, ranked, work, (folder, resume, strategies), env, folder=folder)


def check(one, result, two, folder, tolerance):
    "Losses, norms, evaluations and weights of several processes are those of one."
    assert len(result.history) == len(two["history"]) == 10 and two["tokens"] == result.tokens
    for a, b in zip(result.history, two["history"], strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "eval_tokens"):
            if key in a:
                assert a[key] == pytest.approx(b[key], abs=max(tolerance, 1e-6) * 5, rel=1e-6), key
    assert (weights(one.model) - torch.load(folder / "weights.pt")).abs().max() < tolerance


def test_two_processes_are_one(tmp_path):
    """2 processes x batch 4 x accumulation 2 equal 1 x 8 x 2, by DDP and FSDP2.

    Rows are masked and uneven, each process holds its share, a checkpoint fits any number.
    """
    results = run_processes(2, tmp_path, None, "ddp", "fsdp", "fsdp-untied")
    for name in ("ddp", "fsdp", "fsdp-untied"):
        one = trainer(tmp_path / f"one-{name}", tied="untied" not in name)
        result = one.train()
        first, second = (f[name] for f in results)
        check(one, result, first, tmp_path / name, 1e-6)
        assert (
            first["processes"] == 2
            and first["sum"] == second["sum"]
            and first["again"] == second["again"]
        )
        assert first["again"] == pytest.approx(result.history[-1]["eval_loss"], abs=1e-5)
        assert first["wrapped"] == (
            "DistributedDataParallel" if name == "ddp" else "FSDPTransformer"
        )
        if name != "ddp":
            assert (
                first["kinds"] == ["DTensor"]
                and 0.45 < first["share"] <= 0.55
                and first["share"] + second["share"] == pytest.approx(1)
            )
        resumed = trainer(
            tmp_path / f"resumed-{name}", 4, "untied" not in name, gradient_accumulation_steps=4
        )
        path = tmp_path / name / "checkpoints" / "checkpoint-4"
        if name == "fsdp-untied":
            continue
        assert resumed.train(resume=path).steps == 8
        assert (weights(resumed.model) - weights(one.model)).abs().max() < 1e-6  # 2 processes -> 1


def stop_one(folder):
    "Two processes, of which one gets a request to stop, long before anything is logged."
    torch.distributed.is_mpi_available = lambda: True  # As in Debian's torch: gloo is used
    t = trainer(folder, max_steps=3000, logging_steps=3000, eval_strategy="no", save_steps=3000)
    step = t.step

    def then(group):
        step(group)
        if t.state.step == 3 and t.accelerator.process_index == 1:
            t.control.stop()

    t.step = then
    print(json.dumps([t.train().stop_reason, t.state.step]), flush=True)
    torch.distributed.barrier(), torch.distributed.destroy_process_group()
    os._exit(0)


def test_all_processes_stop_soon_and_at_the_same_step(tmp_path):
    (tmp_path / "run").mkdir()
    one, other = together(2, stop_one, tmp_path / "run", folder=tmp_path)
    assert one == other and one[0] == "stopped" and one[1] < 3000
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{one[1]}").exists()


@pytest.mark.slow
def test_a_checkpoint_fits_more_processes(tmp_path):
    """From 1 process to 2 and 3, replicated or sharded, with as many batches in a step.

    Another number of batches is another run.
    """
    for n in (2, 3):
        one = trainer(tmp_path / f"one-{n}", 4, gradient_accumulation_steps=2 * n)
        one.train()
        path = tmp_path / f"one-{n}" / "checkpoints" / "checkpoint-4"
        run_processes(n, tmp_path / str(n), path, "ddp", "fsdp")
        for name in ("ddp", "fsdp"):
            moved = (
                (weights(one.model) - torch.load(tmp_path / str(n) / name / "weights.pt"))
                .abs()
                .max()
            )
            assert moved < 1e-6, (n, name)
    with pytest.raises(ValueError, match="belongs to another run: batches_per_step was 6 and is 4"):
        trainer(tmp_path / "other", 4, gradient_accumulation_steps=4).train(resume=path)


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="NO DEEPSPEED: make deepspeed installs it; ZeRO is not tested",
)
@pytest.mark.parametrize("offload", ["", "offload_optimizer", "offload_param"])
def test_zero_is_one_process(tmp_path, offload):
    "ZeRO 1, 2 and 3 on two processes equal one process: losses, norms, weights, checkpoints."
    zero = {offload: dict(device="cpu")} if offload else {}
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {**zero, "stage3_param_persistence_threshold": 0}})
    )
    variables = dict(TRAINKIT_DEEPSPEED_CONFIG=str(tmp_path / "ds.json"))
    one = trainer(tmp_path / "one")
    result = one.train()
    names = ("zero3",) if offload == "offload_param" else ("zero1", "zero2", "zero3")
    results = run_processes(2, tmp_path, None, *names, **variables)
    run_processes(
        2,
        tmp_path / "again",
        tmp_path / "zero3" / "checkpoints" / "checkpoint-4",
        *names,
        **variables,
    )
    for name in names:
        first, second = (f[name] for f in results)
        assert first["wrapped"] == "DeepSpeedEngine" and first["sum"] == second["sum"]
        check(one, result, first, tmp_path / name, 2e-6)
        assert (
            weights(one.model) - torch.load(tmp_path / "again" / name / "weights.pt")
        ).abs().max() < 2e-6  # zero3 -> all three
        assert (first["share"] < 0.6) == (name == "zero3")
        resumed = trainer(tmp_path / f"resumed-{name}", 4, gradient_accumulation_steps=4)
        resumed.train(resume=tmp_path / name / "checkpoints" / "checkpoint-4")
        assert (weights(resumed.model) - weights(one.model)).abs().max() < 2e-6  # 2 processes -> 1


FILES = {  # What users write about ZeRO, as a config of a run holds it
    "plain 1": dict(deepspeed=dict(zero_stage=1)),
    "plain 2": dict(deepspeed=dict(zero_stage=2)),
    "cpu": dict(deepspeed=dict(zero_stage=3, offload_optimizer=True, offload_param=True)),
    "nvme": dict(
        deepspeed=dict(
            zero_stage=3,
            offload_optimizer=dict(device="nvme", nvme_path="/fast"),
            offload_param=dict(device="nvme", nvme_path="/fast", buffer_count=4, max_in_cpu=10**9),
        )
    ),
    "a file": dict(
        deepspeed_config={  # As transformers' documents show it
            "fp16": {"enabled": "auto"},
            "bf16": {"enabled": True},
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "aio": {"block_size": 262144, "queue_depth": 32},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/fast",
                    "pipeline_read": True,
                },
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        }
    ),
}


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="NO DEEPSPEED: make deepspeed installs it; ZeRO is not tested",
)
@pytest.mark.parametrize("name", FILES)
def test_deepspeed_takes_the_file(name, monkeypatch):
    "DeepSpeed's own classes read each file that `launch` writes, with the values asked for."
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from trainkit.recipes.launcher import launch_files
    from trainkit.recipes.launcher import translate_launch
    from trainkit.train.sharding import zero_settings

    monkeypatch.setenv("WORLD_SIZE", "1")
    plan, _ = translate_launch(FILES[name], num_processes=2)
    written = json.loads(launch_files(plan, gpu=False)["deepspeed.json"])
    settings = zero_settings(written, plan.strategy, 0.5)
    read = DeepSpeedConfig(settings)
    zero = read.zero_config
    assert (
        f"zero{int(zero.stage)}" == plan.strategy
        and read.gradient_clipping == 0.5
        and read.train_micro_batch_size_per_gpu == 1
    )
    asked = FILES[name].get("deepspeed", {}) | FILES[name].get("deepspeed_config", {}).get(
        "zero_optimization", {}
    )
    for kind in ("offload_optimizer", "offload_param"):
        wanted, value = asked.get(kind), getattr(zero, kind)
        if not wanted:
            assert value is None
        elif wanted is True:
            assert value.device == "cpu"
        else:
            assert {k: str(getattr(value, k)) for k in wanted} == {
                k: str(v) for k, v in wanted.items()
            }
    if name == "a file":
        assert (
            zero.overlap_comm
            and zero.gather_16bit_weights_on_model_save
            and read.aio_config["queue_depth"] == 32
        )
    assert set(settings["zero_optimization"]) <= {
        f.alias or n for n, f in DeepSpeedZeroConfig.model_fields.items()
    }
    with pytest.raises(
        ValueError, match="offload_params"
    ):  # Its classes do refuse what they do not know
        DeepSpeedConfig(
            settings
            | dict(zero_optimization={**settings["zero_optimization"], "offload_params": {}})
        )


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="NO DEEPSPEED: make deepspeed installs it; ZeRO is not tested",
)
def test_nvme_without_its_library_says_what_to_install(tmp_path):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio is here")
    disk = dict(device="nvme", nvme_path=str(tmp_path))
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": dict(offload_optimizer=disk)})
    )
    variables = dict(TRAINKIT_DEEPSPEED_CONFIG=str(tmp_path / "ds.json"))
    with pytest.raises(AssertionError, match="needs libaio here: apt install libaio-dev"):
        run_processes(2, tmp_path, None, "zero3", **variables)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_distributed import *
folder, mark = sys.argv[1:]
t = trainer(folder, batch_size=4)
step = t.step
def then(group):
    step(group)
    if t.state.step == 6 and t.accelerator.process_index == 1 and not os.path.exists(mark):
        open(mark, 'w').close()
        print('about to die', file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
t.step = then
t.train(resume='auto')
if t.accelerator.is_main_process: torch.save(weights(t.model), os.path.join(folder, 'weights.pt'))
t.accelerator.wait_for_everyone()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_worker(tmp_path, monkeypatch, restarts):
    "It is named with its log; with a restart the job resumes and ends with the same weights."
    from trainkit.recipes.launcher import WorkerFailed, start
    from trainkit.recipes.launcher import LaunchConfig

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "job.py").write_text(KILLED.format(tests=str(ROOT / "tests" / "train")))
    program = [str(tmp_path / "job.py"), str(tmp_path / "run"), str(tmp_path / "mark")]
    plan = LaunchConfig(2, "fsdp", max_restarts=restarts)
    if not restarts:
        with pytest.raises(WorkerFailed, match="Process 1 died .killed") as error:
            start(program, plan, tmp_path / "launch")
        assert (
            error.value.exit_code == -signal.SIGKILL
            and "about to die" in str(error.value)
            and str(error.value.log) in str(error.value)
        )
        return
    start(program, plan, tmp_path / "launch")
    one = trainer(tmp_path / "one")
    one.train()
    assert (tmp_path / "mark").exists()
    assert (weights(one.model) - torch.load(tmp_path / "run" / "weights.pt")).abs().max() < 1e-6


SMALL = [
    "data.path=stdlib",
    "data.max_chars=100000",
    "data.max_length=32",
    "tokenizer.vocab_size=400",
    "model.d_model=32",
    "model.n_heads=2",
    "model.n_layers=2",
    "model.d_ff=48",
    "train.max_steps=6",
    "train.logging_steps=3",
    "train.eval_steps=3",
    "train.save_steps=3",
    "train.per_device_train_batch_size=4",
    "sampling.max_new_tokens=4",
    "train.progress=false",
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_launch_from_a_shell(tmp_path, strategy):
    "A run by two processes: one folder, with the model and losses of one process."
    done = shell(
        "launch",
        "--processes",
        "2",
        "--strategy",
        strategy,
        "--profile",
        "quick",
        "name=two",
        *SMALL,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("AdamW takes its place" in done.stderr) == (
        strategy == "fsdp"
    )  # of Muon, which the profile names
    adamw = ["optim.optim=adamw_torch_fused", "optim.learning_rate=0.00333"] * (strategy == "fsdp")
    one = shell(
        "train",
        "--profile",
        "quick",
        "name=one",
        *SMALL,
        *adamw,
        "train.gradient_accumulation_steps=2",
        cwd=tmp_path,
    )
    assert one.returncode == 0, one.stdout + one.stderr
    runs = tmp_path / "runs"
    assert sorted(p.name for p in runs.iterdir() if p.is_dir()) == ["one", "two"]
    run = runs / "two"
    for name in (
        "model",
        "best_model",
        "checkpoints",
        "tokenizer",
        "report.html",
        "curves.svg",
        "config.yaml",
        "metrics.jsonl",
        "log.txt",
        "launch/accelerate.yaml",
        "launch/command.sh",
        "launch/logs",
    ):
        assert (run / name).exists(), name
    assert f"TRAINKIT_STRATEGY={strategy}" in (run / "launch" / "command.sh").read_text()
    assert (
        "12 steps" not in (run / "log.txt").read_text()
        and "6 steps of 4 x 1 x 2 = 8 rows" in (run / "log.txt").read_text()
    )
    logs = [
        [
            r
            for r in map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
            if r["event"] == "log"
        ]
        for name in ("one", "two")
    ]
    assert [r["step"] for r in logs[1]] == [3, 6]  # once each, though two processes trained
    for a, b in zip(*logs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    from safetensors.torch import load_file

    a, b = (load_file(runs / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max() for k in a) < 1e-5
    alone = shell("train", "--resume", "runs/two", cwd=tmp_path)
    assert alone.returncode == 1 and "trainkit launch --resume runs/two" in alone.stderr
    again = shell("launch", "--resume", "runs/two", cwd=tmp_path)
    assert again.returncode == 0 and "--nproc-per-node=2" in again.stdout + again.stderr
    assert sorted(p.name for p in runs.iterdir() if p.is_dir()) == ["one", "two"]


@pytest.fixture
def machines():
    """Two network namespaces joined by a cable (needs root), else the loopback twice.

    Each is (command before python, environment).
    """
    names, ends = [f"tk{os.getpid()}{x}" for x in "ab"], [f"v{os.getpid()}{x}" for x in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    apart = (
        bool(shutil.which("ip"))
        and os.geteuid() == 0
        and all(ip("netns", "add", name) for name in names)
    )
    apart = apart and ip(
        "link",
        "add",
        ends[0],
        "netns",
        names[0],
        "type",
        "veth",
        "peer",
        "name",
        ends[1],
        "netns",
        names[1],
    )
    for i, (name, end) in enumerate(zip(names, ends, strict=True)):
        apart = apart and all(
            ip("-n", name, *words)
            for words in (
                ("addr", "add", f"10.77.0.{i + 1}/24", "dev", end),
                ("link", "set", end, "up"),
                ("link", "set", "lo", "up"),
            )
        )
    try:
        yield (
            [
                (["ip", "netns", "exec", name], dict(GLOO_SOCKET_IFNAME=end))
                for name, end in zip(names, ends, strict=True)
            ]
            if apart
            else [([], {})] * 2
        )
    finally:
        for name in names:
            ip("netns", "del", name)


LAUNCHER = """
import json, sys
from trainkit.recipes.launcher import start
from trainkit.recipes.launcher import LaunchConfig
program, plan, folder = map(json.loads, sys.argv[1:])
start(program, LaunchConfig(**plan), folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_two_launchers_are_two_nodes(tmp_path, machines, restarts):
    """Two launchers meet, train as one, and keep their own logs.

    With a restart a killed worker costs nothing.
    """
    from trainkit.recipes.launcher import free_port

    (tmp_path / "job.py").write_text(KILLED.format(tests=str(ROOT / "tests" / "train")))
    if not restarts:
        (tmp_path / "mark").touch()  # nobody dies
    program = [str(tmp_path / "job.py"), str(tmp_path / "run"), str(tmp_path / "mark")]
    address, port, running = "10.77.0.1" if machines[0][0] else "127.0.0.1", free_port(), []
    for rank, (before, env) in enumerate(machines):
        plan = dict(
            num_processes=1,
            strategy="fsdp",
            num_nodes=2,
            node_rank=rank,
            main_address=address,
            port=port,
            max_restarts=restarts,
        )
        words = [json.dumps(x) for x in (program, plan, str(tmp_path / "launch"))]
        running.append(
            subprocess.Popen(
                [*before, sys.executable, "-c", LAUNCHER, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                    "ACCELERATE_USE_CPU": "true",
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
            )
        )
    try:
        outputs = [p.communicate(timeout=600)[0] for p in running]
    finally:
        for p in running:
            p.kill()
    assert [p.returncode for p in running] == [0, 0], outputs
    one = trainer(tmp_path / "one")
    one.train()
    assert (weights(one.model) - torch.load(tmp_path / "run" / "weights.pt")).abs().max() < 1e-6
    assert (tmp_path / "mark").exists()
    for rank in range(2):
        logs = list((tmp_path / "launch" / f"node-{rank}" / "logs").rglob("stderr.log"))
        attempts = {
            path.parent.parent.name for path in logs
        }  # a machine whose process was only ended counts no attempt
        assert "attempt_0" in attempts and (f"attempt_{restarts}" in attempts or rank == 0)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("scaler", [None, object()])
def test_zero_is_refused_with_fp16_and_without_deepspeed(there, scaler, monkeypatch):
    "Before DeepSpeed is asked for anything, so it need not be installed."
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed") if there else None)
    accelerator = SimpleNamespace(scaler=scaler)
    given = SimpleNamespace(strategy="zero2", accelerator=accelerator, sharded=object())
    if there and scaler is None:
        assert ZeRO.cut(given) is given.sharded  # type: ignore
        return
    error, words = (ValueError, "fp16") if there else (ImportError, "deepspeed]")
    with pytest.raises(error, match=words):
        ZeRO.cut(given)  # type: ignore
