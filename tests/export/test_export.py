"""An exported policy acts as the one it was exported from, in windows of one step and of many,
without torch.
"""

import json
import shutil
import sys
from functools import cache

import numpy as np
import pytest

from decisionllm.export.onnx_policy import check_exportable, measure_difference, write_onnx
from decisionllm.files import seal
from decisionllm.policy.exported_policy import ExportedPolicy
from decisionllm.schema import History, Spec
from tests.conftest import MAX_RETURN, damage, make_policy, near, node

pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.numeric, pytest.mark.slow]

STEPS = 12
CONTINUOUS = Spec(3, 2, STEPS, (-1.0, 0.0), (1.0, 30.0))
DISCRETE = Spec(3, 1, STEPS, num_actions=4)
RANGE = {CONTINUOUS: 30.0, DISCRETE: 3.0}
MAXIMUM = {"target_return": None, "objective": MAX_RETURN}
# a graph of a block takes seconds, one of qwen2 twice as long as one of gpt2
ONE_BLOCK = {"backbone": "gpt2", "backbone_options": {"layers": 1}}
CASES = {
    "one step": (
        DISCRETE,
        "go right",
        {"window": 1, "stride": 1, "head": "discrete", "return_horizon": 3} | ONE_BLOCK,
    ),
    "window": (
        CONTINUOUS,
        "",
        {"backbone_options": {"layers": 1, "tune": "lora"}, "decode": "unclipped"},
    ),
    "maximum": (CONTINUOUS, "go left", MAXIMUM | ONE_BLOCK),
    "two blocks": (
        CONTINUOUS,
        "",
        {
            "backbone": "gpt2",
            "condition_on": "none",
            "target_return": None,
            "head": "bins",
            "timesteps": "none",
        },
    ),
    # whose lower blocks read texts alone
    "cut": (CONTINUOUS, "go left", {"backbone": "tests.conftest.cut_llama"}),
    "cut, summed up": (
        DISCRETE,
        "go right",
        {
            "backbone": "tests.conftest.cut_llama",
            "backbone_options": {"summary": 3},
            "head": "discrete",
            "window": 1,
            "stride": 1,
        },
    ),
    # of one block, which sees four tokens
    "gemma3": (
        CONTINUOUS,
        "go left",
        {"condition_on": "none", "target_return": None} | ONE_BLOCK | {"backbone": "gemma3"},
    ),
}


