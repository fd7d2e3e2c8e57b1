"""Small real things for the tests: data stores, tiny models, policies with random weights.

No network, no GPU, no home folder.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decisionllm import executors, hardware
from decisionllm.__main__ import run
from decisionllm.backbones.build import build_backbone, init_random_model
from decisionllm.backbones.text_summary import TextSummary
from decisionllm.config import ModelOptions
from decisionllm.datasets import sampling, store_writer
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Source
from decisionllm.registry import build, discover, get_function
from decisionllm.schema import Episode, Spec
from decisionllm.tokenizers.text import VOCABULARY, own_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when the hub's package is first imported

SMALL = {
    "qwen2": {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "inner": 48},
    "gpt2": {"width": 32, "layers": 2, "heads": 2},
}
# a registered backbone, or a function here, and its options
BACKBONES = {
    "qwen2": ("nano", SMALL["qwen2"]),
    "gpt2": ("dt", SMALL["gpt2"] | {"dropout": 0.0}),
    "gemma3": ("tests.conftest.gemma3", {}),
}

TESTS = Path(__file__).parent
# the neighbours of the core, in folders of the package that may be deleted, see test_walls.py
NEIGHBOURS = ("worlds", "teams", "bidding", "scaling", "estimates", "export")
# files of the core's tests, and single tests, that need neighbours
NEEDS = {
    "backbones/test_export_hf.py": "export",
    "backbones/test_lora_options.py::test_a_peft_model_in_memory_is_a_backbone": "export",
    "commands/test_baseline.py::test_a_run_is_evaluated_beside_others_and_without_the_library": (
        "estimates"
    ),
    "commands/test_data.py": "worlds teams bidding",
    "commands/test_evaluate.py": "worlds",
    "commands/test_train.py": "worlds teams bidding scaling",
    "datasets/test_corruptions.py::test_a_changed_wording_changes_no_log_again": "worlds",
    "datasets/test_batches.py": "worlds teams",
    "datasets/test_mixture.py": "worlds bidding scaling",
    "datasets/test_store.py": "worlds bidding",
    "datasets/test_paraphrases.py": "worlds teams bidding",
    "eval/test_eval_callback.py::test_what_cannot_be_watched_is_refused_before_a_run_begins": "teams",
    "models/objectives/test_advantage.py": "teams",
    "models/test_generalist.py::test_a_new_embodiment_beside_the_old_ones_is_new_alone": "worlds",
    "models/test_generalist.py::test_a_run_that_does_not_fit_is_no_start": "worlds",
    "models/test_generalist.py::test_one_run_is_evaluated_in_the_spaces_of_all_its_parts": (
        "bidding"
    ),
    "policy/test_entity_tokens.py::test_what_cannot_have_entity_tokens_is_refused": "teams",
    "policy/test_imagined_dataset.py": "worlds",
    "test_cli.py::test_a_name_of_a_file_may_be_a_number": "bidding",
    "test_cli.py::test_defaults_that_name_an_option_of_another_choice_are_all_named": "worlds",
    "test_cli.py::test_several_values_replace_the_one_of_an_experiment": "worlds",
    "test_config.py::test_a_policy_is_named_after_what_is_built": "bidding",
    "test_executors.py": "bidding scaling",
    "test_help.py": "worlds bidding scaling estimates",
    "test_registry.py::test_what_needs_a_name_or_a_package_says_so": "teams",
    "test_trust.py": "worlds teams bidding estimates export",
}


def lacks_neighbours(node_id):
    """Return which neighbours a test or file needs that are not in this copy of the package."""
    needed = NEEDS.get(node_id, "").split()
    return [name for name in needed if not (TESTS.parent / "decisionllm" / name).is_dir()]


def pytest_ignore_collect(collection_path):
    """Leave out the files that need a neighbour which is not there."""
    file = collection_path.relative_to(TESTS) if collection_path.is_relative_to(TESTS) else ""
    return True if lacks_neighbours(str(file)) else None


def pytest_collection_modifyitems(items):
    """Mark the tests of tests/bidding/server, skip those whose neighbours are not there, and begin
    with the files that take long, so that no process waits for the other at the end.
    """
    for item in items:
        if item.path.parent.name == "server":
            item.add_marker("serving")
        file = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else item.path
        missing = lacks_neighbours(f"{file}::{getattr(item, 'originalname', item.name)}")
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
    long = {item.path for item in items if {"slow", "serving"} & {*item.keywords}}
    items.sort(key=lambda item: item.path not in long)


def pytest_terminal_summary(terminalreporter, config):
    """Say how to repeat the order, which pytest-randomly prints only without -q."""
    if (seed := config.getoption("randomly_seed", None)) is not None:
        terminalreporter.write_line(f"random order; the same again: --randomly-seed={seed}")


# threads of all workers on all cores would wait for each other most of the time
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = executors.count_cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))))
THREADS = torch.get_num_threads()
# seconds; the longest wait for another process or thread, which is slow on a busy machine
PATIENCE = 300


def isolate(patch, path):
    """Hide the user's home, data, cluster and proxies."""
    for name, folder in (
        ("HOME", "home"),
        ("DECISIONLLM_HOME", "data"),
        ("MINARI_DATASETS_PATH", "minari"),
    ):
        patch.setenv(name, str(path / folder))
    for name in ("NO_PROXY", "no_proxy"):
        patch.setenv(name, "*")
    for name in (
        "D4RL_DATASET_DIR",
        "DECISIONLLM_TOKEN",
        "DECISIONLLM_RUN",
        "RAY_ADDRESS",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
    ):
        patch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def isolated_session(tmp_path_factory):
    """The same for the fixtures of a module, which are set up before those of its first test."""
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, path := tmp_path_factory.mktemp("session"))
        (path / "home").mkdir()  # Chromium keeps its profile there
        yield


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, tmp_path):
    """No hub, no home folder, no data of the user's, and nothing from the tests before: random
    numbers and threads are as at the start, and modules of a test's own folder are forgotten.
    """
    isolate(monkeypatch, tmp_path)
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def bfloat16_is_fast(monkeypatch):
    """Frozen weights of bfloat16 are held so on this processor, whatever it is."""
    monkeypatch.setattr(hardware, "is_slow_dtype", lambda dtype: False)


