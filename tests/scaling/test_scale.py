"""The command scale: a study is planned, run once, fitted and reported; a fault is reported before
anything is written.
"""

import json
import math
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hydra import initialize_config_dir

from decisionllm.command_line import config_folder, store_choices
from decisionllm.datasets import sampling, windows
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.models.heads import DiscreteHead
from decisionllm.scaling import grid, launch, ledger, study_options, train_configs
from decisionllm.scaling.held_out_loss import measure_losses
from decisionllm.scaling.run import data_quality, execute
from decisionllm.tokenizers import text
from tests.conftest import command, interrupt, make_model, make_policy, node

pytestmark = pytest.mark.slow

STUDIES = sorted(path.stem for path in (config_folder() / "study").glob("*.yaml"))


def listed(key, words):
    """A list of overrides, as the command line takes it."""
    return f"study.{key}=[{','.join(json.dumps(word) for word in words.split())}]"


SMALL = (  # two sizes, two volumes, two qualities, one seed; two learning rates a size
    "study=smoke",
    "~study.axes.size.w64",
    "study.axes.fraction=[1.0,0.25]",
    "study.seeds=[3]",
    "study.budget.steps=4",
    "study.lr.values=[1e-3,1e-2]",
    "study.windows=64",
    "executor=inline",
    "device=cpu",
    listed("evaluate", "episodes=3"),
    listed(
        "train",
        "dataset=synthetic dataset.episodes=60 backbone=nano backbone.heads=2 backbone.kv_heads=1 "
        "window=3 optim.batch_size=8 "
        "optim.warmup=1 log.every=2 log.validation_batches=1 optim.precision=no data.held_out=0.2",
    ),
    listed("axes.size.w16", "backbone.width=16 backbone.layers=1 backbone.inner=16"),
    listed("axes.size.w32", "backbone.width=32 backbone.layers=1 backbone.inner=32"),
)


ONE = ("study.axes.fraction=[1.0]", "study.axes.quality=[0.0]")


def small(out, *words):
    return command("scale", *SMALL, f"out={out}", *words)


def stamps(out):
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/done.json")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study that was run: out, with its data beside it."""
    out = tmp_path_factory.mktemp("studies") / "small"
    assert small(out, f"cache_dir={out.parent}/data") == 0
    return out


def runs(out):
    return json.loads((out / "study.json").read_text(encoding="utf-8"))["runs"]


def test_a_study_in_an_environment_unlike_its_data_is_refused_before_its_first_run(
    tmp_path, capsys
):
    words = [
        "study=smoke",
        listed(
            "train",
            "dataset=synthetic env=gymnasium env.id=NoSuch-v1 backbone=nano data.held_out=0.2",
        ),
    ]
    assert command("scale", *SMALL[1:], *words, f"out={tmp_path / 'out'}") == 1
    assert "env: could not be built (env.id: Environment `NoSuch` doesn't exist" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()


def test_every_cell_is_run_and_tuning_runs_are_not_repeated(finished):
    actual = runs(finished)
    # of the four that tune, two are in the grid
    assert len(actual) == 2 * 2 * 2 + 2 and {run["state"] for run in actual} == {"done"}
    tuned = json.loads((finished / "study.json").read_text(encoding="utf-8"))["tuned"]
    for size, rates in tuned.items():
        best = min(rates, key=rates.get)
        assert len(rates) == 2 and {
            run["lr"] for run in actual if run["size"] == size and run["fraction"] == 1.0
        } == {float(best)}


def test_tuning_scales_the_rate_of_the_backbone_too(finished):
    """lr_backbone is lr by default."""
    for run in runs(finished):
        train = ledger.load_job(finished / run["run"])["train"]
        assert train["optim"]["lr"] == run["lr"] == pytest.approx(train["optim"]["lr_backbone"])


def test_a_second_command_runs_only_what_is_new(finished, tmp_path):
    out = tmp_path / "small"
    shutil.copytree(finished, out)
    cache_dir, before = f"cache_dir={finished.parent}/data", stamps(out)
    assert small(out, cache_dir) == 0 and stamps(out) == before
    more = ("study.seeds=[3,4]", "study.axes.quality=[0.0]", "~study.axes.size.w32")
    assert small(out, cache_dir, *more) == 0
    after = stamps(out)
    assert before.items() <= after.items() and len(after) == len(before) + 2


