"""Checkpoints: what is loaded acts as what was saved, what does not fit is refused in one line, a
failed save loses nothing.
"""

import json
import os
import resource
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from decisionllm.backbones.build import fingerprint
from decisionllm.config import TrainConfig, to_plain_dicts, train_config
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.files import DIGESTS
from decisionllm.models.heads import GaussianHead
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.runs import checkpoint, directory
from decisionllm.runs.model import make_model
from decisionllm.schema import History, Spec
from decisionllm.tokenizers.trajectory import TrajectoryTokenizer
from tests.backbones.test_backbones import write
from tests.conftest import LOOP, NANO, SMALL, command, damage, near, node

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

SPEC = Spec(observation_dim=2, action_dim=2, horizon=20, low=(-1.0, -2.0), high=(1.0, 2.0))
BACKBONES = {
    f"{name} {tune}": node("backbone", name, **sizes, tune=tune)
    for name, sizes in (("nano", SMALL["qwen2"]), ("dt", SMALL["gpt2"]))
    for tune in ("full", "lora", "frozen")
}


def config(backbone="nano lora", **options):
    parts = {"backbone": BACKBONES[backbone], "head": node("head", "gaussian")} | options
    return to_plain_dicts(
        TrainConfig(dataset=node("dataset", "synthetic"), seed=3, window=6, **parts)
    )


def save_run(path, config, *, noise=1):
    """Save a run directory whose model has moved everything it trains by this noise; return the
    model.
    """
    model = make_model(train_config(config), {ONLY: SPEC}).eval()
    torch.manual_seed(noise)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    model.normalizer.fit(
        [(np.random.default_rng(0).normal(3, 2, (50, 2)).astype(np.float32), np.arange(50.0))]
    )
    info = {
        "format": 5,
        "embodiments": {ONLY: {"spec": asdict(SPEC), "targets": {"0.9": 30.0}}},
        "parts": {},
        "frozen": fingerprint(model.backbone),
    }
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (path / "run.json").write_text(json.dumps(info), encoding="utf-8")
    checkpoint.save(path, model, {"moment": torch.ones(3)}, {"step": 1})
    return model


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """A run directory of `save_run` with an adapter, to copy."""
    path = tmp_path_factory.mktemp("lora") / "run"
    save_run(path, config())
    return path


@pytest.fixture
def run(lora_run, tmp_path):
    """A copy of `lora_run`, to change."""
    return Path(shutil.copytree(lora_run, tmp_path / "run"))


@pytest.fixture(scope="module")
def command_run(tmp_path_factory):
    """(run directory, words) of a training by the command line, with an adapter and its best
    weights.
    """
    path = tmp_path_factory.mktemp("command") / "run"
    options = ("backbone.tune=lora", "data.held_out=0.2", "log.keep_best=loss")
    words = ("train", *LOOP, *NANO, *options, f"run={path}")
    assert command(*words) == 0
    return path, words


def histories():
    rng = np.random.default_rng(5)
    pasts = (0, 4, 12)
    return [
        History(
            rng.normal(size=(t + 1, 2)), rng.uniform(-1, 1, (t, 2)), rng.normal(size=t), task="east"
        )
        for t in pasts
    ]


def edit(file, change):
    """Change a YAML, JSON or safetensors file of a run, as if it had been written so."""
    read, write = {
        ".yaml": (
            lambda: yaml.safe_load(file.read_text(encoding="utf-8")),
            lambda new: file.write_text(yaml.safe_dump(new), encoding="utf-8"),
        ),
        ".json": (
            lambda: json.loads(file.read_text(encoding="utf-8")),
            lambda new: file.write_text(json.dumps(new), encoding="utf-8"),
        ),
        ".safetensors": (lambda: load_file(file), lambda new: save_file(new, file)),
    }[file.suffix]
    content = read()
    change(content)
    write(content)
    for folder in file.parents[:2]:
        (folder / DIGESTS).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("backbone", "head"), [*((name, "gaussian") for name in BACKBONES), ("nano lora", "bins")]
)
def test_a_loaded_policy_acts_as_the_saved_one(backbone, head, tmp_path):
    model = save_run(tmp_path / "run", config(backbone, head=node("head", head)))
    loaded = loading.load(tmp_path / "run")
    assert loaded.target_return == 30 and (loaded.window, loaded.stride) == (6, 3)
    expected = Policy(model, 6, 3, 30.0).act(histories())
    assert np.array_equal(loaded.act(histories()), expected)
    untrained = Policy(
        make_model(train_config(config(backbone, head=node("head", head))), {ONLY: SPEC}),
        6,
        3,
        30.0,
    )
    assert not np.allclose(untrained.act(histories()), expected, atol=0.01)


