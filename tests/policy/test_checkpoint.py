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
from decisionllm.config import TrainConfig, plain, train_config
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
    return plain(TrainConfig(dataset={}, seed=3, window=6, **parts))


def trained(path, config, *, noise=1):
    """A run directory whose model has moved everything it trains, by this noise; the model."""
    model = make_model(train_config(config), SPEC).eval()
    torch.manual_seed(noise)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    model.normalizer.fit(
        [(np.random.default_rng(0).normal(3, 2, (50, 2)).astype(np.float32), np.arange(50.0))]
    )
    info = {
        "format": 3,
        "spec": asdict(SPEC),
        "frozen": fingerprint(model.backbone),
        "targets": {"0.9": 30.0},
    }
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (path / "run.json").write_text(json.dumps(info), encoding="utf-8")
    checkpoint.save(path, model, {"moment": torch.ones(3)}, {"step": 1})
    return model


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


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("head", ["gaussian", "bins"])
def test_a_loaded_policy_acts_as_the_saved_one(backbone, head, tmp_path):
    model = trained(tmp_path / "run", config(backbone, head=node("head", head)))
    loaded = loading.load(tmp_path / "run")
    assert loaded.target_return == 30 and (loaded.window, loaded.stride) == (6, 3)
    expected = Policy(model, 6, 3, 30.0).act(histories())
    with pytest.raises(ValueError, match="device: expected one of auto, cpu, cuda, got 'tpu'"):
        loading.load(tmp_path / "run", device="tpu")
    assert np.array_equal(loaded.act(histories()), expected)
    untrained = Policy(
        make_model(train_config(config(backbone, head=node("head", head))), SPEC), 6, 3, 30.0
    )
    assert not np.allclose(untrained.act(histories()), expected, atol=0.01)


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
    model = trained(tmp_path / "run", config(**own))
    model.head.norm.running_mean += 1
    model.tokenizer.shift += 1
    checkpoint.save(tmp_path / "run", model, {}, {"step": 2})
    expected = Policy(model, 6, 3, 30.0).act(histories())
    loaded = loading.load(tmp_path / "run", trust=[__name__])
    assert np.array_equal(loaded.act(histories()), expected)


@pytest.mark.parametrize("backbone", [name for name in BACKBONES if not name.endswith("full")])
def test_frozen_weights_are_not_in_the_files(backbone, tmp_path):
    model = trained(tmp_path / "run", config(backbone))
    files = {
        file: load_file(file) for file in (tmp_path / "run" / "checkpoint").rglob("*.safetensors")
    }
    kept = [tensor for tensors in files.values() for tensor in tensors.values()]
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    assert frozen and not any(torch.equal(weight, tensor) for weight in frozen for tensor in kept)
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    # an adapter has two names, see peft's test
    again = [weight for name, weight in model.named_parameters() if "lora_" in name]
    wanted = [*trainable, *again, *model.normalizer.buffers(), torch.ones(3)]
    assert sum(tensor.numel() for tensor in kept) == sum(tensor.numel() for tensor in wanted)


def test_a_run_directory_holds_no_pickle(tmp_path):
    assert command("train", *LOOP, *NANO, "backbone.tune=lora", f"run={tmp_path}/run") == 0
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".yaml", ".json", ".jsonl", ".safetensors", ".md"}
    for file in files:  # each is what its name says
        (load_file(file) if file.suffix == ".safetensors" else file.read_text(encoding="utf-8"))


# peft reads it
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2"])
@pytest.mark.parametrize("library", ["AutoModel", "AutoModelForCausalLM"])
def test_peft_loads_the_adapter_on_both_classes_of_a_model(family, library, tmp_path):
    """With and without the output map of the language model, whose weights have other names."""
    import transformers
    from peft import PeftModel

    folder = write(tmp_path / "model", family)
    if library == "AutoModelForCausalLM":
        transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    whole = ("backbone.text_layers=0", "backbone.layers=0")
    lora = (
        "backbone=pretrained",
        f"backbone.folder={folder}",
        *whole,
        "optim.lr=0.1",
        "optim.clip=0",
    )
    assert command("train", *LOOP, *lora, f"run={tmp_path}/run") == 0
    policy = loading.load(tmp_path / "run")
    backbone = policy.model.backbone
    language_model = getattr(transformers, library).from_pretrained(folder)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        bare = language_model(ids, output_hidden_states=True).hidden_states[-1]
        adapted = PeftModel.from_pretrained(
            language_model, tmp_path / "run" / "checkpoint" / "adapter"
        ).eval()
        found = adapted(ids, output_hidden_states=True).hidden_states[-1]
        wanted = backbone.model(ids, output_hidden_states=True).hidden_states[-1]
        ours = backbone(
            backbone.embed(ids), ids[:1, :0], ids[:1, :0].bool(), torch.zeros(2, dtype=torch.long)
        )
    near(found, wanted)
    near(found, ours)
    assert (found - bare).abs().max() > 0.01 * bare.abs().max(), "the adapter changed nothing"


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


