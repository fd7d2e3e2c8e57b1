"""A session that keeps keys and values acts as `Policy.act`, which reads every window afresh."""

import numpy as np
import pytest
import torch

from decisionllm.backbones.build import pretrained
from decisionllm.datasets.windows import collate, concatenate_histories, cut_windows
from decisionllm.models.sequence import SequenceModel
from decisionllm.policy.policy import Policy, Session
from decisionllm.schema import History, Spec
from decisionllm.tokenizers import text
from tests.backbones.test_backbones import write
from tests.conftest import BACKBONES, MAX_RETURN, make_policy, node

pytestmark = pytest.mark.numeric

CONTINUOUS = Spec(observation_dim=3, action_dim=2, horizon=15, low=(-2.0, 0.0), high=(2.0, 1.0))
DISCRETE = Spec(observation_dim=3, action_dim=1, horizon=15, num_actions=4)
TASKS = [
    "Walk to the goal in the north.",
    "Go south, and do it within 20 steps.",
    "",
    "Walk to the goal in the north.",
]


class World:
    """N episodes of drawn observations, rewards and masks, whatever is done; it writes its own
    records of them.
    """

    def __init__(self, spec, tasks=TASKS, targets=(3.0, -1.0, 0.5, 3.0), steps=15, seed=0):
        rng, N = np.random.default_rng(seed), len(tasks)
        self.tasks, self.targets = list(tasks), list(targets)[:N]
        self.observations = rng.normal(size=(N, steps, spec.observation_dim)).astype(np.float32)
        self.rewards = rng.normal(size=(N, steps)).astype(np.float32)
        self.masks = rng.random((N, steps, spec.num_actions)) < 0.6 if spec.num_actions else None
        if spec.num_actions:
            self.masks[..., 0] |= ~self.masks.any(-1)
        self.actions = np.zeros((N, steps, spec.action_dim), np.float32)

    def history(self, i, t):
        fields = {"target_return": self.targets[i], "task": self.tasks[i]}
        masks = None if self.masks is None else self.masks[i, : t + 1]
        return History(
            self.observations[i, : t + 1],
            self.actions[i, :t],
            self.rewards[i, :t],
            action_masks=masks,
            **fields,
        )

    def seen(self, rows, t):
        """The input of `Session.act` for these rows at step t."""
        brought = self.rewards[rows, t - 1] if t else None
        masks = None if self.masks is None else self.masks[rows, t]
        return self.observations[rows, t], brought, masks


def play(policy, world, session, rows, begin=0, end=15):
    """Act by the session in these rows; every action must be that of the plain path."""
    for t in range(begin, end):
        expected = policy.act([world.history(i, t) for i in rows])
        actions = session.act(*world.seen(rows, t))
        np.testing.assert_allclose(actions, expected, atol=2e-4, err_msg=f"step {t}")
        world.actions[rows, t] = expected
        session.actions[:, t] = expected
    return world.actions


def from_folder(folder, **options):
    torch.manual_seed(0)
    return Policy(
        SequenceModel(
            CONTINUOUS, pretrained(0, folder=str(folder), **options), node("head", "gaussian")
        ),
        6,
        3,
        3.0,
    )


def agree(policy, spec, tasks=TASKS):
    world = World(spec, tasks)
    if policy.target_return is None:  # the predicted maximum return, but for one with a number
        world.targets = [None, 0.5, None, None][: len(tasks)]
    return play(policy, world, policy.begin(world.tasks, 15, world.targets), np.arange(len(tasks)))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("tune", ["full", "lora"])