def test_a_study_that_was_interrupted_writes_its_report_when_it_is_continued(tmp_path, monkeypatch):
    out = tmp_path / "out"
    words = (*ONE, "~study.axes.size.w32", "study.lr.rule=fixed", "study.seeds=[7]")
    with monkeypatch.context() as patch:
        interrupt(patch, step=2)
        assert small(out, *words) == 130
    assert small(out, *words) == 0
    (run,) = runs(out)
    held_out = [point[2] for point in run["curve"]]
    assert [point[0] for point in run["curve"]] == [2, 3, 4] and held_out[1] is None
    assert (out / "report.html").is_file() and (out / "curves.png").is_file()


def test_a_run_records_its_cost_and_its_results(finished):
    for run in runs(finished):
        assert (
            run["steps"] == 4
            and run["tokens"] == 4 * 8 * 3 * 3
            and [point[0] for point in run["curve"]] == [2, 4]
        )
        assert (
            run["held_out"]
            > run["floor"]
            == pytest.approx(2 * math.log(0.5 * math.sqrt(2 * math.pi)))
        )
        assert run["low"] <= run["score"] <= run["high"] and 0 < run["action_error"] < 2
        assert run["parameters"] == run["trained"] > run["non_embedding"] > 1000
        assert run["flops"] == run["tokens"] * (
            6 * run["non_embedding"] + 6 * 1 * int(run["size"][1:]) * 9
        )
    by = {(run["size"], run["fraction"], run["mixture"]): run for run in runs(finished)}
    assert by["w32", 1.0, "0"]["quality"] == 1 < by["w32", 1.0, "0.5"]["quality"]
    assert (
        by["w32", 1.0, "0"]["data_episodes"] == 48 and by["w32", 0.25, "0"]["data_episodes"] == 12
    )


def test_held_out_groups_do_not_depend_on_the_fraction(finished):
    name = next(run["run"] for run in runs(finished) if run["fraction"] == 0.25)
    job = ledger.load_job(finished / name)
    store = prepare_store(job["reference"], finished.parent / "data")
    seed = job["train"]["data"]["seed"]
    _, held_out = sampling.select(store, held_out=0.2, seed=seed)
    _, of_run = sampling.select(store, fraction=0.25, held_out=0.2, seed=seed)
    assert held_out.tolist() == of_run.tolist() and len(held_out) == 12


def test_the_measured_loss_is_the_mean_over_all_held_out_steps(finished):
    store = prepare_store(node("dataset", "synthetic"), finished.parent / "data")
    policy = make_policy(store.spec, timesteps="none")
    parts = {"dataset": {}, "backbone": {}, "head": {}}
    config = parts | {"data": {"held_out": 0.02, "seed": 3}, "window": 1}
    actual = measure_losses(policy, config, store, 2**14)
    _, held_out = sampling.select(store, held_out=0.02, seed=3)
    episodes = np.repeat(held_out, store.lengths[held_out])
    starts = np.concatenate([np.arange(n) for n in store.lengths[held_out]])
    window = windows.cut_windows(windows.load_steps(store), episodes, starts, 1)
    batch = windows.collate(
        window, text.encode(policy.model.backbone.tokenizer, store.tasks), store.task[episodes]
    )
    with torch.no_grad():
        distribution = policy.model.distribution(
            policy.model.read(batch), batch.action_masks, batch.observations
        )
    actions = policy.model.normalizer.actions(batch.actions)
    assert actual["held_out"] == pytest.approx(
        -distribution.log_prob(actions).mean().item(), rel=0.02
    )
    assert actual["action_error"] == pytest.approx(
        (distribution.mode - actions).square().mean().item() ** 0.5, rel=0.02
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("data", "the data is .*, this run was planned for 0"),
        ("backbone", "other weights than"),
        ("init_from", "other weights"),
    ],
)
def test_a_run_planned_for_other_data_or_weights_is_refused(finished, tmp_path, part, message):
    job = ledger.load_job(finished / runs(finished)[0]["run"]) | {part: "0"}
    job["train"]["backbone"]["folder"] = ""
    with pytest.raises(ValueError, match=message):
        execute(
            tmp_path,
            job,
            cache_dir=finished.parent / "data",
            device="cpu",
            keep=False,
            processes=1,
            threads=1,
        )
    assert not list(tmp_path.iterdir())


def test_checkpoints_are_not_kept_by_default(finished):
    assert not list(finished.rglob("*.safetensors")) and list(finished.rglob("metrics.jsonl"))