def test_a_run_is_loaded_on_a_device_that_there_is(run):
    with pytest.raises(ValueError, match="device: expected one of auto, cpu, cuda, got 'tpu'"):
        loading.load(run, device="tpu")


class NormedHead(GaussianHead):
    """With a part whose numbers no gradient trains."""

    def __init__(self, width, spec):
        super().__init__(width, spec)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, hidden, action_masks=None, targets=None):
        normed = self.norm(hidden.flatten(0, -2)).view(hidden.shape)
        return super().forward(normed, action_masks, targets)


class ShiftedTokenizer(TrajectoryTokenizer):
    """With such a number too."""

    def __init__(self, spec, width, *reads):
        super().__init__(spec, width, *reads)
        self.shift = torch.nn.Buffer(torch.zeros(()))

    def forward(self, *steps):
        return super().forward(*steps) + self.shift


def test_buffers_of_parts_of_ones_own_are_saved(tmp_path):
    own = {
        "head": {"_target_": f"{__name__}.NormedHead"},
        "tokenizer": {"_target_": f"{__name__}.ShiftedTokenizer"},
    }
    model = save_run(tmp_path / "run", config(**own))
    model.head.norm.running_mean += 1
    model.tokenizer.shift += 1
    checkpoint.save(tmp_path / "run", model, {}, {"step": 2})
    expected = Policy(model, 6, 3, 30.0).act(histories())
    loaded = loading.load(tmp_path / "run", trust=[__name__])
    assert np.array_equal(loaded.act(histories()), expected)


@pytest.mark.parametrize("backbone", [name for name in BACKBONES if not name.endswith("full")])
def test_frozen_weights_are_not_in_the_files(backbone, tmp_path):
    model = save_run(tmp_path / "run", config(backbone))
    files = {
        file: load_file(file) for file in (tmp_path / "run" / "checkpoint").rglob("*.safetensors")
    }
    saved = [tensor for tensors in files.values() for tensor in tensors.values()]
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    assert frozen and not any(torch.equal(weight, tensor) for weight in frozen for tensor in saved)
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    # an adapter has two names, see peft's test
    again = [weight for name, weight in model.named_parameters() if "lora_" in name]
    expected = [*trainable, *again, *model.normalizer.buffers(), torch.ones(3)]
    assert sum(tensor.numel() for tensor in saved) == sum(tensor.numel() for tensor in expected)


def test_a_run_directory_holds_no_pickle(command_run):
    files = [file for file in command_run[0].rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".yaml", ".json", ".jsonl", ".safetensors", ".md"}
    for file in files:  # each is what its name says
        (load_file(file) if file.suffix == ".safetensors" else file.read_text(encoding="utf-8"))


# peft reads it
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "library"),
    [
        ("Llama", "AutoModel"),
        ("GPT2", "AutoModel"),
        ("Qwen2", "AutoModelForCausalLM"),
        ("GPT2", "AutoModelForCausalLM"),
    ],
)
def test_peft_loads_the_adapter_on_both_classes_of_a_model(family, library, tmp_path):
    """With and without the output map of the language model, whose weights have other names."""
    import transformers
    from peft import PeftModel

    folder = write(tmp_path / "model", family)
    if library == "AutoModelForCausalLM":
        transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    pretrained = node("backbone", "pretrained", folder=str(folder), text_layers=0, layers=0)
    save_run(tmp_path / "run", config() | {"backbone": pretrained})
    backbone = loading.load(tmp_path / "run").model.backbone
    language_model = getattr(transformers, library).from_pretrained(folder)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        bare = language_model(ids, output_hidden_states=True).hidden_states[-1]
        adapted = PeftModel.from_pretrained(
            language_model, tmp_path / "run" / "checkpoint" / "adapter"
        ).eval()
        by_peft = adapted(ids, output_hidden_states=True).hidden_states[-1]
        expected = backbone.model(ids, output_hidden_states=True).hidden_states[-1]
        ours = backbone(
            backbone.embed(ids), ids[:1, :0], ids[:1, :0].bool(), torch.zeros(2, dtype=torch.long)
        )
    near(by_peft, expected)
    near(by_peft, ours)
    assert (by_peft - bare).abs().max() > 0.01 * bare.abs().max(), "the adapter changed nothing"


