"""Mixtures: parts keep their episodes, texts and groups, each has its share of a batch, and one run
is evaluated on all of them.
"""

import json
import os
import shutil
import time

import numpy as np
import pytest
from hydra import initialize_config_dir

from decisionllm.command_line import config_folder, store_choices
from decisionllm.commands.data import card
from decisionllm.config import train_config
from decisionllm.datasets import dataset_reader, sampling, store_cache, store_writer, windows
from decisionllm.datasets.arrays import from_episodes
from decisionllm.datasets.batches import open_data
from decisionllm.datasets.mixture import (
    embodiment_config,
    embodiment_parts,
    evaluation_parts,
    load,
    part_shares,
)
from decisionllm.datasets.mixture import open_stores as of_stores
from decisionllm.datasets.mixture_parts import ONLY, parse_parts
from decisionllm.policy import loading
from decisionllm.registry import build
from decisionllm.runs import directory
from decisionllm.runs.directory import part_config
from decisionllm.scaling.run import execute
from decisionllm.scaling.train_configs import compose
from tests.conftest import LOOP, NANO, command, episode, make_store, metrics, node

LABELS = {
    "few": {"dataset": "synthetic", "episodes": 4, "seed": 1},
    "many": {"dataset": "synthetic", "episodes": 16, "seed": 2},
}


@pytest.fixture
def mixed(tmp_path):
    return store_writer.write_store(tmp_path / "mixed", load(parts=LABELS, text="goal"))


def test_parts_keep_their_episodes_and_share_no_group(mixed, tmp_path):
    alone = [
        store_writer.write_store(tmp_path / label, build(part.dataset))
        for label, part in parse_parts(LABELS, {}, "goal").items()
    ]
    assert mixed.part.tolist() == [0] * 4 + [1] * 16 and mixed.group.tolist() == list(range(20))
    assert {label: part.tolist() for label, part in mixed.parts.items()} == {
        "few": [0, 1, 2, 3],
        "many": list(range(4, 20)),
    }
    assert np.array_equal(mixed.observations, np.concatenate([s.observations for s in alone]))
    assert (
        mixed.tasks[mixed.task[5]]
        == alone[1].tasks[alone[1].task[1]]
        == "Walk to the goal in the south."
    )
    assert (
        mixed.info["name"] == "mixture(synthetic, synthetic)"
        and mixed.info["parts"]["many"]["dataset"] == alone[1].info
    )
    assert mixed.info["parts"]["few"]["env"] == node("env", "synthetic", text="goal")


@pytest.mark.parametrize("kind", ["mixture", "embodiments"])
def test_the_env_of_a_part_takes_the_options_of_the_part(kind):
    parts = {
        "run's": {"dataset": "auction"},
        "own": {"dataset": "auction", "text": "none", "observation": "minimal"},
        "wordings": {
            "dataset": "mixture",
            "text_wordings": 3,
            "parts": ["maze2d-umaze"],
            "env": {"env": "maze2d-umaze"},
        },
        "minari": {
            "dataset": "minari",
            "minari_id": "me/maze-v0",
            "goal": "own",
            "text": "constant",
        },
    }
    dataset = node("dataset", kind, parts=parts, text="goal", text_wordings=8)
    if kind == "mixture":
        made = parse_parts(**{key: value for key, value in dataset.items() if key != "_target_"})
    else:
        made = embodiment_parts(dataset)
    envs = {label: part.env for label, part in made.items()}
    assert {label: env["text"] for label, env in envs.items()} == {
        "run's": "goal",
        "own": "none",
        "wordings": "goal",
        "minari": "constant",
    }
    assert [envs[label]["observation"] for label in ("run's", "own")] == ["auctionnet", "minimal"]
    assert (envs["run's"]["frames"], envs["wordings"]["frames"]) == (8, 3)
    assert (envs["minari"]["minari_id"], envs["minari"]["goal"]) == ("me/maze-v0", "own")
    shared = parse_parts({"all": "auction"}, {"text": "constant"}, "goal")
    assert shared["all"].env["text"] == "constant", "an option of all parts"


def of_two(tmp_path):
    """A mixture of 1 episode of 4 steps and 3 of 2, 2 and 8 steps."""
    one = make_store(tmp_path / "one", [episode([1.0] * 4, group=7)])
    three = make_store(
        tmp_path / "three",
        [episode([float(g)] * n, group=g) for g, n in ((7, 2), (8, 2), (9, 8))],
        horizon=60,
    )
    parts = {
        name: {"dataset": "store", "path": str(s.path)}
        for name, s in (("one", one), ("three", three))
    }
    return store_writer.write_store(tmp_path / "mixed", load(parts=parts))


