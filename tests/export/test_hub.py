"""A run as a folder of the hub: it acts as the run to the bit, its card is one that the hub reads."""

import json
import shutil

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard, constants
from peft import PeftModel
from transformers import AutoModel

import decisionllm
from tests.backbones.test_backbones import write
from tests.conftest import LOOP, NANO, command, damage, near

pytestmark = [pytest.mark.numeric, pytest.mark.slow]
TRAIN = (*LOOP, "text=goal", "optim.lr=0.1")
TASK = "Walk to the goal in the east."


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run whose backbone was trained whole and whose best weights act, with a result."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert command("train", *TRAIN, *NANO, "log.keep_best=loss", f"run={run}") == 0
    assert command("evaluate", f"run={run}", "episodes=3", "report=false") == 0
    return run


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """The folder of a language model of five blocks, in bfloat16."""
    return write(
        tmp_path_factory.mktemp("model") / "llama", "Llama", torch.bfloat16, num_hidden_layers=5
    )


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, language_model):
    """A run that adapted a cut language model and sums up its texts."""
    run = tmp_path_factory.mktemp("lora") / "run"
    words = (
        "backbone=pretrained",
        f"backbone.folder={language_model}",
        "backbone.dtype=bfloat16",
        "backbone.text_summary=2",
    )
    assert command("train", *TRAIN, *words, f"run={run}") == 0
    return run


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory, lora_run):
    """That run, exported with its base model."""
    folder = tmp_path_factory.mktemp("hub") / "policy"
    assert command("export", "format=hub", f"run={lora_run}", f"path={folder}") == 0
    return folder


def actions(run):
    """What a run does in three steps of two episodes, and at once: (4, 2, A)."""
    policy = decisionllm.load(run)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(3, 2, 2)).astype(np.float32)
    session = policy.begin([TASK, TASK], horizon=20)
    steps = [session.act(observations[0])]
    for now in observations[1:]:
        steps.append(session.act(now, rewards=np.array([-1.0, -2.0])))
    histories = []
    for i in range(2):
        done = np.stack([steps[0][i], steps[1][i]])
        rewards = np.full(2, -1.0)
        histories.append(decisionllm.History(observations[:, i], done, rewards, task=TASK))
    return np.stack([*steps, policy.act(histories)])


def test_a_folder_acts_as_the_run_to_the_bit(whole_run, tmp_path):
    folder = tmp_path / "hub"
    assert command("export", "format=hub", f"run={whole_run}", f"path={folder}") == 0
    assert not (folder / "base" / "model.safetensors").exists()  # the run has these weights
    np.testing.assert_array_equal(actions(folder), actions(whole_run))
    again = tmp_path / "again"  # a folder is exported as a run is
    assert command("export", "format=hub", f"run={folder}", f"path={again}") == 0
    np.testing.assert_array_equal(actions(again), actions(whole_run))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_an_adapter_comes_with_its_base_model(lora_run, lora_folder, language_model, tmp_path):
    expected = actions(lora_run)
    folder = shutil.copytree(lora_folder, tmp_path / "elsewhere")
    away = language_model.rename(tmp_path / "away")  # another machine has no such folder
    try:
        np.testing.assert_array_equal(actions(folder), expected)
    finally:
        away.rename(language_model)
    ids = torch.arange(12).view(2, 6)
    base = AutoModel.from_pretrained(folder / "base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, folder, subfolder="adapter").eval()
    own = decisionllm.load(lora_run).model.float().backbone.model
    with torch.no_grad():
        near(adapted(ids).last_hidden_state, own(ids).last_hidden_state)
        with adapted.disable_adapter():
            assert (adapted(ids).last_hidden_state - own(ids).last_hidden_state).abs().max() > 0.01


def cached(home, name, folder):
    """Put a folder into the cache of the hub under a name."""
    place = home / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / "0a1b")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0a1b", encoding="utf-8")