def near(got, expected, tolerance=1e-5, *, scale=None, axis=None):
    """Assert that no difference exceeds `tolerance` times the scale of the numbers.

    Sums of another instruction set, batch size or thread count are rounded in another order, with
    an error relative to their largest terms. So a multiplier of 0.5 beside others of 250 has no
    more correct digits after the point than these.

    Args:
        got, expected: arrays of one shape.
        scale: what the tolerance refers to, such as the width of the action space; by default the
            largest |expected|.
        axis: take the largest over this axis alone, where columns have units of their own.
    """
    got, expected = np.asarray(got, float), np.asarray(expected, float)
    assert got.shape == expected.shape
    bound = tolerance * (np.abs(expected).max(axis=axis, initial=0) if scale is None else scale)
    apart = np.abs(got - expected)
    assert (apart <= bound).all(), (
        f"expected differences up to {bound}, got {apart.max()}: {got} for {expected}"
    )


def damage(file):
    """Flip every bit of 40 bytes in the middle of a file: weights, where it holds tensors."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    assert file.suffix != ".safetensors" or middle > 8 + int.from_bytes(content[:8], "little"), (
        "the header is in the middle"
    )
    content[middle : middle + 40] = bytes(byte ^ 255 for byte in content[middle : middle + 40])
    file.write_bytes(content)


def node(group, name, /, **options):
    """The config node of a registered choice."""
    choice = discover()[group][name]
    return choice | ({"text": "auto"} if "text" in choice else {}) | options


def gemma3(
    seed,
    *,
    layers=2,
    dropout=0.0,
    tune="full",
    lora_rank=16,
    lora_alpha=32,
    lora_targets="all-linear",
):
    """A small Gemma 3 with random weights, whose first block sees four tokens and whose second one
    all.
    """
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"][:layers],
        attention_dropout=dropout,
        use_cache=False,
    )
    model = init_random_model(config, seed)
    return build_backbone(model, own_tokenizer, seed, tune, lora_rank, lora_alpha, lora_targets)


def cut_llama(seed, *, summary=0, tune="lora"):
    """A small Llama with random weights, whose first two blocks of four read texts alone, and sum
    them up in so many tokens.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        use_cache=False,
    )
    model = init_random_model(config, seed)
    backbone = build_backbone(model, own_tokenizer, seed, tune, 4, 8, "all-linear", text_layers=2)
    backbone.cut_off(2, TextSummary(32, summary, seed) if summary else None)
    return backbone


