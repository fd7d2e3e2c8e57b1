"""Advice from a law: N and D of a planted optimum, what is outside of the runs, and the run that
narrows the interval.
"""

import json

import numpy as np
import pandas as pd
import pytest

from decisionllm.scaling import advice, law
from tests.conftest import command
from tests.scaling.test_report import planted

TRUE = law.Law(E=0.5, A=200.0, alpha=0.5, B=200.0, beta=0.5)  # symmetric: N = D at the optimum


def table(noise=0.002, seed=0):
    """Five budgets of six runs each, 6 N D FLOPs."""
    budget, size = (
        x.ravel() for x in np.meshgrid(np.geomspace(6e8, 6e12, 5), np.geomspace(0.2, 5, 6))
    )
    N = size * np.sqrt(budget / 6)
    D = budget / 6 / N
    loss = TRUE(N, D) * np.exp(noise * np.random.default_rng(seed).normal(size=30))
    return pd.DataFrame({"params": N, "tokens": D, "loss": loss})


def written(path, runs, flops):
    path.parent.mkdir(exist_ok=True)
    runs.to_csv(path, index=False)
    return json.loads(advice.write(path, flops, say=lambda text: None).read_text())


def test_the_optimum_of_a_planted_law_is_within_its_interval(tmp_path):
    found = written(tmp_path / "runs.csv", table(), 6e12)
    for name in ("N", "D"):
        assert found[name]["low"] < 1e6 < found[name]["high"] and found[name][
            "value"
        ] == pytest.approx(1e6, rel=0.1)
    assert found["loss"]["value"] == pytest.approx(0.5 + 0.2 + 0.2, rel=0.01) and found[
        "cost"
    ] == pytest.approx(6)
    assert found["warnings"] == [] and found["score"] is None and found["next"]["hours"] is None
    assert found["next"]["flops"] <= 6e11 and (tmp_path / "advice.png").is_file()


def test_the_next_run_improves_the_optimum_more_than_a_repeated_run():
    """Root mean square error of log N at two hundred times the largest budget, over ten studies of
    Chinchilla's published law.
    """
    true = law.Law(E=1.69, A=406.4, alpha=0.34, B=410.7, beta=0.28)
    flops = 5.76e23
    errors = []
    budget, size = (
        x.ravel() for x in np.meshgrid(np.geomspace(6e18, 3e21, 6), np.geomspace(0.2, 5, 6))
    )
    N = size * np.sqrt(budget / 6 / 20)
    D = budget / 6 / N

    def best(fit):
        return np.log(law.allocate(fit, flops, 6)[0])

    for seed in range(10):
        noise = np.exp(0.005 * np.random.default_rng(seed).normal(size=37))
        grid = pd.DataFrame(
            {"non_embedding": N, "data_steps": D, "excess": true(N, D) * noise[:36], "quality": 1.0}
        )
        fit = law.fit(N, D, grid["excess"], draws=50)
        following = advice.next_run(
            grid, fit, fit.draws, np.array([best(draw) for draw in fit.draws]), flops, 6
        )
        runs = [
            np.append(grid, [[n, d, true(n, d) * noise[36], 1.0]], 0)
            for n, d in ((following["N"], following["D"]), (N[20], D[20]))
        ]
        errors.append(
            np.array([best(each) for each in (fit, *(law.fit(*x.T, draws=0) for x in runs))])
            - best(true)
        )
    before, after, repeated = np.sqrt(np.mean(np.square(errors), 0))
    assert after < 0.9 * before and repeated > 0.95 * before, (before, after, repeated)


def test_an_optimum_outside_of_the_runs_is_warned_of(tmp_path):
    found = written(tmp_path / "runs.csv", table(), 6e16)
    assert [line.split(" is ")[0] for line in found["warnings"]] == [
        f"{name} = {found[name]['value']:.3g}" for name in ("N", "D")
    ]


def test_a_study_gives_the_score_to_expect_and_the_edges_of_its_sweep(tmp_path, capsys):
    study = planted()
    study["tuned"]["30k"] = {"0.001": 1.0, "0.01": 9.0}
    (tmp_path / "study.json").write_text(json.dumps(study))
    assert command("scale", "action=advise", "flops=6e8", f"read={tmp_path}/study.json") == 0
    found = json.loads((tmp_path / "advice.json").read_text())
    printed = " ".join(capsys.readouterr().out.split())
    score = 100 / (1 + np.exp(3 * (found["loss"]["value"] - 1)))
    assert found["score"]["low"] - 1 < score < found["score"]["high"] + 1
    for words in (
        "parameters, D = ",
        "Score to expect",
        "Next run: N = ",
        "hours at the speed of the nearest size",
        "Warning: The learning rate of 30k is at the edge of the values tried.",
        "Warning: The runs differ in passes over their data",
    ):
        assert words in printed


WRONG = {
    "flops=0": "flops: action=advise needs the compute of a run, expected more than 0, got 0",
    "flops=1e9 read={}/missing.csv": "missing.csv: expected a CSV table with the numbers params, tokens and loss",
    "flops=1e9 read={}/short.csv": "short.csv: expected a CSV table with the numbers params, tokens and loss",
    "flops=1e9 read={}/flat.csv": "expected runs whose loss falls with size and with data, got E 2, A 0, B 0",
    "flops=1e9 read={}/study.json": "study.json: expected the study.json of a study",
}


@pytest.mark.parametrize("words", WRONG)
def test_advice_without_runs_is_refused(words, tmp_path, capsys):
    (tmp_path / "short.csv").write_text("params,tokens\n1,2\n")
    table().assign(loss=2.0).to_csv(tmp_path / "flat.csv", index=False)
    assert command("scale", "action=advise", *words.format(tmp_path).split()) != 0
    assert WRONG[words] in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "advice.json").exists()