def test_the_floor_is_the_least_loss_of_the_head(finished):
    store = prepare_store(node("dataset", "synthetic"), finished.parent / "data")
    bins = make_model(store.spec, head="bins", head_options={"num_bins": 5}).head
    assert bins.loss_floor == pytest.approx(2 * math.log(0.5))
    assert make_model(store.spec, head="gaussian").head.loss_floor == pytest.approx(
        2 * math.log(0.5 * math.sqrt(2 * math.pi))
    )
    assert DiscreteHead.loss_floor == 0


def test_a_head_without_a_floor_is_refused(finished):
    """A floor of 0 in its place would give a wrong law."""
    store = prepare_store(node("dataset", "synthetic"), finished.parent / "data")
    policy = make_policy(store.spec)
    del policy.model.head.loss_floor
    parts = {"dataset": {}, "backbone": {}, "head": {}}
    config = parts | {"data": {"held_out": 0.02, "seed": 3}, "window": 1}
    with pytest.raises(AttributeError, match="loss_floor"):
        measure_losses(policy, config, store, 1)


def test_a_study_is_reported_again_from_its_json(finished, tmp_path):
    shutil.copy(finished / "study.json", tmp_path)
    assert command("scale", "action=report", f"read={tmp_path}/study.json") == 0
    assert json.loads((tmp_path / "study.json").read_text(encoding="utf-8")) == json.loads(
        (finished / "study.json").read_text(encoding="utf-8")
    )
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        page.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png"))) >= 6
        and 'src="data:' in page
    )
    assert 'src="http' not in page and "No law is fitted" in page  # four steps show nothing
    assert "the edge of the values tried" in page and all(
        run["run"] in page for run in runs(finished)
    )


def test_a_study_that_does_not_tune_says_so(finished, tmp_path):
    out = tmp_path / "plain"
    actual = json.loads((finished / "study.json").read_text(encoding="utf-8"))
    out.mkdir()
    actual["study"]["lr"]["rule"], actual["tuned"] = "fixed", {size: {} for size in actual["tuned"]}
    (out / "study.json").write_text(json.dumps(actual), encoding="utf-8")
    assert command("scale", "action=report", f"read={out}/study.json") == 0
    assert "The learning rate was not tuned per size" in (out / "report.html").read_text(
        encoding="utf-8"
    )


def test_a_plan_prints_the_cost_and_starts_nothing(tmp_path, capsys):
    assert small(tmp_path / "out", "action=plan", "probe=2") == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert (
        "10 runs" in printed
        and "hours" in printed
        and "FLOPs" in printed
        and "MB on disk" in printed
    )


def test_a_plan_without_a_probe_has_no_hours(tmp_path, capsys):
    assert small(tmp_path / "out", "action=plan", "probe=0") == 0
    printed = capsys.readouterr().out
    assert "10 runs" in printed and "MB on disk" in printed and "nan" not in printed.lower()
    assert "hours are not estimated with probe=0" in printed


def test_a_failed_run_is_named_with_its_error_and_retried(tmp_path, capsys, monkeypatch):
    train, broken = launch.train, [True]

    def unlucky(config):
        if broken[0] and config["name"] == "w32":
            raise FloatingPointError("loss is not finite")
        return train(config)

    monkeypatch.setattr(launch, "train", unlucky)
    words = (*ONE, "study.lr.rule=fixed", "study.budget.steps=1")
    assert small(tmp_path / "out", *words) == 0
    printed = capsys.readouterr().out
    assert printed.count("failed: ") == 1 and "FloatingPointError: loss is not finite" in printed
    (failed,) = (tmp_path / "out").glob("*/failed.json")
    log = (failed.parent / "log.txt").read_text(encoding="utf-8")
    assert "Traceback" in log and "in unlucky\n" in log
    assert small(tmp_path / "out", *words, "action=status") == 0
    printed = capsys.readouterr().out
    assert (
        "2 runs; 0 planned, 0 running, 1 done, 1 failed" in printed
        and "loss is not finite" in printed
    )
    broken[0], before = False, stamps(tmp_path / "out")
    assert small(tmp_path / "out", *words, "action=retry") == 0
    assert before.items() <= stamps(tmp_path / "out").items() and len(stamps(tmp_path / "out")) == 2


