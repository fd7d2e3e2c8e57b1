"""A policy acting in an env, N episodes at once, in lock-step."""

import numpy as np

from decisionllm.schema import Episode


def rollout(begin, env, *, seed, progress=lambda steps: None):
    """Play N episodes to their ends: N Episodes, the type that training reads.

    begin(tasks) -> something whose `act(observations, rewards)` answers with actions (N, A) in raw units: a policy's session, or
    a scripted player. env: `reset(seed)`, `step(actions)`, `tasks`; see `eval/maze2d.py`. Where it has `action_masks` (N, C), the
    discrete actions that are allowed now, the player is told them too. An ended episode leaves the batch: the player is told to
    `keep(rows)`, those that go on, and the env still gets N actions, zeros for the others.
    """
    observations = np.asarray(env.reset(seed), np.float32)
    N = len(observations)
    player, rewards, alive = begin(env.tasks), None, np.arange(N)
    log = {name: [[] for _ in range(N)] for name in ("observations", "actions", "rewards")}
    terminated, final = np.zeros(N, bool), np.zeros_like(observations)
    while len(alive):
        allowed = [env.action_masks[alive]] if hasattr(env, "action_masks") else []
        actions = np.asarray(player.act(observations[alive], rewards, *allowed), np.float32)
        full = np.zeros((N, actions.shape[1]), np.float32)
        full[alive] = actions
        after, gains, ended, truncated = env.step(full)
        for i in alive:
            log["observations"][i].append(observations[i])
            log["actions"][i].append(full[i])
            log["rewards"][i].append(gains[i])
        terminated[alive] |= ended[alive]
        over = (ended | truncated)[alive]
        observations = np.asarray(after, np.float32)
        final[alive[over]] = observations[alive[over]]
        if over.any() and not over.all():
            player.select(~over)
        alive = alive[~over]
        rewards = gains[alive]
        progress(1)
    groups = getattr(env, "groups", range(N))  # of the rows, where several are a team
    return [
        Episode(*(np.array(log[name][i], np.float32) for name in log), terminated=bool(terminated[i]),
                truncated=not terminated[i], task=env.tasks[i], group=int(groups[i]), final_observation=final[i])
        for i in range(N)
    ]  # fmt: skip