def test_a_name_of_the_hub_is_loaded_with_its_base_model(
    lora_run, language_model, tmp_path, monkeypatch
):
    folder = tmp_path / "policy"
    words = ("card.base_model=me/llama", "card.repo_id=me/policy", "card.license=mit")
    assert command("export", "format=hub", f"run={lora_run}", f"path={folder}", *words) == 0
    assert not (folder / "base").exists()
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "me/llama" and card.data.base_model_relation == "adapter"
    assert card.data.license == "mit" and 'decisionllm.load("me/policy")' in card.text
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["base_model_name_or_path"] == "me/llama"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        FileNotFoundError, match="me/policy: expected a run directory .*no policy of"
    ):
        decisionllm.load("me/policy")
    cached(tmp_path / "cache", "me/policy", folder)
    cached(tmp_path / "cache", "me/llama", language_model)
    np.testing.assert_array_equal(actions("me/policy"), actions(lora_run))


def test_the_card_has_the_scores_of_the_run(whole_run, tmp_path):
    folder = tmp_path / "hub"
    words = ("card.datasets=[me/log]", "card.tags=[points]")
    assert command("export", "format=hub", f"run={whole_run}", f"path={folder}", *words) == 0
    lines = (whole_run.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()
    (row,) = [json.loads(line) for line in lines if json.loads(line).get("run")]
    card = ModelCard.load(folder / "README.md")
    metadata = card.data.to_dict()
    assert metadata["library_name"] == "decisionllm" and metadata["license"] == "unknown"
    assert metadata["pipeline_tag"] == "reinforcement-learning" and metadata["datasets"] == [
        "me/log"
    ]
    assert "points" in metadata["tags"] and "lora" not in metadata["tags"]
    score, mean_return = card.data.eval_results
    assert (score.dataset_name, score.metric_value) == (row["world"], row["score"])
    assert score.metric_args == {"low": row["low"], "high": row["high"], "episodes": 3}
    assert mean_return.metric_value == row["return"]
    assert f"| {row['low']:.1f} to {row['high']:.1f} |" in card.text
    assert f"- {TASK}" in card.text and "backbone=nano" in card.text


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "adapter/adapter_model.safetensors",
        "base/model.safetensors",
        "base/config.json",
    ],
)
def test_a_damaged_or_missing_file_is_one_clear_error(name, lora_folder, tmp_path):
    folder = shutil.copytree(lora_folder, tmp_path / "hub")
    damage(folder / name)
    with pytest.raises(ValueError, match=f"{name} is damaged or missing .*not those that were"):
        decisionllm.load(folder)
    (folder / name).unlink()
    error = FileNotFoundError if name == "config.json" else ValueError
    with pytest.raises(error, match="is damaged or missing|expected a run directory"):
        decisionllm.load(folder)


def test_a_folder_of_another_library_is_no_policy(language_model):
    with pytest.raises(ValueError, match="got a config.json of another library"):
        decisionllm.load(language_model)


def test_code_that_a_folder_names_needs_trust(lora_folder, tmp_path):
    folder = shutil.copytree(lora_folder, tmp_path / "hub")
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content["config"]["head"]["_target_"] = "mylab.Head"
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "checksums.json").unlink()
    with pytest.raises(ValueError, match="expected registered choices, got head._target_=mylab"):
        decisionllm.load(folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("card.repo_id=a/b/c",), "card.repo_id: expected a name on the hub"),
        (("card.base_model=me/llama",), "card.base_model=me/llama: expected a run whose backbone"),
        (("card.results=nowhere",), "card.results=nowhere: expected results.jsonl"),
        (("act.decode=mean",), "format=hub: expected no part and no act, which are chosen"),
        (("format=onnx", "card.license=mit"), "format=onnx: expected no card, which is written by"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(words, message, whole_run, tmp_path, capsys):
    path = tmp_path / "out"
    assert command("export", "format=hub", f"run={whole_run}", f"path={path}", *words) == 1
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_an_existing_folder_is_kept(whole_run, tmp_path, capsys):
    assert command("export", "format=hub", f"run={whole_run}", f"path={tmp_path}") == 1
    assert "is there already" in capsys.readouterr().err
