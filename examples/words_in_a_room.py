"""A picture of what words do in a room: runs of dataset=babyai below each other, each given the same
missions in sentences that were never trained on.

`python -m examples.words_in_a_room runs/babyai/words-pretrained-0 runs/babyai/words-shuffled-0 --out
docs/images/babyai.png` draws a row for each run and a column for each of four missions, whose
sentence stands above: the room as the mission begins, and the path of the agent from the dot to the
cross. At the right is the share of missions that each run does in sentences of training and in
held-out ones.
"""

import argparse
from functools import partial
from pathlib import Path

import decisionllm
from decisionllm.eval.intervals import over_episodes
from decisionllm.eval.pictures import figure, wrap_name
from decisionllm.eval.rollout import rollout
from decisionllm.registry import build, choice
from decisionllm.worlds.babyai.env import (
    describe_end,
    draw_frame,
    draw_path,
    has_succeeded,
    replay_mission,
)

MISSIONS = 4
SEED = 7
TARGET = choice("env", "babyai")["_target_"]
LETTERS = 26  # of a line above a room
DONE, FAILED = "tab:green", "tab:red"


def roll_out(policy, episodes, *, held_out):
    """Play missions in held-out sentences, or in those that the policy was trained on.

    Returns:
        The episodes, and the score of each in percent (episodes,).
    """
    node = policy.config["env"]
    if held_out:
        node = node | {"text": "paraphrased", "wordings": "held_out"}
    env = build(node, episodes)
    played = rollout(partial(policy.begin, horizon=env.horizon), env, seed=SEED)
    return played, env.score(played)


def select_missions(episodes):
    """Return the numbers of MISSIONS episodes of different levels and kinds of sentences, as far as
    there are such.
    """
    levels = list(dict.fromkeys(str(episode.outcome["level"]) for episode in episodes))
    kinds = list(dict.fromkeys(str(episode.outcome["frame"]) for episode in episodes))
    selected = []
    for column in range(MISSIONS):
        label = levels[column % len(levels)], kinds[column % len(kinds)]
        rest = [i for i in range(len(episodes)) if i not in selected]
        rest.sort(key=lambda i: label != labels_of(episodes[i]))  # stable: the first with the label
        selected.append(rest[0])
    return selected


def labels_of(episode):
    """Return the level of an episode and the kind of its sentence."""
    return str(episode.outcome["level"]), str(episode.outcome["frame"])


def draw_room(axis, episode):
    """Draw the room at the start, the path, and how the mission ended."""
    _, frames, path = replay_mission(episode)
    draw_frame(axis, frames[0])
    draw_path(axis, path)
    axis.plot(*path[-1], "x", color="white", markersize=6, markeredgewidth=1.5)
    axis.set_xlabel(
        describe_end(episode), fontsize=8, color=DONE if has_succeeded(episode) else FAILED
    )


def draw_bars(axis, scores):
    """Draw the mean of each group of scores with its 95 % interval. scores: by the group's name."""
    for place, values in enumerate(scores.values()):
        mean = values.mean()
        low, high = over_episodes(values)
        axis.bar(place, mean, 0.6, color=f"C{place}")
        axis.errorbar(place, mean, [[mean - low], [high - mean]], color="black", capsize=3)
        axis.text(place, high + 3, f"{mean:.0f}", fontsize=8, ha="center")
    axis.set_xticks(range(len(scores)), scores, fontsize=8)
    axis.set(ylim=(0, 118), xlim=(-0.6, len(scores) - 0.4), yticks=[0, 50, 100])
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def main():
    parser = argparse.ArgumentParser(prog="python -m examples.words_in_a_room", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", nargs="+", help="titles of the runs; default: their option name")
    parser.add_argument("--episodes", type=int, default=512, help="missions behind each bar")
    options = parser.parse_args()
    if options.episodes < MISSIONS:
        parser.error(f"--episodes: expected {MISSIONS} or more, got {options.episodes}")
    if options.names and len(options.names) != len(options.runs):
        parser.error(f"--names: expected {len(options.runs)}, one a run, got {len(options.names)}")
    policies = [decisionllm.load(run) for run in options.runs]
    for run, policy in zip(options.runs, policies, strict=True):
        env = policy.config["env"]
        if env.get("_target_") != TARGET:
            parser.error(f"{run}: expected a run with env=babyai, got {env.get('_target_')}")
        if env["level"] != policies[0].config["env"]["level"]:
            parser.error(f"{run}: expected a run on the levels of {options.runs[0]}, got others")
    names = options.names or [policy.config["name"].replace("-", ", ") for policy in policies]

    width = 9
    made = figure(width, 2.3 * len(policies) + 0.6)
    panels = made.subplots(
        len(policies), MISSIONS + 1, squeeze=False, width_ratios=[1] * MISSIONS + [0.9]
    )
    selected = []  # missions, by number
    for line, policy, name in zip(panels, policies, names, strict=True):
        held_out, held_out_scores = roll_out(policy, options.episodes, held_out=True)
        _, own_scores = roll_out(policy, options.episodes, held_out=False)
        if not selected:
            selected = select_missions(held_out)
            for axis, number in zip(line, selected, strict=False):
                axis.set_title(wrap_name(held_out[number].task, LETTERS), fontsize=8)
        # the last panel of a line is for the bars
        for axis, number in zip(line, selected, strict=False):
            draw_room(axis, held_out[number])
        line[0].set_ylabel(wrap_name(name, LETTERS), fontsize=9)
        draw_bars(
            line[-1], {"trained\nsentences": own_scores, "held-out\nsentences": held_out_scores}
        )
        low, high = over_episodes(held_out_scores)
        print(
            f"{name}: {own_scores.mean():.1f} % of missions in trained sentences, "
            f"{held_out_scores.mean():.1f} % ({low:.1f} .. {high:.1f}) in held-out ones"
        )
    panels[0, -1].set_title("% of missions done,\n95 % intervals", fontsize=8)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(options.out, dpi=200)
    print(f"{options.out}: a dot is where an agent begins, a cross where it ends")


if __name__ == "__main__":
    main()
