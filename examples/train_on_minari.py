"""Record a Minari dataset of CartPole with a random policy, train on it, evaluate the policy:
python examples/train_on_minari.py
"""

import argparse
import os
import warnings
from pathlib import Path

import gymnasium
import numpy as np

from decisionllm import TrainConfig, choice, evaluate, train
from decisionllm.config import LogOptions

MINARI_ID = "cartpole/random-v0"


def record(episodes: int) -> None:
    """Write a local Minari dataset; one that exists is kept.

    (With JAX installed, minari.DataCollector does the same.)
    """
    import minari
    from minari.data_collector import EpisodeBuffer

    if MINARI_ID in minari.list_local_datasets():
        return
    env, buffers = gymnasium.make("CartPole-v1"), []
    env.action_space.seed(0)
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        observations, actions, rewards, terminated, truncated = (
            [observation],
            [],
            [],
            [False],
            [False],
        )
        while not (terminated[-1] or truncated[-1]):
            actions.append(env.action_space.sample())
            observation, reward, *ends, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(float(reward))
            terminated.append(ends[0])
            truncated.append(ends[1])
        buffers.append(
            EpisodeBuffer(
                observations=np.array(observations),
                actions=np.array(actions),
                rewards=rewards,
                terminations=terminated[1:],
                truncations=truncated[1:],
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Minari's, about fields of its card that are left empty
        minari.create_dataset_from_buffers(
            MINARI_ID,
            buffers,
            env=env,
            algorithm_name="random",
            description="CartPole by a random policy.",
            data_format="hdf5",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=500, help="recorded")
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--rollouts", type=int, default=50, help="of the evaluation")
    parser.add_argument("--run", default="runs/cartpole/random")
    options = parser.parse_args()

    os.environ.setdefault("MINARI_DATASETS_PATH", str(Path("data/minari").absolute()))
    Path(os.environ["MINARI_DATASETS_PATH"]).mkdir(parents=True, exist_ok=True)
    record(options.episodes)
    # condition on the predicted maximum return
    run = train(
        TrainConfig(
            # a policy may live longer than the data did
            dataset=choice("dataset", "minari", minari_id=MINARI_ID, horizon=500),
            env=choice("env", "minari"),
            backbone=choice("backbone", "nano"),
            head=choice("head", "discrete"),
            tokenizer=choice("tokenizer", "trajectory", timesteps="none"),
            objective=choice("objective", "max_return"),
            log=LogOptions(tracker="none"),
            window=4,
            steps=options.steps,
            name="nano",
            run=options.run,
        )
    )
    print(evaluate(run, episodes=options.rollouts, target_quantiles=[0.5, 0.99]))


if __name__ == "__main__":
    main()