def exported(path, spec, text="", **options):
    """A policy with random weights, and what was exported of it."""
    policy = make_policy(spec, **options)
    rng = np.random.default_rng(0)
    policy.model.normalizer.fit(
        [(rng.normal(2, 3, (50, 3)).astype(np.float32), rng.uniform(0, 9, 50))]
    )
    write_onnx(policy, path, {"dataset": {"name": "test"}, "tasks": [text]}, name="x")
    return policy, ExportedPolicy(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Of a case: its policy, the folder, what was exported to it; each once."""

    @cache
    def made(case):
        spec, text, options = CASES[case]
        path = tmp_path_factory.mktemp("made") / "onnx"
        return (*exported(path, spec, text, **options), path)

    return made


def drawn(spec, t, text, rng):
    """A random history of t steps and the current observation."""
    C = spec.num_actions
    actions = rng.integers(C, size=(t, 1)) if C else rng.uniform(spec.low, spec.high, (t, 2))
    masks = rng.random((t + 1, C)) < 0.7
    masks[:, :1] = True
    return History(
        rng.normal(2, 3, (t + 1, 3)).astype(np.float32),
        actions.astype(np.float32),
        rng.random(t),
        5.0 if t % 2 else None,
        text,
        action_masks=masks if C else None,
    )


@pytest.mark.parametrize("case", CASES)
def test_actions_equal_those_of_the_policy_and_its_session(case, made):
    spec, text, _ = CASES[case]
    policy, actual, path = made(case)
    rng = np.random.default_rng(1)
    histories = [drawn(spec, t, text, rng) for t in [0, 1, 2, 5, 6, 7, 11]]
    expected = policy.act(histories)
    assert len(np.unique(expected.round(3))) > 2
    near(actual.act(histories), expected, scale=RANGE[spec])
    days = [drawn(spec, STEPS - 1, text, rng) for _ in range(3)]
    sessions = [p.begin([text] * 3, STEPS) for p in (policy, actual)]
    for t in range(STEPS):
        rows = slice(0, 3) if t < 8 else slice(1, 3)  # the first episode ends
        if t == 8:
            for session in sessions:
                session.select(np.array([False, True, True]))
        step = (
            np.stack([day.observations[t] for day in days])[rows],
            np.array([day.rewards[t - 1] for day in days])[rows],
        )
        masks = np.stack([day.action_masks[t] for day in days])[rows] if spec.num_actions else None
        ours, theirs = (session.act(*step, masks) for session in sessions)
        near(theirs, ours, scale=RANGE[spec])
    near(sessions[1].conditioned_on, sessions[0].conditioned_on, scale=9.0)
    if case == "one step" or case.startswith("cut"):
        bare = drawn(spec, 2, "", rng)
        near(actual.act([bare]), policy.act([bare]), scale=RANGE[spec])
    if case in ("window", "cut"):
        assert measure_difference(policy, path) < 1e-5
    if case == "maximum":
        assert (
            json.loads((path / "policy.json").read_text(encoding="utf-8"))["target_return"] is None
        )


@pytest.mark.parametrize("name", ["policy.onnx", "policy.json", "text.onnx", "tokenizer.json"])
def test_a_damaged_export_is_refused(name, made, tmp_path):
    folder = shutil.copytree(made("one step")[2], tmp_path / "onnx")
    damage(folder / name)
    with pytest.raises(
        ValueError, match=f"{name} is damaged .*not those that were written.*export it again"
    ):
        ExportedPolicy(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode": "sample"}, "act.decode=mode or mean, got sample"),
        ({"execution": "joint"}, "a policy of a single agent, got team.execution=joint"),
        (
            {"planning_horizon": 2, "planner": node("planner", "value", discount=0.9)},
            "act.planning_horizon=0, got 2",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        exported(tmp_path / "onnx", CONTINUOUS, **options)
    assert not (tmp_path / "onnx").exists()


def test_only_what_the_graph_holds_is_exported():
    policy = make_policy(CONTINUOUS)
    policy.model.backbone.features = object()
    with pytest.raises(ValueError, match="text_encoder=none, got a text encoder"):
        check_exportable(policy)


def test_a_folder_of_another_kind_is_kept(tmp_path):
    (tmp_path / "mine").write_text("1", encoding="utf-8")
    with pytest.raises(ValueError, match="path: expected a new folder or an earlier export"):
        exported(tmp_path, CONTINUOUS)
    assert (tmp_path / "mine").is_file()


def test_a_place_that_cannot_be_written_is_known_before_the_export(tmp_path):
    (tmp_path / "file").touch()
    policy = make_policy(Spec(observation_dim=2, action_dim=1, horizon=5, low=(-1.0,), high=(1.0,)))
    with pytest.raises(OSError, match="get the right to write there, or choose another path=..."):
        write_onnx(policy, tmp_path / "file" / "onnx", {"dataset": {}})


def test_an_exported_policy_names_what_it_expects(made, tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=r"expected a folder of `decisionllm export`, found no policy.onnx"
    ):
        ExportedPolicy(tmp_path)
    _, actual, path = made("window")
    shutil.copytree(path, tmp_path / "onnx")
    with pytest.raises(
        ValueError,
        match="text: expected none, this policy was trained without task texts; got 'left'",
    ):
        actual.begin(["left"], STEPS)
    with pytest.raises(ValueError, match="horizon: expected at most 12 steps"):
        actual.begin([""], STEPS + 1)
    with pytest.raises(ValueError, match="history 0: expected .* got .* and actions of 1 numbers"):
        actual.act([History(np.zeros((2, 3)), np.zeros((1, 1)), np.zeros(1))])
    with pytest.raises(ValueError, match="expected finite numbers"):
        actual.begin([""], STEPS).observe(np.full((1, 3), np.nan))
    (tmp_path / "onnx" / "policy.json").write_text(
        json.dumps(actual.info | {"format": 0}), encoding="utf-8"
    )
    seal(tmp_path / "onnx")
    with pytest.raises(ValueError, match="expected an export of format 1, got 0; export it again"):
        ExportedPolicy(tmp_path / "onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        ImportError, match="an exported policy needs onnxruntime: pip install onnxruntime"
    ):
        ExportedPolicy(tmp_path / "onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        ImportError, match=r"export needs onnx and onnxscript: pip install -e '\.\[onnx\]'"
    ):
        exported(tmp_path / "onnx", CONTINUOUS)