def backbone_node(backbone, **options):
    """The config node of one of BACKBONES, or of a function here."""
    name, sizes = BACKBONES.get(backbone, (backbone, {}))
    if "." in name:
        return {"_target_": name} | sizes | options
    return node("backbone", name, **sizes | options)


def episode(rewards, *, S=2, A=1, start=0.0, **fields):
    """An episode of these rewards, whose observations and actions count up from `start`, so that
    each row is known.
    """
    n = len(rewards)
    rows = start + np.arange(n, dtype=np.float32)
    return Episode(
        np.repeat(rows[:, None], S, 1),
        np.repeat(rows[:, None] / 100, A, 1),
        np.array(rewards, np.float32),
        **fields,
    )


def make_store(path, episodes, **spec):
    S = episodes[0].observations.shape[1]
    A = episodes[0].actions.shape[1]
    facts = {"observation_dim": S, "action_dim": A, "horizon": 50} | (
        {} if spec.get("num_actions") else {"low": (-1.0,) * A, "high": (1.0,) * A}
    )
    return store_writer.write_store(path, Source(Spec(**facts | spec), episodes, {"name": "test"}))


def make_model(
    spec,
    *,
    backbone="qwen2",
    head="gaussian",
    seed=0,
    head_options=None,
    backbone_options=None,
    objective=None,
    planner=None,
    execution="per_agent",
    condition_on="return_to_go",
    **tokenizer,
):
    """A small model with random weights, its biases and its adapters too, so that a wrong one would
    show.
    """
    language_model = build(backbone_node(backbone, **backbone_options or {}), seed)
    assert language_model.layout is not None, (
        "our forward differs from the library's: the plain one would hide it"
    )
    torch.manual_seed(seed)
    kind = get_function("model", execution, "team.execution")
    head_node = node("head", head, **head_options or {})
    tokenizer_node = node("tokenizer", "trajectory", **tokenizer)
    options = ModelOptions(condition_on=condition_on)
    model = kind(spec, language_model, head_node, tokenizer_node, options, objective, planner)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2 or not weight.any():
                weight.add_(0.1 * torch.randn_like(weight))
            elif weight.is_floating_point():
                weight.mul_(3.0)  # so that attention is far from uniform
    return model.eval()


def make_policy(
    spec,
    *,
    window=6,
    stride=3,
    target_return=3.0,
    decode="mode",
    return_horizon=0,
    planning_horizon=0,
    planning_value=0.0,
    **options,
):
    return Policy(
        make_model(spec, **options),
        window,
        stride,
        target_return,
        return_horizon=return_horizon,
        decode=decode,
        planning_horizon=planning_horizon,
        planning_value=planning_value,
    )


MAX_RETURN = node("objective", "max_return", expectile=0.9)
NANO = ("backbone=nano", "backbone.width=32", "backbone.layers=2", "backbone.inner=48")
DT = ("backbone=dt", "backbone.width=32", "backbone.layers=2")  # with its dropout
LOOP = (
    "dataset=synthetic",
    "dataset.episodes=40",
    "window=5",
    "optim.batch_size=8",
    "steps=4",
    "optim.warmup=2",
    "seed=7",
    "log.every=1",
    "log.validation_batches=1",
    "optim.precision=no",
    "device=cpu",
    "log.tracker=none",
)


def command(verb, *overrides):
    """The exit code of `decisionllm verb ...`, run in this process."""
    before = sys.argv
    try:
        return run(verb, [str(override) for override in overrides])
    finally:
        sys.argv = before


def metrics(path):
    """The metrics that a run logged, without the clock."""
    rows = [
        json.loads(line)
        for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def interrupt(monkeypatch, step):
    """Send this process a Ctrl-C while the batch of this training step is drawn. -> the steps that
    are drawn, as they come
    """
    draw, drawn = sampling.Sampler.__call__, []

    def watched(sampler, now):
        if sampler.seed == 7:  # LOOP's; 0 is the validation's
            drawn.append(now)
            if now == step:
                signal.raise_signal(signal.SIGINT)
        return draw(sampler, now)

    monkeypatch.setattr(sampling.Sampler, "__call__", watched)
    return drawn
