"""The table of choices: what `head=bins` on the command line or `choice("head", "bins")` builds.

{group: {name: config node}}. `_target_` is the path of a function or class; the other keys are
defaults in place of those of its signature. A neighbour of the core has such a table of its own,
such as `worlds/choices.py`, and so has an installed package, see `registry`.
"""

QWEN2 = "decisionllm.backbones.build.qwen2"
PRETRAINED = "decisionllm.backbones.build.pretrained"
SMOLLM2 = "decisionllm.backbones.build.smollm2"
# Half of the blocks read texts, and the next fifth the trajectory: of SmolLM2 blocks 1 to 15 and 16
# to 21. It understands more sentences that were never trained on, see docs/results.md.
SUMMARY = {"text_layers": 0.5, "layers": 0.7, "text_summary": 4}

CHOICES = {
    "backbone": {
        "nano": dict(_target_=QWEN2, width=128, layers=3, heads=4, kv_heads=2, inner=384),
        "tiny": dict(_target_=QWEN2, width=256, layers=4, heads=4, kv_heads=2, inner=1408),
        "small": dict(_target_=QWEN2, width=512, layers=8, heads=8, kv_heads=2, inner=2816),
        # the shape of Qwen2.5-0.5B
        "base": dict(_target_=QWEN2, width=896, layers=24, heads=14, kv_heads=2, inner=4864),
        "dt": dict(_target_="decisionllm.backbones.build.gpt2"),
        "pretrained": dict(_target_=PRETRAINED),
        "pretrained-summary": dict(_target_=PRETRAINED, dtype="bfloat16", **SUMMARY),
        "smollm2": dict(_target_=SMOLLM2),
        "smollm2-summary": dict(_target_=SMOLLM2, **SUMMARY),
    },
    "text_encoder": {
        "features": dict(_target_="decisionllm.backbones.text_encoders.FrozenFeatures"),
    },
    "tokenizer": {
        "trajectory": dict(_target_="decisionllm.tokenizers.trajectory.TrajectoryTokenizer"),
    },
    "head": {
        "gaussian": dict(_target_="decisionllm.models.heads.GaussianHead"),
        "bins": dict(_target_="decisionllm.models.heads.BinsHead"),
        "discrete": dict(_target_="decisionllm.models.heads.DiscreteHead"),
        "pointer": dict(_target_="decisionllm.models.heads.PointerHead"),
    },
    "objective": {
        "advantage": dict(_target_="decisionllm.models.objectives.advantage.AdvantageWeighted"),
        "likelihood": dict(_target_="decisionllm.models.objectives.likelihood.Likelihood"),
        "max_return": dict(_target_="decisionllm.models.objectives.max_return.MaxReturn"),
    },
    "planner": {
        "value": dict(_target_="decisionllm.models.value_planner.ImaginedValue"),
        "landmarks": dict(_target_="decisionllm.models.landmark_planner.LandmarkPaths"),
    },
    "dataset": {
        "arrays": dict(_target_="decisionllm.datasets.arrays.load", text="${text}"),
        "store": dict(_target_="decisionllm.datasets.arrays.open_folder", text="${text}"),
        "minari": dict(_target_="decisionllm.datasets.minari.load", text="${text}"),
        "lerobot": dict(_target_="decisionllm.datasets.lerobot.load", text="${text}"),
        "huggingface": dict(_target_="decisionllm.datasets.huggingface.load", text="${text}"),
        "mixture": dict(
            _target_="decisionllm.datasets.mixture.load",
            text="${text}",
            text_wordings="${text_wordings}",
        ),
        "embodiments": dict(
            _target_="decisionllm.datasets.mixture.embodiments",
            text="${text}",
            text_wordings="${text_wordings}",
        ),
        "imagined": dict(_target_="decisionllm.policy.imagined_dataset.load", text="${text}"),
        "synthetic": dict(_target_="decisionllm.datasets.synthetic.load", text="${text}"),
        "synthetic-discrete": dict(
            _target_="decisionllm.datasets.synthetic.load", discrete=True, text="${text}"
        ),
    },
    "transform": {
        "unlabelled": dict(
            _target_="decisionllm.datasets.corruptions.remove_actions", seed="${data.seed}"
        ),
        "corrupted": dict(
            _target_="decisionllm.datasets.corruptions.corrupt_column", seed="${data.seed}"
        ),
    },
    "fill_actions": {
        "inverse_dynamics": dict(_target_="decisionllm.models.inverse_dynamics.fill"),
    },
    "augment": {
        "symmetries": dict(_target_="decisionllm.datasets.augment.symmetries"),
    },
    "env": {
        "gymnasium": dict(
            _target_="decisionllm.eval.gymnasium.make",
            task="${oc.select:dataset.task,''}",
            text="${text}",
            categorical="${oc.select:dataset.categorical,null}",
        ),
        "minari": dict(
            _target_="decisionllm.eval.gymnasium.recover",
            minari_id="${dataset.minari_id}",
            goal="${dataset.goal}",
            task_from="${oc.select:dataset.task_from,''}",
            task="${oc.select:dataset.task,''}",
            text="${text}",
            categorical="${oc.select:dataset.categorical,null}",
        ),
        "synthetic": dict(_target_="decisionllm.eval.synthetic.PointEnv", text="${text}"),
        "synthetic-discrete": dict(
            _target_="decisionllm.eval.synthetic.PointEnv", discrete=True, text="${text}"
        ),
    },
    # functions that the package looks up by name, see `registry.FUNCTIONS`
    "model": {
        "per_agent": dict(_target_="decisionllm.models.sequence.SequenceModel"),
    },
    "policy": {
        "baseline": dict(_target_="decisionllm.baselines.d3rlpy.Baseline"),
    },
    "export": {
        "minari": dict(_target_="decisionllm.eval.minari_export.export"),
    },
}
