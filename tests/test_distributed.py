"""Two processes on CPUs: equal to one, sharded or not, and lost without harm."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import decisionllm
from decisionllm import distributed
from decisionllm.commands.train import interruptible
from decisionllm.commands.training import check_sharded_texts
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.runs import checkpoint
from tests.commands.test_train import same_bits, saved
from tests.conftest import LOOP, NANO, PATIENCE, command, interrupt, metrics

pytestmark = [pytest.mark.numeric, pytest.mark.slow]
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
WEIGHTED = ("model.condition_on=none", "objective=advantage", "objective.temperature=0.3")
LORA = (
    "backbone.tune=lora",
    "text=goal",
    "optim.gradient_checkpointing=true",
    "log.keep_best=loss",
    "data.held_out=0.1",
)


def free_port():
    """A free port below those that Linux gives to connections, since it is bound only seconds
    later.
    """
    for port in np.random.default_rng(os.getpid()).permutation(np.arange(20_000, 32_768)).tolist():
        with socket.socket() as attempt, suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            return port


def near_one(one, two):
    for row, expected in zip(metrics(two), metrics(one), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    one, two = saved(one), saved(two)
    assert one.keys() == two.keys()
    # softmax takes no notice of a key's bias: its gradient is rounding, which Adam blows up
    for name in one:
        assert "k_proj.bias" in name or torch.allclose(
            one[name], two[name], rtol=1e-3, atol=1e-5
        ), name


CASES = {  # what accelerate is given, and words of the run
    "ddp, word embeddings unused, weighted actions": ({}, WEIGHTED),
    "ddp, lora": ({}, LORA),
    "fsdp2, with rollouts": (SHARDED, ("text=goal", "log.rollout_every=4")),
    "fsdp2, lora, weighted actions": (SHARDED, (*LORA, *WEIGHTED)),
}
TWO = """
import json, os, signal, sys
import decisionllm.commands.train
from decisionllm.__main__ import run
from decisionllm.datasets import sampling
path, cases = sys.argv[1], json.loads(sys.argv[2])
alone, child = dict(os.environ), os.fork()  # what torchrun does, but for importing torch again
ports = iter(range(int(os.environ["MASTER_PORT"]), 32_768))
draw = sampling.Sampler.__call__
def stopped(sampler, step):
    if sampler.seed == 7 and step == 1:
        signal.raise_signal(signal.SIGINT)
    return draw(sampler, step)
def train(folder, words, sampler=draw):
    sampling.Sampler.__call__ = sampler
    os.environ["MASTER_PORT"] = str(next(ports))  # one that is early would connect to the group before
    return run("train", [*words, f"run={folder}"])
codes = []
os.chdir(path)
for number, (given, words) in enumerate(cases):
    os.environ.clear()
    os.environ |= alone | given | {"RANK": str(int(child == 0)), "LOCAL_RANK": str(int(child == 0)), "WORLD_SIZE": "2"}
    codes.append(train(f"{number}/two", words))
    codes.append(train(f"{number}/again", words, stopped) - 130)
    codes.append(train(f"{number}/again", words))
    if not child:
        os.chdir("/")  # a machine that does not share the folder
    codes.append(train(f"{number}/two", words) - 1)
    os.chdir(path)
if child:
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.environ.clear()
    os.environ |= alone
    codes += [train(f"{number}/one", words) for number, (_, words) in enumerate(cases)]
sys.stdout.flush()
os._exit(any(codes))
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Every case trained by two processes, again with a stop, and by one: the folder of all, whose
    folders are the numbers of the cases, and what was said.
    """
    path = tmp_path_factory.mktemp("two")
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    common = (*LOOP, *NANO, "window=15", "optim.clip=0.5")
    cases = [(environment, [*common, *words]) for environment, words in CASES.values()]
    words = [sys.executable, "-c", TWO, str(path), json.dumps(cases)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=PATIENCE, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return path, done


def test_one_of_two_processes_speaks(two):
    _, done = two
    assert done.stdout.count("2 x cpu") == 3 * len(CASES)
    assert done.stderr.count("got one in 0/two that some do not") == 2
    assert done.stdout.count("training:") == 4 * len(CASES)
    assert "find_unused_parameters" not in done.stderr and "Warning" not in done.stderr


@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
def test_two_processes_equal_one_and_resume_to_the_bit(number, two):
    folder = two[0] / str(number)
    near_one(folder / "one", folder / "two")
    assert metrics(folder / "two") == metrics(folder / "again")
    assert same_bits(saved(folder / "two"), saved(folder / "again"))
    assert decisionllm.load(folder / "two").model.backbone.layout is not None


MANY = """
import os
import sys
import torch
from torch import distributed as dist, nn
from decisionllm import distributed

def last_broadcast():
    tensor = torch.zeros(1)
    work = dist.broadcast(tensor, 0, async_op=True)
    del tensor  # now a thread of gloo frees it, for which it needs Python's lock
    work.wait()