def test_groups_of_stores_are_numbered_anew_and_the_longest_horizon_is_kept(tmp_path):
    mixed = of_two(tmp_path)
    assert mixed.group.tolist() == [0, 1, 2, 3] and mixed.spec.horizon == 60


def test_each_part_has_its_share_of_the_steps_drawn_whatever_its_size(tmp_path):
    mixed = of_two(tmp_path)
    steps, everything = windows.load_steps(mixed), np.arange(4)
    assert sampling.part_weights(mixed, steps, everything, [1, 3]).tolist() == [
        1 / 4,
        3 / 12,
        3 / 12,
        3 / 12,
    ]
    assert sampling.part_weights(mixed, steps, np.array([0, 1, 3]), [1, 2])[[0, 1, 3]].tolist() == [
        1 / 4,
        2 / 10,
        2 / 10,
    ]
    draw = sampling.Sampler(
        steps,
        everything,
        T=1,
        batch_size=4000,
        seed=0,
        weights=sampling.part_weights(mixed, steps, everything, [1, 3]),
    )
    assert abs((mixed.part[draw(0).episodes] == 0).mean() - 0.25) < 0.03


def test_held_out_groups_of_a_part_are_those_of_the_part_alone(mixed, tmp_path):
    alone = store_writer.write_store(
        tmp_path / "alone", build(parse_parts(LABELS, {}, "goal")["many"].dataset)
    )
    for options in (
        {"held_out": 0.25, "seed": 3},
        {"held_out": 0.25, "fraction": 0.5, "min_return_quantile": 0.5},
    ):
        together = sampling.select(mixed, **options)
        apart = sampling.select(alone, **options)
        for both, one in zip(together, apart, strict=True):
            assert (
                (both[both >= 4] - 4).tolist() == one.tolist()
                and (both < 4).any()
                or options["held_out"] == 0
            )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"expected names of datasets, such as \[maze2d-umaze,maze2d-medium\], got \[\]"),
        (["synthetic", "synthetic"], "a label of its own for each"),
        ({"data": "synthetic"}, "a label of its own for each, without a dot and not data"),
        (["synthetc"], "no dataset 'synthetc'; there are"),
        ({"a": None}, "expected each part as a name or as {dataset: name, ...}, got None"),
        ([1, 2], "expected each part as a name or as {dataset: name, ...}, got 1"),
        ([["a"]], r"expected each part as a name or as {dataset: name, ...}, got \['a'\]"),
        ({"a": {"dataset": "synthetic", "episode": 3}}, "dataset=synthetic: no option episode"),
        (
            {"a": {"dataset": "mixture", "parts": ["synthetic"]}},
            "expected datasets that are no mixtures themselves, got a; name its parts here",
        ),
        (
            ["synthetic", "synthetic-discrete"],
            "one space, got synthetic: 2 numbers seen, 2 actions within .* and synthetic-discrete: "
            "2 numbers seen, 5 discrete actions; .* is dataset=embodiments",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        load(parts=parts)


MIXTURE = (
    "dataset=mixture",
    f"dataset.parts={LABELS}".replace("'", ""),
    *(o for o in LOOP if "dataset" not in o),
    *NANO,
    "text=goal",
    "data.held_out=0.25",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on both parts, trained once."""
    folder = tmp_path_factory.mktemp("trained")
    words = (f"run={folder}/run", f"cache_dir={folder}/data", "act.target_quantile=0.75")
    assert command("train", *MIXTURE, *words) == 0
    return folder / "run"


@pytest.mark.slow
def test_one_run_is_evaluated_in_the_env_of_every_part(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    info = directory.read(run)[1]
    made = store_writer.write_store(tmp_path / "mixed", load(parts=LABELS, text="goal"))
    kept = sampling.select(made, held_out=0.25)[0]
    for label, part in made.parts.items():
        assert info["parts"][label]["targets"]["0.75"] == np.quantile(
            made.returns[np.intersect1d(part, kept)], 0.75
        )
    assert info["embodiments"][ONLY]["targets"]["0.75"] == np.quantile(made.returns[kept], 0.75)
    last = metrics(run)[-1]
    assert last["held_out_nll"] == pytest.approx(
        (last["held_out_nll/few"] + last["held_out_nll/many"]) / 2
    )
    assert last["held_out_nll/few"] != last["held_out_nll/many"]

    assert (
        command(
            "evaluate",
            f"run={run}",
            "episodes=2",
            "report=false",
            "baselines=false",
            "+env.goal=south",
        )
        == 0
    )
    short = ("episodes=2", "report=false", "baselines=false", "part=many")
    assert command("evaluate", f"run={run}", *short) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row.get("part") for row in rows][:3] == ["few", "many", "many"]
    assert [row["target_return"] for row in rows[:2]] == [
        info["parts"][part]["targets"]["0.75"] for part in LABELS
    ]
    assert rows[0]["dataset"] == "synthetic" and rows[0]["protocol"] == "goal-text"
    assert command("evaluate", f"run={run}", "part=none-such") == 1
    assert "part: expected one of few, many, got 'none-such'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_without_texts_is_evaluated_without(tmp_path):
    parts = "{bare:{dataset:synthetic,episodes:8,text:none},named:{dataset:synthetic,episodes:8}}"
    words = [word for word in MIXTURE if not word.startswith("dataset.parts")]
    run = tmp_path / "run"
    assert command("train", *words, f"dataset.parts={parts}", f"run={run}") == 0
    short = ("episodes=2", "report=false", "baselines=false")
    assert command("evaluate", f"run={run}", *short) == 0
    assert command("evaluate", f"run={run}", *short, "part=bare", "env=synthetic") == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["part"], row["text"]) for row in rows] == [
        ("bare", "none"),
        ("named", "goal"),
        ("bare", "none"),
    ]


def test_the_weights_of_parts_say_how_often_each_is_drawn(tmp_path):
    weighted = {"few": LABELS["few"] | {"weight": 3}, "many": LABELS["many"]}
    mixture = node("dataset", "mixture", parts=weighted, text_wordings=0)
    assert part_shares(mixture, of_stores(mixture, tmp_path)) == {ONLY: [3.0, 1.0]}
    nested = {"alone": LABELS["few"], "both": mixture | {"dataset": "mixture", "weight": 2}}
    both = node("dataset", "embodiments", parts=nested, text_wordings=0)
    assert part_shares(both, of_stores(both, tmp_path)) == {"alone": [1.0], "both": [6.0, 2.0]}


def test_parts_that_are_never_drawn_are_refused(tmp_path):
    never = {label: part | {"weight": 0} for label, part in LABELS.items()}
    dataset = node("dataset", "embodiments", parts=never, text_wordings=0)
    with pytest.raises(ValueError, match="dataset.parts: expected a weight above 0"):
        part_shares(dataset, of_stores(dataset, tmp_path))


@pytest.mark.slow
def test_a_study_of_a_mixture_scores_the_mean_over_its_parts(trained, tmp_path):
    config, info = directory.read(trained)
    job = {
        "train": config,
        "budget": {"rule": "steps"},
        "reference": config["dataset"],
        "evaluate": {"episodes": 3},
        "windows": 8,
        "data": info["fingerprint"],
    }
    scores = execute(
        tmp_path / "job",
        job,
        cache_dir=config["cache_dir"],
        device="cpu",
        keep=False,
        processes=1,
        threads=1,
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "job" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["part"] for row in rows] == ["few", "many"]
    assert all(
        scores[key] == pytest.approx((rows[0][key] + rows[1][key]) / 2)
        for key in ("score", "low", "high")
    )


def test_a_card_counts_the_parts(tmp_path):
    lines = [line.split("part ")[1].strip() for line in card(of_two(tmp_path)) if "  part " in line]
    assert lines == [
        "one: 1 episodes, 4 steps, return 4.00 on average",
        "three: 3 episodes, 12 steps, return 34.00 on average",
    ]


def test_paraphrased_parts_keep_the_facts_of_their_tasks(tmp_path):
    options = {"source": "regenerate", "steps": 1000}
    mixed = load(
        parts=["maze2d-umaze", "maze2d-medium"],
        options=options,
        text="paraphrased",
        text_wordings=8,
    )
    mazes = {facts["maze"] for facts in mixed.info["wordings"].values()}
    assert mazes == {"umaze", "medium"}
    assert [part["env"]["frames"] for part in mixed.info["parts"].values()] == [8, 8]


def test_options_of_the_parts_may_be_added_to_those_of_an_experiment():
    store_choices()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        words = ["experiment=generalist", "run=x", "name=x", "+dataset.options.source=regenerate"]
        assert compose("train", words)["dataset"]["options"] == {
            "steps_after_goal": 50,
            "source": "regenerate",
        }
        with pytest.raises(ValueError, match="no key 'dataset.optons.source'"):
            compose("train", [*words[:-1], "+dataset.optons.source=regenerate"])


@pytest.mark.slow
def test_an_embodiment_has_its_own_window_in_training_and_when_it_acts(tmp_path):
    parts = {
        "short": {"dataset": "synthetic", "episodes": 12, "window": 2},
        "long": {"dataset": "synthetic-discrete", "episodes": 12, "head": "discrete"},
    }
    dataset = node("dataset", "embodiments", parts=parts, text_wordings=0)
    assert {
        label: part.env["_target_"] for label, part in embodiment_parts(dataset).items()
    }.keys() == parts.keys()
    words = (
        "dataset=embodiments",
        f"dataset.parts={parts}".replace("'", ""),
        *LOOP[2:],
        *NANO,
        "data.held_out=0.25",
    )
    run = tmp_path / "run"
    assert command("train", *words, f"run={run}", f"cache_dir={tmp_path}/data") == 0
    options = directory.read(run)[0]
    c = train_config(options)
    stores = of_stores(c.dataset, c.cache_dir)
    data = {
        name: open_data(embodiment_config(c, name), each, [1.0]) for name, each in stores.items()
    }
    for draw in ("sampler", "validators"):
        made = {name: getattr(each, draw) for name, each in data.items()}
        shapes = {}
        for name, each in made.items():
            sampler = each if draw == "sampler" else next(iter(each.values()))
            shapes[name] = sampler(0).mask.shape
        assert shapes == {"short": (8, 2), "long": (8, 5)}
    loaded = {label: loading.load(run, part=label) for label in parts}
    assert {label: policy.window for label, policy in loaded.items()} == {
        "short": 2,
        "long": 5,
    }
    assert loaded["short"].config["window"] == 2, "the config of the part says so"


def test_the_parts_of_a_mixture_in_an_embodiment_have_its_window(tmp_path):
    parts = {"walks": {"dataset": "mixture", "parts": LABELS, "window": 3}}
    dataset = node("dataset", "embodiments", parts=parts, text_wordings=0)
    parts_of_run = evaluation_parts(dataset, of_stores(dataset, tmp_path))
    assert {label: part["window"] for label, part in parts_of_run.items()} == {"few": 3, "many": 3}
    assert part_config({"window": 20, "text": "none"}, "few", parts_of_run["few"])["window"] == 3


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"window": 3},
            "dataset.parts: few has a window of its own; those of one space share a batch",
        ),
        (
            {"step_discount": 0},
            "dataset.parts: few: expected step_discount above 0 and at most 1, got 0",
        ),
        ({"augment": "mirrors"}, "no augment 'mirrors'; there are symmetries"),
        ({"weight": -1}, "dataset.parts: few: expected a finite weight of 0 or more, got -1"),
        ({"weight": np.nan}, "dataset.parts: few: expected a finite weight of 0 or more, got nan"),
        ({"weight": np.inf}, "dataset.parts: few: expected a finite weight of 0 or more, got inf"),
        (
            {"head": "bins"},
            "dataset.parts: few has a head of its own; those of one space share a model",
        ),
        (
            {"tokenizer": {"hide_actions": 1}},
            "dataset.parts: few has a tokenizer of its own; those of one space share a model",
        ),
        (
            {"env": "gymnasium"},
            "dataset.parts: few: expected env as {OPTION: VALUE}, got 'gymnasium'",
        ),
    ],
)
def test_options_that_a_part_cannot_have_are_refused(own, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        store_cache.prepare_store(
            node(
                "dataset", "mixture", parts=LABELS | {"few": LABELS["few"] | own}, text_wordings=0
            ),
            tmp_path,
        )


@pytest.mark.parametrize("window", [0, 2.5])
def test_the_window_of_an_embodiment_is_a_whole_number(window):
    parts = {"few": LABELS["few"] | {"window": window}}
    with pytest.raises(
        ValueError, match="dataset.parts: few: expected a window of 1 or more steps, got"
    ):
        embodiment_parts(node("dataset", "embodiments", parts=parts, text_wordings=0))


def test_the_texts_and_draws_of_parts_make_no_mixture_again(tmp_path):
    maze = {"dataset": "maze2d-umaze", "steps": 500, "source": "regenerate"}
    opened = []
    for own in (
        {"text": "goal"},
        {"text": "paraphrased", "step_discount": 0.5},
        {"text": "shuffled", "env": {"text": "goal"}},
    ):
        dataset = node(
            "dataset",
            "mixture",
            parts={"one": maze | own, "two": maze | {"seed": 1}},
            text="goal",
            text_wordings=0,
        )
        mixed = store_cache.prepare_store(dataset, tmp_path)
        made = load(**{k: v for k, v in dataset.items() if k != "_target_"})
        opened.append(mixed)
        assert mixed.info == made.info
        assert (
            mixed.fingerprint == store_writer.write_store(tmp_path / own["text"], made).fingerprint
        )
    assert (
        len({mixed.path for mixed in opened}) == 1
        and len({mixed.fingerprint for mixed in opened}) == 2
    )
    assert (
        opened[1].info["parts"]["one"]["step_discount"] == 0.5
        and opened[2].info["parts"]["one"]["env"]["text"] == "goal"
    )


def test_parts_of_one_size_and_other_layouts_are_refused(tmp_path):
    """Three numbers are goal, pos in one log and pos, goal in the other."""
    log = [episode([1, 1, 1], S=3) for _ in range(4)]
    for name, layout in (
        ("a", [("goal", 1), ("pos", 2)]),
        ("b", [("pos", 2), ("goal", 1)]),
        ("c", None),
    ):
        from_episodes(log, tmp_path / name, name=name, observation_parts=layout)

    def mixed(*names):
        target = "decisionllm.datasets.arrays.open_folder"
        return load(
            parts={name: {"_target_": target, "path": str(tmp_path / name)} for name in names}
        )

    with pytest.raises(
        ValueError,
        match=r"expected one layout, got observation_parts .*'goal', 1.* of a and .*'pos', 2.* of b",
    ):
        mixed("a", "b")
    assert mixed("c", "a").info["observation_parts"] == [["goal", 1], ["pos", 2]], (
        "a log that states none is taken as it is"
    )


def test_parts_of_a_mixture_are_taken_from_their_stores(tmp_path, monkeypatch):
    data = node(
        "dataset",
        "mixture",
        parts=["maze2d-umaze", "maze2d-open"],
        options={"steps": 500, "source": "regenerate"},
        text="goal",
    )
    made = store_cache.prepare_store(data, tmp_path / "a")
    assert len(list((tmp_path / "a" / "stores").iterdir())) == 3, (
        "one of each part, and the mixture"
    )
    for folder in (tmp_path / "a" / "stores").glob("mixture-*"):
        shutil.rmtree(folder)
    monkeypatch.setattr("decisionllm.worlds.maze2d.dataset.generate", None)  # a call would fail
    again = store_cache.prepare_store(data, tmp_path / "a")
    monkeypatch.undo()
    alone = store_writer.write_store(tmp_path / "b", build(dataset_reader.data_node(data)))
    assert made.fingerprint == again.fingerprint == alone.fingerprint


def test_a_part_that_is_made_again_makes_another_mixture(tmp_path):
    path = tmp_path / "mine"
    data = node("dataset", "mixture", parts={"mine": {"dataset": "store", "path": str(path)}})
    for reward in (1.0, 2.0):
        make_store(path, [episode([reward])])
        # a clock too coarse to tell two writes apart must not decide this test
        later = time.time_ns() + 10**9 * int(reward)
        os.utime(path / "card.json", ns=(later, later))
        assert store_cache.prepare_store(data, tmp_path / "cache").rewards.tolist() == [reward]
    store_cache.prepare_store(data, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "stores").iterdir())) == 2, "unchanged, it is found again"


def test_parts_that_are_named_in_another_order_keep_their_episodes(tmp_path):
    """One store has both orders."""
    shares = {}
    for labels in (("few", "many"), ("many", "few")):
        parts = {label: LABELS[label] for label in labels}
        mixed = store_cache.prepare_store(node("dataset", "mixture", parts=parts), tmp_path)
        shares[labels] = {label: len(episodes) for label, episodes in mixed.parts.items()}
    assert shares["few", "many"] == shares["many", "few"] == {"few": 4, "many": 16}


def test_a_part_whose_reader_has_a_new_version_makes_another_mixture(tmp_path, monkeypatch):
    from decisionllm.datasets import arrays

    path = tmp_path / "mine.npz"
    np.savez(
        path,
        observations=np.zeros((4, 1)),
        actions=np.arange(4.0)[:, None],
        rewards=np.ones(4),
        terminals=np.array([0, 1, 0, 1]),
    )
    parts = {"mine": {"dataset": "arrays", "path": str(path)}}
    data = node("dataset", "mixture", parts=parts)
    store_cache.prepare_store(data, tmp_path / "cache")
    monkeypatch.setattr(
        arrays, "READER", dataset_reader.DatasetReader(version=99, files=arrays.files)
    )
    store_cache.prepare_store(data, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "stores").glob("mixture-*"))) == 2