def truncate_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


ADAPTER = "checkpoint/adapter/adapter_model.safetensors"
WRONG = {
    "another width": (
        "config.yaml",
        lambda c: c["backbone"].update(width=64),
        "sizes: .*expected .*64.*another backbone",
    ),
    "more layers": (
        "config.yaml",
        lambda c: c["backbone"].update(layers=3),
        "not this model's weights; missing: .*another backbone",
    ),
    "another architecture": (
        "config.yaml",
        lambda c: c.update(backbone=BACKBONES["dt lora"]),
        "not this model's weights",
    ),
    "full, not lora": (
        "config.yaml",
        lambda c: c["backbone"].update(tune="full"),
        "not this model's weights",
    ),
    "another rank": (
        "config.yaml",
        lambda c: c["backbone"].update(lora_rank=4),
        "lora_A.* expected .*4",
    ),
    "another head": (
        "config.yaml",
        lambda c: c.update(head=node("head", "bins")),
        "head.out.bias is .2,., expected .66,.",
    ),
    "another embedding": (
        "config.yaml",
        lambda c: c["tokenizer"].update(embedding="mlp"),
        "not this model's weights",
    ),
    "without returns": (
        "config.yaml",
        lambda c: c["model"].update(condition_on="none"),
        "unknown: tokenizer.returns",
    ),
    "another seed": (
        "config.yaml",
        lambda c: c.update(seed=4),
        "a backbone whose frozen weights were different",
    ),
    "another observation": (
        "run.json",
        lambda f: f["embodiments"][ONLY]["spec"].update(observation_dim=3),
        "normalizer.* is .2,., expected .3,.",
    ),
    "no such target": (
        "config.yaml",
        lambda c: c["act"].update(target_quantile=0.7),
        "knows those of 0.9, got 0.7",
    ),
    "no normaliser": (
        "checkpoint/model.safetensors",
        lambda t: [t.pop(k) for k in [*t] if "normalizer" in k],
        "missing: normalizer",
    ),
    "no adapter": (ADAPTER, lambda t: t.clear(), "missing: base_model"),
    "damaged": (
        "checkpoint/model.safetensors",
        truncate_half,
        "model.safetensors is damaged or missing",
    ),
    "damaged adapter": (ADAPTER, truncate_half, "adapter_model.safetensors is damaged or missing"),
    "lost adapter": (ADAPTER, Path.unlink, "adapter_model.safetensors is damaged or missing"),
    "damaged info": ("run.json", truncate_half, "run.json is damaged or missing"),
    "another format": (
        "run.json",
        lambda f: f.update(format=3),
        "expected a run of format 5, got format 3; train again",
    ),
    "empty config": (
        "config.yaml",
        lambda c: c.clear(),
        "config.yaml is damaged or missing .expected keys with values, got {}",
    ),
    "lost config": ("config.yaml", Path.unlink, "config.yaml is damaged or missing"),
    "no run": ("run.json", Path.unlink, "expected a run directory .with run.json., found none"),
    "no checkpoint": (
        "checkpoint",
        shutil.rmtree,
        "expected a run with a checkpoint, found none; train it first",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_clear_error(name, run):
    file, change, message = WRONG[name]
    if change in (truncate_half, Path.unlink, shutil.rmtree):
        change(run / file)
    else:
        edit(run / file, change)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        loading.load(run)
    printed = str(raised.value)
    assert "\n" not in printed and (str(run) in printed or "quantile" in printed)


def cut_end(file):
    """Cut the last line of a text, or the last byte of tensors."""
    content = file.read_bytes()
    end = -1 if file.suffix == ".safetensors" else content[:-1].rfind(b"\n") + 1
    file.write_bytes(content[:end])


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """A run that differs from `lora_run` in nothing but what it learned."""
    path = tmp_path_factory.mktemp("other") / "run"
    save_run(path, config(), noise=2)
    return path


@pytest.mark.parametrize("change", [damage, cut_end, "swapped"])
@pytest.mark.parametrize("name", ["model.safetensors", "adapter/adapter_model.safetensors"])
def test_weights_that_are_not_those_written_are_refused(name, change, run, other_run):
    file = run / "checkpoint" / name
    if change == "swapped":
        new = (other_run / "checkpoint" / name).read_bytes()
        old = file.read_bytes()
        assert len(new) == len(old) and new != old
        file.write_bytes(new)
    else:
        change(file)
    with pytest.raises(
        ValueError, match=rf"{name} is damaged .*not those that were written.*restore a copy"
    ):
        loading.load(run)


def test_the_error_of_damage_names_the_checkpoint_before(run):
    """It is there after a save that was killed between its two renames."""
    shutil.copytree(run / "checkpoint", run / "checkpoint.old")
    damage(run / "checkpoint" / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"model.safetensors is damaged .*checkpoint.old holds the checkpoint before",
    ):
        loading.load(run)


def test_a_checkpoint_without_digests_is_loaded(tmp_path):
    """As versions before wrote it, with one name for each weight of the adapter."""
    model = save_run(tmp_path / "run", config())
    edit(
        tmp_path / "run" / ADAPTER,
        lambda tensors: [tensors.pop(name) for name in [*tensors] if ".model.model." in name],
    )
    assert (
        not (tmp_path / "run" / "checkpoint" / DIGESTS).exists()
        and len(load_file(tmp_path / "run" / ADAPTER)) == 28
    )
    loaded = loading.load(tmp_path / "run")
    assert np.array_equal(loaded.act(histories()), Policy(model, 6, 3, 30.0).act(histories()))


def test_every_file_of_a_run_that_acts_is_checked(command_run, capsys):
    """The best weights, which act; the optimiser, which training goes on with; the files that
    describe the run.
    """
    run, words = command_run
    checked = (
        "best/checkpoint/model.safetensors",
        "best/checkpoint/adapter/adapter_model.safetensors",
        "config.yaml",
        "run.json",
        "checkpoint/trainer.safetensors",
        "checkpoint/trainer.json",
    )
    for name in checked:
        before = (run / name).read_bytes()
        damage(run / name)
        if name.startswith("checkpoint/"):
            assert command(*words) == 1
            printed = capsys.readouterr().err
        else:
            with pytest.raises(ValueError) as raised:
                loading.load(run)
            printed = str(raised.value)
        assert f"{name} is damaged" in printed and "not those that were written" in printed
        (run / name).write_bytes(before)
    loading.load(run)


def test_a_config_cut_at_the_end_of_a_line_is_refused(command_run, tmp_path):
    """It is a smaller config, of which nothing says that it lacks something."""
    run = Path(shutil.copytree(command_run[0], tmp_path / "run"))
    cut_end(run / "config.yaml")
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    with pytest.raises(
        ValueError,
        match=r"config.yaml is damaged .*if you changed it yourself, delete .*run/checksums.json",
    ):
        directory.read(run)
    (run / DIGESTS).unlink()
    directory.read(run)


WRITES = (
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "write_text"),
    (shutil, "rmtree"),
    (checkpoint, "save_file"),
)


class Killed(BaseException):
    """The end of the process: nothing that runs after it may be needed."""


def test_a_save_killed_at_any_write_keeps_a_whole_checkpoint(tmp_path, monkeypatch):
    """Each operation on files is in turn the last, twice in a row: the checkpoint is all old or all
    new, never a mixture.
    """
    run, left = tmp_path / "run", []
    model = save_run(run, config("nano full"))

    def make_mortal(operation):
        def run_or_die(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return operation(*arguments, **options)

        return run_or_die

    def save(number, operations):
        """Save a checkpoint that is this number all over, and die after so many operations. ->
        whether it came through
        """
        left[:] = [operations]
        model.head.out.bias.data.fill_(number)
        with monkeypatch.context() as patch, suppress(Killed):
            for owner, name in WRITES:
                patch.setattr(owner, name, make_mortal(getattr(owner, name)))
            checkpoint.save(run, model, {"moment": torch.full((3,), number)}, {"step": number})
            return True
        return False

    def read_number():
        parts = [
            directory.read_file(checkpoint.find(run) / name)
            for name in ("model.safetensors", "trainer.safetensors", "trainer.json")
        ]
        numbers = {
            float(parts[0]["head.out.bias"][0]),
            float(parts[1]["moment"][0]),
            float(parts[2]["step"]),
        }
        assert len(numbers) == 1, numbers
        return numbers.pop()

    numbers, whole = count(1.0), [0.0]

    def attempt(operations):
        number = next(numbers)
        came_through = save(number, operations)
        assert read_number() in ({number} if came_through else {whole[0], number})
        whole[0] = read_number()

    attempt(99)
    all_of_them = 99 - left[0]
    for first in range(all_of_them):
        attempt(first)
        # between the renames: the next save starts from the old one
        if checkpoint.find(run).name != "checkpoint":
            for second in range(all_of_them):
                attempt(99)
                attempt(first)
                attempt(second)
    attempt(99)
    assert all_of_them > 6 and {path.name for path in run.iterdir()} == {
        "checkpoint",
        "config.yaml",
        "run.json",
    }


@contextmanager
def full_disk(path):
    """No file may grow beyond 4 kB: what the system answers then is what a full disk answers, but
    for its number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(path):
    """Nothing can be written under this folder, not even by root, which takes another user id."""
    root = os.geteuid() == 0
    for folder in (path, *(p for p in path.rglob("*") if p.is_dir())):
        folder.chmod(0o555)
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        for folder in (path, *(p for p in path.rglob("*") if p.is_dir())):
            folder.chmod(0o755)


@pytest.fixture
def open_folder():
    """A temporary folder open to every user: pytest's own are closed to all but their owner."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("trouble", [full_disk, read_only])
def test_a_failed_save_is_one_clear_error_and_keeps_the_last(trouble, open_folder):
    model = save_run(open_folder / "run", config("nano full"))
    before = {
        file: file.read_bytes() for file in (open_folder / "run").rglob("*") if file.is_file()
    }
    with (
        trouble(open_folder / "run"),
        pytest.raises(
            OSError, match="checkpoint: could not be written .* the checkpoint before it is kept"
        ),
    ):
        checkpoint.save(open_folder / "run", model, {"moment": torch.zeros(3)}, {"step": 2})
    assert before == {
        file: file.read_bytes() for file in (open_folder / "run").rglob("*") if file.is_file()
    }
    loading.load(open_folder / "run")


def test_an_option_of_another_version_is_one_clear_error(tmp_path):
    save_run(tmp_path / "run", config("nano full"))
    file = tmp_path / "run" / "config.yaml"
    file.write_text(
        file.read_text(encoding="utf-8").replace("team:\n", "team:\n  shuffled: 1\n"),
        encoding="utf-8",
    )
    with pytest.raises(
        ValueError,
        match="the options of this run are not those of this version .*team.shuffled.*train again",
    ):
        loading.load(tmp_path / "run")


def test_a_run_on_a_full_disk_fails_in_one_line(tmp_path, capsys):
    words = ("train", *LOOP, *NANO, f"run={tmp_path}/runs/a", f"cache_dir={tmp_path}/data")
    assert (
        command("data", "dataset=synthetic", "dataset.episodes=40", f"cache_dir={tmp_path}/data")
        == 0
    )
    with full_disk(tmp_path):
        assert command(*words) == 1
    printed = capsys.readouterr().err
    assert (
        "could not be written" in printed
        and printed.count("\n") == 1
        and f"{tmp_path}/runs/a" in printed
    )


def test_a_run_in_a_read_only_place_fails_in_one_line(capsys):
    # closed to root too, absent on other systems
    assert command("train", *LOOP, *NANO, "run=/sys/kernel/runs/a") == 1
    printed = capsys.readouterr().err
    assert (
        "could not be written" in printed
        and printed.count("\n") == 1
        and "/sys/kernel/runs/a" in printed
    )


def test_versions_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    versions = directory.versions.__wrapped__()  # not those of an earlier call
    assert versions["commit"] is None
    # a build's name is not everywhere in both
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_run_goes_on_after_its_parts_have_got_more_options(tmp_path):
    """Options that it was begun without have their defaults, with which it is built."""
    kinds = {"dataset": "synthetic", "backbone": "pretrained", "head": "gaussian"}
    config = TrainConfig(**{group: node(group, name) for group, name in kinds.items()})
    before = asdict(config)
    del before["backbone"]["text_summary"]
    directory.create(tmp_path, before, {}, {})
    assert directory.check_same_run(tmp_path, config, {})
    config.backbone["text_summary"] = 3
    with pytest.raises(ValueError, match="backbone.text_summary was 0, is 3"):
        directory.check_same_run(tmp_path, config, {})