sys.setswitchinterval(1)  # seconds: a thread that wants the lock waits so long before it asks
for _ in range(100):
    accelerator = distributed.create_accelerator("no", cpu=True)
    model = accelerator.prepare(nn.Linear(8, 8))
    last_broadcast()
    accelerator.end_training()
    del model, accelerator
os._exit(0)  # an interpreter that ends kills a thread that wants its lock, and gloo aborts then
"""


def test_a_group_ends_while_a_thread_of_it_wants_the_lock_of_python():
    """Without the reference of `distributed.create_accelerator`, this waits for ever within a
    hundred runs.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | alone | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MANY]
    assert subprocess.run(words, env=environment, timeout=PATIENCE).returncode == 0


def test_a_lost_process_is_reported_before_the_launcher_ends_the_others():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError, match="gloo"), interruptible() as stop:
            raise RuntimeError("gloo: connection closed by peer")
        signal.raise_signal(signal.SIGTERM)
        assert stop == [True]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("rank", "world"), [(0, 2), (1, 3)])
def test_a_killed_process_ends_the_run_with_one_message_and_one_process_continues_it(
    rank, world, tmp_path, monkeypatch
):
    """By the command of the documentation, which starts two processes also where there is
    no GPU.
    """
    words = [
        *LOOP,
        *NANO,
        f"cache_dir={tmp_path}/data",
        "steps=100000",
        "log.every=1",
        "log.save_every=1",
        f"run={tmp_path}/run",
        f"optim.batch_size={2 * world}",
    ]
    shown = (
        (Path(__file__).parents[1] / "configs" / "accelerate" / "fsdp.yaml")
        .read_text(encoding="utf-8")
        .splitlines()[0]
    )
    start = (
        shown.removeprefix("# ")
        .removesuffix(" train ...")
        .replace("--num_processes 2", f"--num_processes {world}")
        .split()
    )
    launcher = [str(Path(sys.executable).parent / start[0]), *start[1:], "train", *words]
    process = subprocess.Popen(
        launcher,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        encoding="utf-8",
    )
    trainer = tmp_path / "run" / "checkpoint" / "trainer.json"
    patience = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < patience and not trainer.is_file():
        time.sleep(0.05)
    children = (
        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    )
    environments = {child: Path(f"/proc/{child}/environ").read_bytes() for child in children}
    ranks = {
        int(re.search(rb"\0RANK=(\d)", variables)[1]): int(child)
        for child, variables in environments.items()
    }
    assert set(ranks) == {*range(world)}
    os.kill(ranks[rank], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE)  # torch's own patience is half an hour
    assert process.returncode == 1 and f"{world} x cpu" in out
    printed = [line for line in err.splitlines() if line.startswith("decisionllm:")]
    step = json.loads(
        (checkpoint.find(tmp_path / "run") / "trainer.json").read_text(encoding="utf-8")
    )["step"]
    assert len(printed) == 1 and "a process of this run was lost" in printed[0], err
    assert f"the same command continues from step {step:,}" in printed[0]
    drawn = interrupt(monkeypatch, step + 2)
    assert command("train", *words) == 130 and drawn[0] == step
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, step + 4))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true"},
            "ACCELERATE_USE_FSDP: expected several processes, got one",
        ),
        (SHARDED | {"RANK": "0", "FSDP_VERSION": "1"}, "expected fsdp_version: 2, got 1"),
        (
            SHARDED | {"RANK": "0", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "take optim.gradient_checkpointing=true",
        ),
        (
            SHARDED | {"RANK": "0", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "set fsdp_cpu_ram_efficient_loading: false",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "shard by FSDP2"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "take optim.accumulate=4"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend of accelerate: expected no"),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            "expected no, or that of optim.precision, no; got bf16",
        ),
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
            "accelerate launch started one process",
        ),
    ],
)
def test_what_accelerate_was_told_is_done_or_refused(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        distributed.check_environment("no")


def test_a_cut_backbone_is_not_sharded():
    """Each process reads the texts of its own rows, alone; sharded blocks are read by all
    together.
    """
    accelerator = SimpleNamespace(is_fsdp2=True)
    model = SimpleNamespace(backbone=SimpleNamespace(text_layers=12))
    message = (
        "backbone.text_layers: expected 0 with FSDP2, got 12; take backbone.text_layers=0 "
        "backbone.layers=0, or configs/accelerate/ddp"
    )
    with pytest.raises(ValueError, match=message):
        distributed.wrap_model(accelerator, model, None, alike=True)


def test_a_sharded_model_needs_a_text_in_every_row_or_in_none():
    for tasks in ([""], ["a", "b"]):
        check_sharded_texts({ONLY: SimpleNamespace(tasks=tasks)})
    with pytest.raises(ValueError, match="FSDP2: expected a text in every episode or in none"):
        check_sharded_texts({ONLY: SimpleNamespace(tasks=["a", ""])})