@pytest.mark.parametrize("returns", ["return_to_go", "none"])
def test_the_cached_session_equals_the_plain_policy(backbone, tune, returns):
    """Episodes of 15 steps in windows of 6, of which 3 leave at once."""
    actions = agree(
        make_policy(
            CONTINUOUS, backbone=backbone, condition_on=returns, backbone_options={"tune": tune}
        ),
        CONTINUOUS,
    )
    assert actions.std(1).min() > 0.01  # it does not always do the same


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (6, 1), (6, 6), (5, 2), (15, 15), (40, 3)])
def test_it_does_for_every_window_and_stride(window, stride):
    agree(make_policy(CONTINUOUS, window=window, stride=stride), CONTINUOUS)


@pytest.mark.parametrize(
    "tasks", [["", ""], TASKS[:1] * 3, TASKS[1:2]], ids=["none", "one shared", "one alone"]
)
def test_it_does_for_texts_that_are_shared_or_missing(tasks):
    agree(make_policy(CONTINUOUS), CONTINUOUS, tasks)


WAYS = [
    {"return_horizon": 4},
    {"timesteps": "none"},
    {"embedding": "mlp"},
    {"embedding": "waves"},
    {"head": "bins", "decode": "mean"},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_it_does_for_every_model_option(options):
    agree(make_policy(CONTINUOUS, **options), CONTINUOUS)


@pytest.mark.parametrize(("window", "stride"), [(6, 3), (6, 6), (1, 1), (15, 15)])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_it_does_with_the_predicted_maximum_return(window, stride, backbone):
    agree(
        make_policy(
            CONTINUOUS,
            backbone=backbone,
            window=window,
            stride=stride,
            target_return=None,
            objective=MAX_RETURN,
        ),
        CONTINUOUS,
    )


def test_the_maximum_return_is_predicted_from_null_returns():
    policy = make_policy(CONTINUOUS, target_return=None, objective=MAX_RETURN, window=15, stride=7)
    world = World(CONTINUOUS)
    world.targets = [None] * 4
    policy.model.normalizer.return_range.copy_(torch.tensor([-9.0, 9.0]))
    calls = []
    tokens = policy.model.tokens

    def watch(batch, return_given=None):
        calls.append((batch.returns_to_go.clone(), return_given))
        return tokens(batch, return_given)

    policy.model.tokens = watch
    policy.act([world.history(i, 4) for i in range(4)])
    (_, return_given), (returns, none) = calls
    assert not return_given.any() and none is None
    # without effect: the null return replaces it
    steps = concatenate_histories([world.history(i, 4) for i in range(4)], [123.0] * 4)
    window = cut_windows(steps, np.arange(4), np.zeros(4, int), 5)
    batch = collate(window, text.encode(policy.model.backbone.tokenizer, world.tasks), np.arange(4))
    with torch.no_grad():
        expected = policy.model.predict_return(policy.model.read(batch, return_given))
    torch.testing.assert_close(returns, expected)
    assert expected.std() > 0.01


@pytest.mark.parametrize("backbone", BACKBONES)
def test_it_does_for_discrete_actions_and_takes_allowed_ones(backbone):
    policy = make_policy(DISCRETE, backbone=backbone, head="discrete")
    world = World(DISCRETE)
    actions = play(policy, world, policy.begin(world.tasks, 15, world.targets), np.arange(4))
    assert np.take_along_axis(world.masks, actions.astype(int), 2).all()
    assert len(np.unique(actions)) > 1


@pytest.mark.parametrize("family", ["Qwen3", "OPT"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_does_for_architectures_with_and_without_a_cache(family, dtype, tmp_path):
    policy = from_folder(write(tmp_path, family), dtype=dtype)
    if dtype == "float32":
        agree(policy, CONTINUOUS)
    else:  # sixteen bits round otherwise in another order: the same to within a hundredth
        world = World(CONTINUOUS)
        session = policy.begin(world.tasks, 15, world.targets)
        for t in range(15):
            expected = policy.act([world.history(i, t) for i in range(4)])
            np.testing.assert_allclose(
                session.act(*world.seen(np.arange(4), t)), expected, atol=0.05
            )
            world.actions[:, t] = session.actions[:, t]


def test_samples_are_the_same_under_the_same_seed():
    world, drawn = World(CONTINUOUS), []
    for cached in (True, False):
        policy = make_policy(CONTINUOUS, head="bins", decode="sample")
        policy.generator = torch.Generator().manual_seed(0)
        torch.manual_seed(int(cached))  # of no matter
        session = policy.begin(world.tasks, 15, world.targets)
        for t in range(8):
            if cached:
                actions = session.act(*world.seen(np.arange(4), t))
            else:
                actions = policy.act([world.history(i, t) for i in range(4)])
            world.actions[:, t] = actions
            drawn.append(actions)
    np.testing.assert_array_equal(drawn[:8], drawn[8:])
    assert len({actions.tobytes() for actions in drawn[:8]}) > 4


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_episodes_at_different_steps_are_restored(spec):
    """Pasts of 0, 9, 4 and 2 steps, in windows of 6: each row is at its own place, some windows
    longer than others.
    """
    policy = make_policy(spec, head="discrete" if spec.num_actions else "gaussian")
    world, now = World(spec), np.array([0, 9, 4, 2])
    world.actions[:] = np.random.default_rng(1).integers(2, size=world.actions.shape)
    session = policy.begin(world.tasks, 15, world.targets)
    session.restore([world.history(i, t) for i, t in enumerate(now)])
    rows = np.arange(4)
    for step in range(6):
        expected = policy.act([world.history(i, t) for i, t in enumerate(now)])
        rewards = np.where(now > 0, world.rewards[rows, now - 1], 0)
        masks = None if world.masks is None else world.masks[rows, now]
        actions = session.act(world.observations[rows, now], rewards if step else None, masks)
        np.testing.assert_allclose(actions, expected, atol=2e-4, err_msg=f"step {step}")
        world.actions[rows, now] = session.actions[rows, now] = expected
        now = now + 1


@pytest.mark.parametrize("family", ["ours", "OPT"])
def test_episodes_that_end_leave_and_the_others_go_on(family, tmp_path):
    policy = from_folder(write(tmp_path, "OPT")) if family == "OPT" else make_policy(CONTINUOUS)
    world = World(CONTINUOUS)
    session = policy.begin(world.tasks, 15, world.targets)
    play(policy, world, session, np.arange(4), 0, 4)
    session.select(np.array([True, False, True, True]))
    play(policy, world, session, np.array([0, 2, 3]), 4, 8)
    session.select(np.array([2, 1]))
    play(policy, world, session, np.array([3, 2]), 8, 10)
    session.select(np.array([0]))
    play(policy, world, session, np.array([3]), 10, 15)


def test_episodes_may_end_before_the_first_decision():
    policy, world = make_policy(CONTINUOUS), World(CONTINUOUS)
    session = policy.begin(world.tasks, 15, world.targets)
    session.select(np.array([2, 1]))
    play(policy, world, session, np.array([2, 1]), 0, 4)
    for end in (6, 8):
        session.select(np.array([-1]))
        play(policy, world, session, np.array([1]), end - 2, end)


@pytest.mark.parametrize(("window", "stride"), [(6, 3), (3, 3), (1, 1)])
def test_deciding_again_changes_nothing(window, stride):
    """Deciding twice, as after a lost response, gives the same action, and the same actions after
    it.
    """
    policy = make_policy(CONTINUOUS, window=window, stride=stride)
    world = World(CONTINUOUS)
    session = policy.begin(world.tasks, 15, world.targets)
    rows = np.arange(4)
    for t in range(8):
        expected = policy.act([world.history(i, t) for i in rows])
        session.observe(*world.seen(rows, t))
        for _ in range(2):
            np.testing.assert_allclose(session.decide(), expected, atol=2e-4, err_msg=f"step {t}")
        session.record_action(expected)
        world.actions[:, t] = expected


@pytest.mark.parametrize("returns", [3.0, None])
def test_steps_without_a_decision_are_read_at_the_next_one(returns):
    """Actions may be taken elsewhere: only at steps 0, 1, 4, 5 and 10 the session decides."""
    options = {} if returns else {"target_return": None, "objective": MAX_RETURN}
    policy = make_policy(CONTINUOUS, window=6, stride=3, **options)
    world = World(CONTINUOUS)
    world.targets, rows = [returns] * 4, np.arange(4)
    session = policy.begin(world.tasks, 15, returns)
    for t in range(11):
        taken = policy.act([world.history(i, t) for i in rows])
        session.observe(*world.seen(rows, t))
        if t in (0, 1, 4, 5, 10):
            np.testing.assert_allclose(session.decide(), taken, atol=2e-4, err_msg=f"step {t}")
        session.record_action(taken)
        world.actions[:, t] = taken


def test_a_session_returns_its_histories():
    policy = make_policy(DISCRETE, head="discrete")
    world = World(DISCRETE)
    session = policy.begin(world.tasks, 15, world.targets)
    play(policy, world, session, np.arange(4), 0, 5)
    session.observe(*world.seen(np.arange(4), 5))
    again = policy.begin(world.tasks, 15, world.targets).restore(session.histories())
    again.observe(*world.seen(np.arange(4), 5))
    for i, history in [*enumerate(session.histories()), *enumerate(again.histories())]:
        expected = world.history(i, 5)
        assert (history.task, history.target_return) == (expected.task, expected.target_return)
        for name in ("observations", "actions", "rewards", "action_masks"):
            np.testing.assert_allclose(getattr(history, name), getattr(expected, name))


def test_each_way_to_decode_gives_other_actions():
    world = World(CONTINUOUS)
    made = {
        decode: make_policy(CONTINUOUS, head="bins", decode=decode)
        for decode in ("mode", "mean", "sample")
    }
    actions = {
        decode: policy.act([world.history(i, 3) for i in range(4)])
        for decode, policy in made.items()
    }
    assert not any(
        np.allclose(actions[a], actions[b])
        for a, b in (("mode", "mean"), ("mode", "sample"), ("mean", "sample"))
    )


def test_a_history_has_its_own_target_return_or_the_policys():
    policy = make_policy(CONTINUOUS, target_return=3.0)
    world = World(CONTINUOUS)

    def act(target):
        first = History(world.observations[0, :1], np.zeros((0, 2)), np.zeros(0), target)
        return policy.act([first])

    np.testing.assert_array_equal(act(None), act(3.0))
    assert not np.allclose(act(None), act(-3.0), atol=1e-3)
    first = policy.begin([""], 15).act(world.observations[:1, 0])
    np.testing.assert_allclose(first, act(3.0), atol=2e-4)


def test_received_rewards_are_subtracted_without_a_return_horizon():
    """A target of 5 with 2 received equals a target of 3 with nothing received, unless returns have
    a horizon.
    """
    for return_horizon, alike in ((0, True), (4, False)):
        policy = make_policy(CONTINUOUS, window=1, stride=1, return_horizon=return_horizon)
        world = World(CONTINUOUS)
        past = world.observations[0, :2], np.zeros((1, 2), np.float32)
        one = policy.act([History(*past, np.array([2.0]), target_return=5.0)])
        other = policy.act([History(*past, np.array([0.0]), target_return=3.0)])
        assert np.allclose(one, other, atol=1e-5) == alike


def test_a_decision_does_not_depend_on_the_other_rows():
    policy, world = make_policy(CONTINUOUS), World(CONTINUOUS)
    histories = [world.history(i, t) for i, t in enumerate((7, 0, 3, 5))]
    together = policy.act(histories)
    for i, history in enumerate(histories):
        np.testing.assert_allclose(policy.act([history]), together[[i]], atol=2e-4)


def test_steps_before_the_window_have_no_effect():
    policy = make_policy(CONTINUOUS, window=6, stride=3)
    world = World(CONTINUOUS)
    other = World(CONTINUOUS)
    other.observations[:, :3] += 1
    act = lambda world, t: policy.act([world.history(0, t)])  # noqa: E731
    assert not np.allclose(act(world, 5), act(other, 5), atol=1e-3)  # steps 0 .. 5
    np.testing.assert_array_equal(act(world, 6), act(other, 6))  # steps 3 .. 6


def test_without_timesteps_an_episode_may_exceed_the_horizon():
    short = Spec(observation_dim=3, action_dim=2, horizon=4, low=(-2.0, 0.0), high=(2.0, 1.0))
    agree(make_policy(short, timesteps="none"), short)


def test_what_a_policy_cannot_read_is_refused_by_name():
    policy, world = make_policy(CONTINUOUS), World(CONTINUOUS, steps=16)
    with pytest.raises(
        ValueError,
        match=(
            "history 1: expected observations of 3 and actions of 2 numbers.*got observations of 4"
        ),
    ):
        policy.act(
            [
                world.history(0, 1),
                History(np.zeros((1, 4), np.float32), np.zeros((0, 2)), np.zeros(0)),
            ]
        )
    narrow = History(np.zeros((2, 3)), np.zeros((1, 1)), np.zeros(1))
    with pytest.raises(ValueError, match="history 0: expected .* got .* and actions of 1 numbers"):
        policy.begin([""], 15).restore([narrow])
    with pytest.raises(ValueError, match=r"horizon: expected at most 15 steps, .* got 16"):
        policy.act([world.history(0, 15)])
    with pytest.raises(
        ValueError,
        match="horizon: expected at most 15 steps.*got 16; train with tokenizer.timesteps=none",
    ):
        policy.begin([""], 16)
    with pytest.raises(ValueError, match=r"tasks: expected a list of texts, .* write \['north'\]"):
        policy.begin("north", 15)
    session = policy.begin(["", ""], 1)
    with pytest.raises(ValueError, match="^observations: expected finite numbers, got nan"):
        session.act(np.array([[0, 1, 2], [0, np.nan, 1]]))
    with pytest.raises(ValueError, match=r"^observations: expected shape \(2, 3\).* got \(3,\)"):
        session.act(np.zeros(3))
    with pytest.raises(ValueError, match=r"^observations: expected shape \(2, 3\).* got \(2, 1\)"):
        session.act(np.zeros((2, 1)))
    session.act(np.zeros((2, 3)))
    with pytest.raises(
        ValueError, match=r"session: expected at most 1 steps \(the horizon\), got one more"
    ):
        session.act(np.zeros((2, 3)), np.zeros(2))
    session = policy.begin(["", ""], 2)
    session.act(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="^rewards: expected finite numbers, got nan"):
        session.act(np.zeros((2, 3)), np.array([0, np.nan]))
    with pytest.raises(ValueError, match=r"^rewards: expected shape \(2,\).* got \(2, 1\)"):
        session.act(np.zeros((2, 3)), np.zeros((2, 1)))


def test_rewards_that_the_return_to_go_needs_are_not_left_out():
    seen = np.zeros((2, 3))
    session = make_policy(CONTINUOUS, target_return=5.0).begin(["", ""], 3)
    session.act(seen)
    with pytest.raises(ValueError, match="^rewards: expected those of the last step"):
        session.act(seen)
    constant = make_policy(CONTINUOUS, return_horizon=4).begin(["", ""], 3)
    constant.act(seen)
    constant.act(seen)
    # the predicted maximum return is predicted anew at each step
    predicted = make_policy(CONTINUOUS, target_return=None, objective=MAX_RETURN)
    predicted = predicted.begin(["", ""], 3)
    predicted.act(seen)
    predicted.act(seen)


@pytest.mark.parametrize("target", [np.nan, np.inf])
def test_a_target_that_is_no_number_is_refused(target):
    policy = make_policy(CONTINUOUS)
    with pytest.raises(ValueError, match=f"^target_return: expected a finite number, got {target}"):
        policy.begin(["", ""], 5, [1.0, target])
    with pytest.raises(ValueError, match=f"^target_return: expected a finite number, got {target}"):
        policy.act([History(np.zeros((1, 3)), np.zeros((0, 2)), np.zeros(0), target)])


def test_a_mask_of_another_number_of_actions_or_without_any_is_refused():
    policy = make_policy(DISCRETE, head="discrete")
    start = np.zeros((1, 3)), np.zeros((0, 1)), np.zeros(0)
    nothing = np.zeros((1, 4), bool)
    with pytest.raises(ValueError, match="^action_masks: expected an allowed action"):
        policy.act([History(*start, action_masks=nothing)])
    with pytest.raises(ValueError, match="^history 0: expected action masks of 4 .* got 1"):
        policy.act([History(*start, action_masks=np.ones((1, 1), bool))])
    session = policy.begin([""], 5)
    with pytest.raises(ValueError, match="^action_masks: expected an allowed action"):
        session.act(np.zeros((1, 3)), action_masks=nothing)
    with pytest.raises(ValueError, match=r"^action_masks: expected shape \(1, 4\).* got \(1, 1\)"):
        session.act(np.zeros((1, 3)), action_masks=np.ones((1, 1), bool))


def test_a_policy_that_cannot_act_is_refused():
    with pytest.raises(
        ValueError, match="decode: expected one of mode, mean, sample, unclipped, got 'greedy'"
    ):
        make_policy(CONTINUOUS, decode="greedy")
    with pytest.raises(ValueError, match="decode: unclipped needs head=gaussian, got BinsHead"):
        make_policy(CONTINUOUS, head="bins", decode="unclipped")
    for stride in (0, 7):
        with pytest.raises(
            ValueError, match=rf"stride: expected 1 \.\. 6 \(the window\), got {stride}"
        ):
            make_policy(CONTINUOUS, window=6, stride=stride)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 1.5}, "stride: expected one int64, got 1.5"),
        ({"target_return": np.nan}, "target_return: expected one float32, got nan"),
        ({"target_return": "high"}, "target_return: expected one float32, got 'high'"),
        ({"planning_horizon": 2.5}, "act.planning_horizon: expected one int64, got 2.5"),
        ({"planning_horizon": -1}, "act.planning_horizon: expected 0 or more steps, got -1"),
        ({"planning_value": -1.5}, "act.planning_value: expected a share within 0 .. 1, got -1.5"),
        ({"planning_value": 0.7}, "act.planning_value: needs a model trained with planner=value"),
        ({"scale": 0}, "tokenizer.scale: expected more than 0, got 0"),
        ({"entity_layers": -1}, "tokenizer.entity_layers: expected 0 or more, got -1"),
    ],
)
def test_an_option_of_acting_that_is_no_such_number_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(CONTINUOUS, window=6, **options)


