"""Ways to arrive with your own data, environment or model: python examples/ten_journeys.py
[NAME ...] --folder=runs/journeys

Each journey is a function that can be read alone. It makes small data as you would have them, runs
the commands that you would type, with few training steps, and checks what came out. All of them
take about three minutes.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from decisionllm import Episode, Spec, load
from decisionllm.__main__ import main as decisionllm
from decisionllm.datasets.arrays import from_episodes

FEW = (
    "steps=10 backbone=nano backbone.width=32 backbone.layers=1 window=4 optim.batch_size=16 "
    "log.tracker=none log.validation_batches=1"
)


def command(line: str, expected: int = 0) -> str:
    """Run a command line as a shell would. Returns its message, if it was refused.

    Args:
        line: such as "train dataset=synthetic".
        expected: exit code, 0 or that of an error.
    """
    print(f"$ decisionllm {line}", flush=True)
    sys.argv = ["decisionllm", *shlex.split(line)]
    errors = StringIO()
    with redirect_stderr(errors):
        code = decisionllm()
    message = errors.getvalue()
    if code != expected:
        raise RuntimeError(f"expected exit code {expected}, got {code}: {message}")
    return message


def results(folder: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation."""
    return [
        json.loads(line)
        for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]


# -- Gymnasium --


class Reach(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A point in a plane walks to a goal.

    An observation has two parts, whose keys are not in alphabetical order.
    """

    def __init__(self) -> None:
        plane = spaces.Box(-3, 3, (2,), np.float32)
        self.observation_space = spaces.Dict(pos=plane, desired_goal=plane)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.pos, self.goal = self.np_random.uniform(-2, 2, (2, 2)).astype(np.float32)
        return self.seen(), {}

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.pos = np.clip(self.pos + 0.5 * np.asarray(action, np.float32), -3, 3)
        distance = float(np.linalg.norm(self.pos - self.goal))
        return self.seen(), -distance, False, False, {}

    def seen(self) -> dict[str, np.ndarray]:
        return {"pos": self.pos.copy(), "desired_goal": self.goal.copy()}


def register_reach() -> None:
    """Let `gymnasium.make` find it, with a time limit."""
    if "JourneyReach-v0" not in gymnasium.registry:
        gymnasium.register("JourneyReach-v0", entry_point=f"{__name__}:Reach", max_episode_steps=10)


def minari_dict(folder: Path) -> None:
    """A Minari dataset with Dict observations; the goal is also said in words."""
    import minari
    from minari.data_collector import EpisodeBuffer

    register_reach()
    os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
    env = gymnasium.make("JourneyReach-v0")
    episodes = []
    for seed in range(40):
        observations, actions, rewards, over = [env.reset(seed=seed)[0]], [], [], False
        while not over:
            towards = observations[-1]["desired_goal"] - observations[-1]["pos"]
            actions.append(np.clip(2 * towards, -1, 1))
            after, reward, terminated, truncated, _ = env.step(actions[-1])
            observations.append(after)
            rewards.append(reward)
            over = terminated or truncated
        columns = {key: np.stack([seen[key] for seen in observations]) for key in observations[0]}
        never = [False] * len(rewards)
        episodes.append(
            EpisodeBuffer(
                None, None, None, columns, np.stack(actions), rewards, never, [*never[1:], True]
            )
        )
    minari.create_dataset_from_buffers(
        "mine/reach-v0",
        episodes,
        env=env,
        eval_env=env,
        data_format="hdf5",
        description="x",
        author="x",
        author_email="x",
        code_permalink="x",
        algorithm_name="x",
    )

    data = (
        "dataset=minari dataset.minari_id=mine/reach-v0 text=template 'dataset.task=\"Go to "
        "{desired_goal}.\"'"
    )
    environment = "env=gymnasium env.id=JourneyReach-v0 'env.task=\"Go to {desired_goal}.\"'"
    command(f"train {data} {environment} run={folder}/run {FEW}")
    command(f"evaluate run={folder}/run episodes=5 report=false")
    read = json.loads((folder / "run/run.json").read_text(encoding="utf-8"))["embodiments"]["data"]
    parts = read["dataset"]["observation_parts"]
    assert parts == [["desired_goal", 2], ["pos", 2]], "the same order for data and environment"


def gymnasium_log(folder: Path) -> None:
    """Episodes that were recorded in Python, and the environment that they come from."""
    env = gymnasium.make("CartPole-v1")
    env.action_space.seed(0)
    episodes = []
    for seed in range(40):
        observation, rows, over = env.reset(seed=seed)[0], [], False
        while not over:
            action = int(env.action_space.sample())
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, [action], reward))
            observation, over = after, terminated or truncated
        observations, actions, rewards = (
            np.array(column, np.float32) for column in zip(*rows, strict=True)
        )
        episodes.append(
            Episode(
                observations,
                actions,
                rewards,
                group=seed,
                terminated=terminated,
                truncated=truncated,
            )
        )
    spec = Spec(observation_dim=4, action_dim=1, horizon=500, num_actions=2)
    from_episodes(episodes, folder / "log", name="cartpole", spec=spec)

    command(
        f"train dataset=store dataset.path={folder}/log env=gymnasium env.id=CartPole-v1 "
        f"head=discrete run={folder}/run {FEW}"
    )
    command(f"evaluate run={folder}/run episodes=5 report=false")
    assert {row["policy"] for row in results(folder)} == {"nano", "random"}


# -- an environment and a log that say their task in words --


class Robot(gymnasium.Env[np.ndarray, np.ndarray]):
    """An arm over a table. Which block to reach is in the info of `reset`, not in the observation."""

    BLOCKS = {"red": (2.0, 0.0), "green": (-1.0, 1.7), "blue": (-1.0, -1.7)}

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-3, 3, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.color = list(self.BLOCKS)[self.np_random.integers(len(self.BLOCKS))]
        self.pos = np.zeros(2, np.float32)
        return self.pos.copy(), {"task": f"Reach the {self.color} block."}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.pos = np.clip(self.pos + 0.5 * np.asarray(action, np.float32), -3, 3)
        distance = float(np.linalg.norm(self.pos - self.BLOCKS[self.color]))
        return self.pos.copy(), -distance, False, False, {}


def record_robot() -> dict[str, np.ndarray]:
    """Columns of 60 episodes of a player that sees the block, with the text of each row."""
    if "JourneyRobot-v0" not in gymnasium.registry:
        gymnasium.register("JourneyRobot-v0", entry_point=f"{__name__}:Robot", max_episode_steps=8)
    env = gymnasium.make("JourneyRobot-v0")
    rows = []
    for seed in range(60):
        (observation, info), over = env.reset(seed=seed), False
        while not over:
            block = np.array(Robot.BLOCKS[info["task"].split()[2]])
            action = np.clip(block - observation, -1, 1).astype(np.float32)
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, action, reward, terminated, truncated, info["task"], seed))
            observation, over = after, terminated or truncated
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "tasks", "seed")
    return {
        name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


READING = (
    "env=gymnasium env.id=JourneyRobot-v0 env.task_from=info.task window=1 model.condition_on=none "
    "steps=100 optim.lr=0.002 backbone=nano backbone.width=64 backbone.layers=1 "
    "optim.batch_size=32 log.tracker=none log.validation_batches=1"
)


def check_robot(folder: Path) -> None:
    """Check that the policy of a run was told where to go, and went there."""
    command(f"evaluate run={folder}/run episodes=20 report=false")
    policy, random = results(folder)
    assert (policy["text"], policy["protocol"]) == ("episode", "task-text")
    assert policy["score"] > random["score"] / 2, "nearer than half the way of a random player"


def robot_in_words(folder: Path) -> None:
    """An environment whose goal is in `info["task"]`, and episodes of it that were recorded in Python."""
    columns = record_robot()
    episodes = []
    for seed in range(60):
        rows = columns["seed"] == seed
        steps = [columns[name][rows] for name in ("observations", "actions", "rewards")]
        episodes.append(Episode(*steps, group=seed, task=str(columns["tasks"][rows][0])))
    from_episodes(episodes, folder / "log", name="robot")

    silent = READING.replace("env.task_from=info.task ", "")
    data = f"dataset=store dataset.path={folder}/log"
    message = command(f"train {data} {silent} run={folder}/run", expected=1)
    assert "env.task_from=info.task reads it" in message, message
    command(f"train {data} {READING} run={folder}/run")
    check_robot(folder)


def npz_texts(folder: Path) -> None:
    """Arrays in D4RL's layout with a column of task texts."""
    np.savez(folder / "log.npz", **record_robot())
    command(f"train dataset=arrays dataset.path={folder}/log.npz {READING} run={folder}/run")
    read = json.loads((folder / "run/run.json").read_text(encoding="utf-8"))["embodiments"]["data"]
    assert len(read["tasks"]) == 3 and read["dataset"]["unread"] == ["seed"]
    check_robot(folder)


# -- PettingZoo --


def pettingzoo_team(folder: Path) -> None:
    """A parallel environment of two teams; one of them is trained."""
    from mpe2 import simple_tag_v3

    from decisionllm.teams.dataset import collect, write
    from decisionllm.teams.spread import tag

    env = simple_tag_v3.parallel_env(max_cycles=10)
    write(
        folder / "log",
        collect(env, tag.teachers(np.random.default_rng(0)), episodes=20, **tag.META),
    )

    data = f"dataset=team dataset.path={folder}/log dataset.team=1 text=informative"
    command(
        f"train {data} env=pettingzoo env.id=mpe2.simple_tag_v3 head=discrete run={folder}/run "
        f"{FEW}"
    )
    command(f"evaluate run={folder}/run episodes=3 report=false")


# -- files --


def npz(folder: Path) -> None:
    """Arrays in D4RL's layout, all episodes end to end."""
    rng = np.random.default_rng(0)
    np.savez(
        folder / "log.npz",
        observations=rng.normal(size=(480, 3)),
        actions=rng.integers(0, 4, size=480),
        rewards=rng.normal(size=480),
        terminals=np.zeros(480, bool),
        timeouts=np.arange(480) % 12 == 11,
    )
    command(
        f"train dataset=arrays dataset.path={folder}/log.npz head=discrete run={folder}/run {FEW}"
    )
    session = load(folder / "run").begin([""], horizon=12)
    action = session.act(np.zeros((1, 3)))
    assert action.shape == (1, 1) and action[0, 0] in range(4)


def bad_files(folder: Path) -> None:
    """Contradictory options are refused by name, before any work."""
    rows = {
        "observations": np.zeros((20, 2)),
        "actions": np.zeros((20, 1)),
        "rewards": np.zeros(20),
    }
    np.savez(folder / "unmarked.npz", **rows, terminals=np.zeros(20, bool))
    np.savez(folder / "renamed.npz", **rows, terminations=np.zeros(20, bool))
    huge = rows | {"rewards": np.full(20, 1e300), "terminals": np.arange(20) % 5 == 4}
    np.savez(folder / "huge.npz", **huge)
    (folder / "table.csv").write_text("x,y,reward\n0,0,1\n", encoding="utf-8")
    for name, word in (
        ("unmarked.npz", "terminals"),
        ("renamed.npz", "terminations"),
        ("huge.npz", "row 0"),
        ("table.csv", "another format"),
    ):
        message = command(
            f"train dataset=arrays dataset.path={folder / name} run={folder}/run {FEW}", expected=1
        )
        assert word in message, message

    command(f"train dataset=synthetic run={folder}/run {FEW}")
    weights = folder / "run/checkpoint/model.safetensors"
    content = bytearray(weights.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 100] = bytes(100)
    weights.write_bytes(content)
    message = command(f"evaluate run={folder}/run episodes=2", expected=1)
    assert "model.safetensors" in message, message


# -- models and sweeps --


def model_folder(folder: Path) -> None:
    """A language model of your own as a folder of transformers; LoRA is trained, saved, and merged
    for others to use.
    """
    from transformers import AutoModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

    from decisionllm.tokenizers.text import own_tokenizer

    tokenizer: PreTrainedTokenizerFast = own_tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = Qwen2Model(Qwen2Config(vocab_size=len(tokenizer), **sizes))
    model.save_pretrained(folder / "my-model")
    tokenizer.save_pretrained(folder / "my-model")

    few = FEW.replace(
        "backbone=nano backbone.width=32 backbone.layers=1",
        f"backbone=pretrained backbone.folder={folder}/my-model",
    )
    command(f"train dataset=synthetic text=goal run={folder}/run {few}")
    command(f"export run={folder}/run format=transformers path={folder}/merged")
    AutoModel.from_pretrained(folder / "merged")


def sweep(folder: Path) -> None:
    """Two learning rates with two seeds each: four runs, two results."""
    options = f"dataset=synthetic run='{folder}/runs/${{seed}}' hydra.sweep.dir={folder} {FEW}"
    command(f"train --multirun {options} seed=0,1 optim.lr=1e-3,2e-3")
    command(f"evaluate 'run={folder}/runs/*' episodes=3 out={folder} baselines=false")

    from decisionllm.eval.report import read_rows, summarise

    pooled = summarise(read_rows(folder))
    assert [result["seeds"] for result in pooled] == [2, 2]


# -- studies --


def study_words(folder: Path, steps: int) -> list[str]:
    """The words of a small study of model sizes."""
    return [
        "study=smoke",
        "~study.axes.size.w64",
        "study.axes.fraction=[1.0]",
        "study.axes.quality=[0.0]",
        "study.seeds=[0]",
        f"study.budget.steps={steps}",
        "study.lr.rule=fixed",
        'study.evaluate=["episodes=20"]',
        "executor=inline",
        f"out={folder}/study",
        f"cache_dir={folder}/data",
    ]


def stop_study(words: list[str], sign: signal.Signals, event: Callable[[], bool]) -> None:
    """Start a study, and send it a signal after an event."""
    program = [sys.executable, "-m", "decisionllm", "scale", *words]
    study = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not event() and study.poll() is None:
        time.sleep(0.1)
    study.send_signal(sign)
    study.wait()


def killed_study(folder: Path) -> None:
    """A study of sizes and volumes is killed, and continued by the same command."""
    words = study_words(folder, steps=20)
    study = folder / "study"
    stop_study(words, signal.SIGKILL, lambda: bool(list(study.glob("*/done.json"))))
    before = {path: path.stat().st_mtime_ns for path in study.glob("*/done.json")}

    command(f"scale {shlex.join(words)}")
    after = {path: path.stat().st_mtime_ns for path in study.glob("*/done.json")}
    assert len(after) == 2 and before.items() <= after.items(), "what was done is not done again"


def interrupted_study(folder: Path) -> None:
    """Ctrl-C within the first training of a study; the same command continues it, and reports."""
    words = study_words(folder, steps=100)
    study = folder / "study"
    stop_study(words, signal.SIGINT, lambda: bool(list(study.rglob("metrics.jsonl"))))
    command(f"scale {shlex.join(words)}")
    assert len(list(study.glob("*/done.json"))) == 2
    assert (study / "report.html").is_file()


# -- the way out --


def minari_export(folder: Path) -> None:
    """Data as a Minari dataset that names its environment, and read again."""
    os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
    command(
        "data dataset=synthetic-discrete dataset.episodes=20 export=minari:mine/walk-v0 "
        "env=synthetic-discrete"
    )
    command(
        f"train dataset=minari dataset.minari_id=mine/walk-v0 head=discrete run={folder}/run {FEW}"
    )
    command(f"evaluate run={folder}/run episodes=3 report=false")


def onnx_export(folder: Path) -> None:
    """A policy that acts without torch, as the run does."""
    from decisionllm.policy.exported_policy import ExportedPolicy

    command(f"train dataset=synthetic run={folder}/run {FEW}")
    command(f"export run={folder}/run path={folder}/onnx")
    observation = np.array([[0.5, -1.0]], np.float32)
    own = load(folder / "run").begin([""], horizon=20).act(observation)
    exported = ExportedPolicy(folder / "onnx").begin([""], horizon=20).act(observation)
    np.testing.assert_allclose(exported, own, atol=1e-4)


JOURNEYS: dict[str, Callable[[Path], None]] = {
    journey.__name__: journey
    for journey in (
        minari_dict,
        gymnasium_log,
        robot_in_words,
        npz_texts,
        pettingzoo_team,
        npz,
        bad_files,
        model_folder,
        sweep,
        killed_study,
        interrupted_study,
        minari_export,
        onnx_export,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(JOURNEYS)}; none: all of them")
    parser.add_argument("--folder", type=Path, default=Path("runs/journeys"))
    options = parser.parse_args()
    for name in options.names or JOURNEYS:
        folder = options.folder.absolute() / name
        folder.mkdir(parents=True)
        print(f"\n-- {name}: {JOURNEYS[name].__doc__}")
        JOURNEYS[name](folder)


if __name__ == "__main__":
    main()