def test_a_study_whose_tuning_runs_failed_is_shown_and_retried(tmp_path, capsys, monkeypatch):
    train = launch.train

    def broken(config):
        raise FloatingPointError("loss is not finite")

    monkeypatch.setattr(launch, "train", broken)
    words = (*ONE, "~study.axes.size.w32")
    assert small(tmp_path / "out", *words) == 1
    assert "every tuning run of size w16 failed" in capsys.readouterr().err
    assert small(tmp_path / "out", *words, "action=status") == 0
    assert "2 failed" in capsys.readouterr().out
    monkeypatch.setattr(launch, "train", train)
    assert small(tmp_path / "out", *words, "action=retry") == 0
    assert len(stamps(tmp_path / "out")) == 2


def test_a_quality_may_be_a_quantile_in_words(tmp_path):
    mine = yaml.safe_load((config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8"))
    mine["axes"]["quality"] = {"all": [], "best": ["data.min_return_quantile=0.9"]}
    store_choices()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        made = train_configs.compose_train_configs(mine)
    actual = {name: config["data"]["min_return_quantile"] for (_, name), config in made.items()}
    assert actual == {"all": 0.0, "best": 0.9}


def test_cells_that_match_an_entry_of_exclude_are_skipped(tmp_path):
    mine = yaml.safe_load((config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8"))
    del mine["axes"]["size"]["w64"]
    mine["axes"]["fraction"] = [1.0, 0.25]
    mine["seeds"] = [3]
    mine["exclude"] = [{"size": "w32", "fraction": 0.25}, {"quality": [0.5], "size": "w16"}]
    store_choices()
    with initialize_config_dir(str(config_folder()), version_base=None):
        cells = grid.Grid(study_options.check_study(mine), tmp_path).cells()
    assert sorted(cells) == [
        ("w16", "0", 0.25, 3),
        ("w16", "0", 1.0, 3),
        ("w32", "0", 1.0, 3),
        ("w32", "0.5", 1.0, 3),
    ]


def test_a_report_that_cannot_be_written_is_known_before_any_run(tmp_path, capsys):
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert small(tmp_path / "out") == 1
    assert "could not be written" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


# options of smoke.yaml that cannot be: {path: (value, message)}
WRONG_OPTIONS = (
    ("axes.depth", [1], "study.axes: expected axes among size, fraction, quality, got 'depth'"),
    ("seeds", [], "study: an empty grid, seeds has no values"),
    ("axes.fraction", [], "study: an empty grid, fraction has no values"),
    ("axes.fraction", [1.5], "study.axes.fraction: expected a list of shares above 0, at most 1"),
    ("axes.fraction", ["a"], "study.axes.fraction: expected a list of shares"),
    ("axes.quality", [1.5], "study.axes.quality: expected a list of quantiles within 0 .. 1"),
    ("seeds", [-1], "study.seeds: expected a list of whole numbers, 0 or more, got [-1]"),
    ("seeds", [0.5], "study.seeds: expected a list of whole numbers"),
    ("windows", 0, "study.windows: expected a whole number above 0, got 0"),
    ("exclude", [{"size": "w17"}], "study.exclude: expected axes and values of the grid"),
    ("exclude", [{"depth": 1}], "study.exclude: expected axes and values of the grid"),
    ("budget.rule", "forever", "study.budget.rule: expected one of steps, compute, got 'forever'"),
    ("budget.steps", 0, "study.budget.steps: rule=steps needs it"),
    ("budget.steps", 1.5, "study.budget.steps: rule=steps needs it, expected a whole number"),
    ("budget", {"rule": "compute", "flops": -1e9}, "study.budget.flops: rule=compute needs it"),
    ("lr.values", [], "study.lr.values: expected a list of rates above 0"),
    ("lr.values", [-1e-3], "study.lr.values: expected a list of rates above 0, got [-0.001]"),
)


@pytest.mark.parametrize(("path", "value", "message"), WRONG_OPTIONS)
def test_an_option_of_a_study_that_cannot_be_is_refused(path, value, message):
    study = yaml.safe_load((config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8"))
    *groups, key = path.split(".")
    options = study
    for group in groups:
        options = options[group]
    options[key] = value
    with pytest.raises(ValueError) as error:
        study_options.check_study(study)
    assert message in str(error.value)


# the command's own faults, and those of studies that are possible by themselves
WRONG = {
    "+study.axes.depth=[1]": "study.axes: expected axes among size, fraction, quality, got 'depth'",
    "study.seeds=[-1]": "study.seeds: expected a list of whole numbers, 0 or more, got [-1]",
    "study.axes.fraction=[0.01,1.0]": "study.axes.fraction: 0.01 of 48 groups is less than one; the least is 0.0208",
    shlex.quote(
        listed(
            "train",
            "dataset._target_=lab.permutation.load "
            "env._target_=lab.permutation.PermutationGame backbone=nano head=discrete "
            "data.held_out=0.2",
        )
    ): "study.axes.quality: 0.5 drops no episode, so many have the return 1",
    shlex.quote(
        listed("train", "dataset=spread dataset.groups=20 team.execution=both data.held_out=0.2")
    ): "study.train: expected team.execution=per_agent, got both",
    "study.exclude=[{quality:[0.0,0.5]}]": "study.exclude: it leaves no run of the grid",
    shlex.quote(listed("axes.size.w16", "backbone.widht=16")): "does not compose",
    shlex.quote(
        r'study.axes.size.w16=["init_from=x-\${seed}"]'
    ): "init_from=x-${seed} would be the same in every run",
    shlex.quote(listed("train", "dataset=synthetic data.held_out=0.0")): "holds none out",
    shlex.quote(
        listed("train", "dataset=synthetic data.held_out=0.2 steps=9")
    ): "study: steps=9 would have no effect; study.budget says steps",
    "action=dance": "action: expected one of plan, run, status, retry, report, got 'dance'",
    "executor=moon": "executor: expected one of local, inline, ray, slurm, got 'moon'",
    "executor=ray address=127.0.0.1:1": "address=127.0.0.1:1: expected a Ray cluster (host:port, as `ray start --head` prints it), got no answer",
    "executor=ray address=mycluster": "address=mycluster: Ray did not answer",
    "executor=slurm workers=1": "expected Slurm's sbatch on this machine, found none",
    "executor=slurm +slurm.cluster=local": "expected workers=<jobs at once> and whole gpus, got 0 and 0",
    "executor=slurm +slurm.cluster=local workers=1 gpus=0.5": "expected workers=<jobs at once> and whole gpus, got 1 and 0.5",
    "executor=slurm +slurm.cluster=local workers=1 +slurm.tiem=3": "slurm: submitit does not take {'timeout_min': 240, 'name': 'decisionllm', 'tiem': 3}",
    "gpus=1": "gpus=1: expected executor=ray or slurm, which assign GPUs",
    "processes=0": "processes, workers, gpus: expected at least 1, 0, 0, got [0, 0, 0.0]",
    "read=/nowhere/study.json": "/nowhere/study.json: expected the study.json of a study",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_fault_is_one_line_and_leaves_the_ledger_untouched(words, tmp_path, capsys):
    assert small(tmp_path / "out", *shlex.split(words)) in (1, 2)
    printed = capsys.readouterr().err
    assert printed.startswith("decisionllm: ") and printed.count("\n") == 1
    assert WRONG[words] in printed or "no key 'study.axes.depth'" in printed
    assert not (tmp_path / "out").exists()


def test_an_edited_run_folder_is_one_clear_error(finished, tmp_path, capsys):
    out = tmp_path / "small"
    shutil.copytree(finished, out)
    job = next(out.glob("*/job.json"))
    job.write_text(
        job.read_text(encoding="utf-8").replace('"window": 3', '"window": 5'), encoding="utf-8"
    )
    before = sorted(path.name for path in out.rglob("*"))
    for action in ("run", "status", "report"):
        assert small(out, f"cache_dir={finished.parent}/data", f"action={action}") == 1
        assert "job.json was edited" in capsys.readouterr().err
    assert sorted(path.name for path in out.rglob("*")) == before


def test_a_worker_process_has_the_same_loss_as_this_process(tmp_path):
    words = (*ONE, "study.lr.rule=fixed", "~study.axes.size.w32")
    for executor in ("inline", "local"):
        assert small(tmp_path / executor, *words, f"executor={executor}", "workers=1") == 0
    (inline,) = runs(tmp_path / "inline")
    (local,) = runs(tmp_path / "local")
    assert inline["run"] == local["run"]
    for measured in ("held_out", "score"):  # one has a single thread, the other all cores
        assert local[measured] == pytest.approx(inline[measured], rel=1e-5)


def test_a_compute_budget_gives_every_size_the_same_flops(tmp_path):
    assert (
        small(
            tmp_path / "out",
            "study.budget.rule=compute",
            "study.budget.flops=1e7",
            *ONE,
            "study.lr.rule=fixed",
        )
        == 0
    )
    actual = {run["size"]: run for run in runs(tmp_path / "out")}
    for run in actual.values():
        assert run["flops"] == pytest.approx(1e7, rel=0.5 / run["steps"])
    assert actual["w16"]["steps"] > actual["w32"]["steps"]


def test_all_mixtures_are_measured_on_the_data_of_the_first_or_of_another_space_on_their_own(
    tmp_path,
):
    mine = yaml.safe_load((config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8"))
    mine["axes"] = {
        "size": {"w8": ["backbone.width=8", "backbone.layers=1"]},
        "fraction": [1.0],
        "quality": {
            "plain": ["dataset=synthetic"],
            "other": ["dataset=synthetic", "dataset.seed=1"],
            "wrong": ["dataset=synthetic", "transform=corrupted", "transform.kind=adversarial"],
            "moves": ["dataset=synthetic-discrete", "head=discrete"],
        },
    }
    mine |= {
        "name": "mine",
        "seeds": [0],
        "lr": {"rule": "fixed"},
        "windows": 64,
        "budget": {"rule": "steps", "steps": 1},
        "evaluate": ["episodes=2"],
    }
    mine["train"] = [
        *(word for word in mine["train"] if word != "dataset=synthetic"),
        "dataset.episodes=60",
        "optim.batch_size=8",
    ]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "mine.yaml").write_text(
        yaml.safe_dump(mine, sort_keys=False), encoding="utf-8"
    )
    words = (
        "study=mine",
        "--config-dir",
        tmp_path,
        "executor=inline",
        "device=cpu",
        f"out={tmp_path}/out",
    )
    assert command("scale", *words) == 0
    actual = {run["mixture"]: run for run in runs(tmp_path / "out")}
    jobs = {name: ledger.load_job(tmp_path / "out" / run["run"]) for name, run in actual.items()}
    assert actual["plain"]["quality"] == 1 != actual["other"]["quality"]
    assert (
        jobs["plain"]["reference"] == jobs["other"]["reference"]
        and jobs["plain"]["data"] != jobs["other"]["data"]
    )
    assert (
        actual["plain"]["quality"] != actual["wrong"]["quality"]
        and jobs["wrong"]["reference"] == jobs["plain"]["reference"]
    )
    assert (
        jobs["moves"]["reference"]
        == jobs["moves"]["train"]["dataset"]
        != jobs["plain"]["reference"]
    )


def test_the_study_of_the_docs_is_complete_without_exclude():
    page = (config_folder().parent / "docs" / "scaling.md").read_text(encoding="utf-8")
    mine = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert "exclude" not in mine
    store_choices()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        configs = train_configs.compose_train_configs(study_options.check_study(mine))
    assert [size for size, _ in configs] == ["small", "medium", "large"]


def test_a_size_of_another_space_is_measured_on_its_own_data(tmp_path):
    mine = yaml.safe_load((config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8"))
    mine["train"].remove("dataset=synthetic")
    mine["axes"] |= {
        "size": {
            "moves": ["dataset=synthetic"],
            "steps": ["dataset=synthetic-discrete", "head=discrete"],
        },
        "quality": [0.0],
    }
    store_choices()
    with initialize_config_dir(str(config_folder()), version_base=None):
        cells = grid.Grid(mine, tmp_path)
    own = {size: config["dataset"] for (size, _), config in cells.configs.items()}
    assert {
        size: cells.reference((size, quality)) for size, quality in cells.stores
    } == own and own["moves"] != own["steps"]


def test_texts_are_those_of_the_cell_whichever_size_is_first(tmp_path):
    mine = yaml.safe_load((config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8"))
    mine["train"].remove("text=goal")
    mine["axes"] |= {"size": {"without": ["text=none"], "with": ["text=goal"]}, "quality": [0.0]}
    store_choices()
    with initialize_config_dir(str(config_folder()), version_base=None):
        cells = grid.Grid(mine, tmp_path)
    read = {size: cells.reference((size, "0"))["text"] for size in cells.sizes}
    assert read == {"without": "none", "with": "goal"}


def test_a_quality_that_trains_on_held_out_episodes_of_another_is_refused(tmp_path):
    mine = yaml.safe_load((config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8"))
    mine["train"].remove("dataset.episodes=1200")
    small, large, other = ["dataset.episodes=60"], ["dataset.episodes=120"], ["dataset.seed=1"]
    mine["axes"] |= {"size": {"w16": ["backbone.width=16"]}, "fraction": [1.0]}
    store_choices()
    with initialize_config_dir(str(config_folder()), version_base=None):
        mine["axes"]["quality"] = {"small": small, "other": [*small, *other]}
        grid.Grid(mine, tmp_path)
        mine["axes"]["quality"] = {"small": small, "large": large}
        with pytest.raises(ValueError, match="quality large trains on . of the 6 episodes that"):
            grid.Grid(mine, tmp_path)


def test_quality_is_the_mean_return_above_the_least_or_the_speed():
    log = SimpleNamespace(returns=np.array([1.0, 2.0, 3.0]), lengths=np.array([10, 20, 30]))
    same = SimpleNamespace(returns=np.ones(3), lengths=log.lengths)
    later = SimpleNamespace(returns=np.array([1.0, 1.0, 0.0]), lengths=2 * log.lengths)
    everything = np.arange(3)
    assert data_quality(log, everything, log, everything) == 1
    assert data_quality(log, [1, 2], log, everything) == 1.5
    assert data_quality(log, [0], log, everything) == 1e-3
    assert data_quality(later, everything, same, everything) == 0.5


@pytest.mark.parametrize(
    "begin",
    [
        "backbone=pretrained backbone.folder={} backbone.lora_rank=2",
        "backbone=nano backbone.width=16 init_from={}",
    ],
)
def test_new_weights_of_a_backbone_or_a_run_make_a_new_run(tmp_path, begin):
    loop = (
        "dataset=synthetic dataset.episodes=60 window=3 optim.batch_size=8 optim.precision=no "
        "data.held_out=0.2"
    )
    cache_dir = f"cache_dir={tmp_path}"
    scratch = "backbone=nano backbone.width=16"
    sizes = (
        listed("axes.size.w32", scratch),
        listed("axes.size.w16", begin.format(tmp_path / "a")),
    )
    actual = []
    for steps in (2, 3):
        first = (
            *loop.split(),
            *scratch.split(),
            f"run={tmp_path}/a",
            f"steps={steps}",
            "fresh=true",
            "log.tracker=none",
            cache_dir,
        )
        assert command("train", *first) == 0
        study = (listed("train", loop), *sizes, *ONE, "study.lr.rule=fixed", cache_dir)
        assert small(tmp_path / "out", *study) == 0
        actual.append({run["run"]: run["size"] for run in runs(tmp_path / "out")})
    assert {actual[0][name] for name in actual[0].keys() & actual[1].keys()} == {"w32"}, (
        "w16 is run again, on the new weights"
    )


def first_item(axis):
    """Return an axis of a study with its first value alone."""
    return dict([*axis.items()][:1])


def test_every_shipped_study_composes_and_has_a_note():
    """Each size with each quantile; of qualities with words of their own each size with the first,
    and each quality with the first size.
    """
    from hydra import initialize_config_dir

    store_choices()
    wrong = []
    for name in STUDIES:
        note = (config_folder() / "study" / f"{name}.yaml").read_text(encoding="utf-8")
        study = study_options.check_study(yaml.safe_load(note))
        sizes, qualities = study["axes"]["size"], study["axes"]["quality"]
        parts = [{}]
        if isinstance(qualities, dict):
            parts = [{"quality": first_item(qualities)}, {"size": first_item(sizes)}]
        cells = {}
        try:
            with initialize_config_dir(str(config_folder()), version_base="1.3"):
                for part in parts:
                    of_part = study | {"axes": study["axes"] | part}
                    cells |= train_configs.compose_train_configs(of_part)
                train_configs.compose("evaluate", ["run=x", *study["evaluate"]])
        except Exception as error:
            wrong.append(f"{name}: {error}")
            continue
        if study["name"] != name or {size for size, _ in cells} != {*sizes}:
            wrong.append(f"{name}: cells {[*cells]}, named {study['name']}")
        if len({quality for _, quality in cells}) != len(qualities):
            wrong.append(f"{name}: cells {[*cells]} of {len(qualities)} qualities")
        if not note.startswith("# ") or f"decisionllm scale study={name}" not in note:
            wrong.append(f"{name}: expected a note with its command")
    assert not wrong, "\n".join(wrong)