@pytest.mark.parametrize(
    "options", [{}, {"target_return": None, "objective": MAX_RETURN}, {"head": "discrete"}], ids=str
)
def test_deciding_for_some_rows_leaves_the_others_unchanged(options):
    spec = DISCRETE if "head" in options else CONTINUOUS
    policy = make_policy(spec, **options)
    world = World(spec)
    now = np.zeros(4, int)
    if policy.target_return is None:
        world.targets = [None, 0.5, None, None]
    session = policy.begin(world.tasks, 15, world.targets)
    rng = np.random.default_rng(0)
    while (now < 15).any():
        rows = (
            np.flatnonzero((now < 15) & (rng.random(4) < 0.5)) if now.sum() >= 12 else np.arange(4)
        )
        rows = rng.permutation(rows)
        if len(rows):
            expected = policy.act([world.history(i, now[i]) for i in rows])
            masks = None if world.masks is None else world.masks[rows, now[rows]]
            session.observe(
                world.observations[rows, now[rows]], world.rewards[rows, now[rows] - 1], masks, rows
            )
            np.testing.assert_allclose(
                session.decide(rows), expected, atol=2e-4, err_msg=f"{rows} at {now[rows]}"
            )
            session.record_action(expected, rows)
            world.actions[rows, now[rows]] = expected
            now[rows] += 1