ADAPTER = "checkpoint/adapter/adapter_model.safetensors"
WRONG = {  # fmt: off
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
        lambda f: f["spec"].update(observation_dim=3),
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
    "damaged": ("checkpoint/model.safetensors", half, "model.safetensors is damaged or missing"),
    "damaged adapter": (ADAPTER, half, "adapter_model.safetensors is damaged or missing"),
    "lost adapter": (ADAPTER, Path.unlink, "adapter_model.safetensors is damaged or missing"),
    "damaged info": ("run.json", half, "run.json is damaged or missing"),
    "another format": (
        "run.json",
        lambda f: f.pop("format"),
        "expected a run of format 3, got format 1; train again",
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
}  # fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_clear_error(name, tmp_path):
    file, change, message = WRONG[name]
    trained(tmp_path / "run", config())
    change(tmp_path / "run" / file) if change in (half, Path.unlink, shutil.rmtree) else edit(
        tmp_path / "run" / file, change
    )
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        loading.load(tmp_path / "run")
    assert (
        "\n" not in str(raised.value)
        and str(tmp_path / "run") in str(raised.value)
        or "quantile" in str(raised.value)
    )


@pytest.mark.parametrize("name", ["trainer.safetensors", "trainer.json"])
def test_a_damaged_optimiser_is_one_clear_error(name, tmp_path, capsys):
    words = ("train", *LOOP, *NANO, f"run={tmp_path}/run")
    assert command(*words) == 0
    half(tmp_path / "run" / "checkpoint" / name)
    assert command(*words) == 1
    assert f"{name} is damaged or missing" in capsys.readouterr().err


def shorter(file):
    """Cut the last line of a text, or the last byte of tensors."""
    content = file.read_bytes()
    end = -1 if file.suffix == ".safetensors" else content[:-1].rfind(b"\n") + 1
    file.write_bytes(content[:end])


def swapped(file):
    """Put in its place the file of a run that differs in nothing but what it learned."""
    other = file.parents[len(file.parts) - file.parts.index("run") - 1] / "other"
    trained(other, config(), noise=2)
    new = (other / file.relative_to(other.parent / "run")).read_bytes()
    old = file.read_bytes()
    assert len(new) == len(old) and new != old
    file.write_bytes(new)


@pytest.mark.parametrize("change", [damage, shorter, swapped])
@pytest.mark.parametrize("name", ["model.safetensors", "adapter/adapter_model.safetensors"])
def test_weights_that_are_not_those_written_are_refused(name, change, tmp_path):
    trained(tmp_path / "run", config())
    change(tmp_path / "run" / "checkpoint" / name)
    with pytest.raises(
        ValueError, match=rf"{name} is damaged .*not those that were written.*restore a copy"
    ):
        loading.load(tmp_path / "run")


def test_the_error_of_damage_names_the_checkpoint_before(tmp_path):
    """It is there after a save that was killed between its two renames."""
    trained(tmp_path / "run", config())
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "run" / "checkpoint.old")
    damage(tmp_path / "run" / "checkpoint" / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"model.safetensors is damaged .*checkpoint.old holds the checkpoint before",
    ):
        loading.load(tmp_path / "run")


@pytest.mark.parametrize("name", ["model.safetensors", "adapter/adapter_model.safetensors"])
def test_files_of_two_checkpoints_of_a_run_are_refused(name, tmp_path):
    run = tmp_path / "run"
    model = trained(run, config())
    first = (run / "checkpoint" / name).read_bytes()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)
    checkpoint.save(run, model, {"moment": torch.ones(3)}, {"step": 2})
    loading.load(run)
    (run / "checkpoint" / name).write_bytes(first)
    with pytest.raises(ValueError, match=f"{name} is damaged .*not those that were written"):
        loading.load(run)


def test_a_checkpoint_without_digests_is_loaded(tmp_path):
    """As versions before wrote it, with one name for each weight of the adapter."""
    model = trained(tmp_path / "run", config())
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


def test_every_file_of_a_run_that_acts_is_checked(tmp_path, capsys):
    """Those of the best weights, which act; the optimiser, which training goes on with; what
    describes the run.
    """
    run = tmp_path / "run"
    words = (
        "train",
        *LOOP,
        *NANO,
        "backbone.tune=lora",
        "data.held_out=0.2",
        "log.keep_best=loss",
        f"run={run}",
    )
    assert command(*words) == 0
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
            said = capsys.readouterr().err
        else:
            with pytest.raises(ValueError) as raised:
                loading.load(run)
            said = str(raised.value)
        assert f"{name} is damaged" in said and "not those that were written" in said
        (run / name).write_bytes(before)
    loading.load(run)


def test_a_config_cut_at_the_end_of_a_line_is_refused(tmp_path):
    """It is a smaller config, of which nothing says that it lacks something."""
    run = tmp_path / "run"
    assert command("train", *LOOP, *NANO, f"run={run}") == 0
    shorter(run / "config.yaml")
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
    """Each operation on files is in turn the last, twice in a row: what is found is all old or all
    new, never a mixture.
    """
    run, left = tmp_path / "run", []
    model = trained(run, config("nano full"))

    def mortal(operation):
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
                patch.setattr(owner, name, mortal(getattr(owner, name)))
            checkpoint.save(run, model, {"moment": torch.full((3,), number)}, {"step": number})
            return True
        return False

    def found():
        parts = [
            directory.content(checkpoint.find(run) / name)
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
        assert found() in ({number} if came_through else {whole[0], number})
        whole[0] = found()

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
    model = trained(open_folder / "run", config("nano full"))
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
    trained(tmp_path / "run", config("nano full"))
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
    known = directory.versions()
    assert known["commit"] is None
    # a build's name is not everywhere in both
    assert known["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_run_goes_on_after_its_parts_have_got_more_options(tmp_path):
    """Those that it was begun without have their defaults, with which it is built."""
    kinds = {"dataset": "synthetic", "backbone": "pretrained", "head": "gaussian"}
    config = TrainConfig(**{group: node(group, name) for group, name in kinds.items()})
    before = asdict(config)
    del before["backbone"]["text_summary"]
    directory.create(tmp_path, before, {})
    assert directory.same_run(tmp_path, config, {})
    config.backbone["text_summary"] = 3
    with pytest.raises(ValueError, match="backbone.text_summary was 0, is 3"):
        directory.same_run(tmp_path, config, {})