def test_a_session_keeps_a_text_once_for_all_its_rows():
    """Forty rows with two texts need the room of two texts, and not of forty."""
    policy = make_policy(CONTINUOUS, window=1, stride=1)
    tasks = [TASKS[0], TASKS[1]] * 20
    session = policy.begin(tasks, 15)
    session.act(np.zeros((40, 3), np.float32))
    config = policy.model.backbone.config
    token = (
        2
        * 4
        * config.num_hidden_layers
        * config.num_key_value_heads
        * (config.hidden_size // config.num_attention_heads)
    )
    texts = 2 * session.text_room
    steps = 40 * policy.model.tokenizer.tokens
    assert sum(cache.nbytes for cache in session.caches.values()) == token * (texts + steps)


@pytest.mark.parametrize("options", [{}, {"target_return": None, "objective": MAX_RETURN}], ids=str)
def test_rows_that_are_given_away_again_and_again_need_no_more_memory(options):
    """Thirty episodes with texts of their own in three rows: at most a text for each row is held,
    and each action is right.
    """
    policy, room = make_policy(CONTINUOUS, **options), []
    session = Session(policy, ["", "", ""], 15, text_room=40)
    for i in range(30):
        world = World(
            CONTINUOUS,
            [f"Walk to the goal within {i} steps, and stay there.", TASKS[0]],
            (None, None),
            seed=i,
        )
        session.restore([world.history(0, 3), world.history(1, 5)], [i % 3, (i + 1) % 3])
        rows = np.array([i % 3, (i + 1) % 3])
        session.observe(np.stack([world.observations[0, 3], world.observations[1, 5]]), rows=rows)
        expected = policy.act([world.history(0, 3), world.history(1, 5)])
        np.testing.assert_allclose(session.decide(rows), expected, atol=2e-4)
        room.append(session.nbytes)
    assert max(room) <= Session(policy, [""] * 3, 15, text_room=40).allocate().nbytes


@pytest.mark.parametrize("family", ["ours", "OPT"])
def test_a_row_may_be_given_to_another_episode(family, tmp_path):
    policy = from_folder(write(tmp_path, "OPT")) if family == "OPT" else make_policy(CONTINUOUS)
    world = World(CONTINUOUS)
    other = World(
        CONTINUOUS,
        ["Go south, and then on to the goal.", "", "", TASKS[0]],
        (None, 0, 9, 1),
        seed=1,
    )
    session = policy.begin(["", "", "Go north."], 15, [9.0, 9.0, 9.0])
    for rows, t in (([0, 2], 0), ([1], 5)):
        session.restore([world.history(i, t) for i in rows], rows)
    other.actions[:] = 0.5
    for step in range(8):
        if step == 3:  # row 2 is taken from an episode under way
            session.restore([other.history(0, 7)], [2])
        of = [
            (world, 0, step),
            (world, 1, 5 + step),
            (world, 2, step) if step < 3 else (other, 0, 4 + step),
        ]
        expected = policy.act([w.history(i, t) for w, i, t in of])
        brought = [w.rewards[i, t - 1] if t else 0 for w, i, t in of]
        actions = session.act(np.stack([w.observations[i, t] for w, i, t in of]), np.array(brought))
        np.testing.assert_allclose(actions, expected, atol=2e-4, err_msg=f"step {step}")
        session.actions[np.arange(3), session.now - 1] = expected
        for (w, i, t), action in zip(of, expected, strict=True):
            w.actions[i, t] = action
