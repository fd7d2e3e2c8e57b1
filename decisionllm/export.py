"""`decisionllm export`: a trained policy as ONNX graphs, for programs without torch (see `policy.exported`), or its language model alone."""

import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from decisionllm.backbones.merged import save_merged
from decisionllm.config import one_of
from decisionllm.files import absent, explained, sealed
from decisionllm.policy import checkpoint
from decisionllm.policy.exported import FORMAT, ExportedPolicy
from decisionllm.policy.policy import Policy
from decisionllm.schema import History

ALSO = ("name", "env", "observation", "context_features", "reward", "text")  # of the dataset's info
BASELINE = "run: expected a run of `decisionllm train`, got a baseline"
EXTERNAL = 1_500_000_000  # bytes of weights beyond which they are a file beside the graph


def export(config: dict[str, Any]) -> None:
    """Export a run (see configs/export.yaml)."""
    one_of("format", config["format"], ("onnx", "transformers"))
    run = Path(config["run"])
    path = Path(config["path"] or run / config["format"])
    if config["format"] == "transformers":
        given = [f"act.{name}" for name, value in config["act"].items() if value is not None]
        given += ["part"] if config["part"] is not None else []
        if given:
            raise ValueError("format=transformers: expected no part and no act, which are of a policy, got " + ", ".join(given))
        return language_model(run, path)
    policy, _, run_info = checkpoint.load(run, part=config["part"], **config["act"])
    write(policy, path, run_info, name=run.name)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"exported {run} to {path}, {size / 1e6:.1f} MB; over 20 random histories its actions differ from policy.act "
          f"by at most {difference(policy, path):.1e} of their range", flush=True)  # fmt: skip


def language_model(run: Path, path: Path) -> None:
    """Write the language model of a run as a folder that transformers reads alone, see `merged.save_merged`.

    Args:
        run: the run directory.
        path: a new folder.

    Raises:
        FileExistsError: the path is there already.
        ValueError: a baseline, or the run is damaged.
    """
    path = absent(path)
    config, info = checkpoint.read(run)
    if "policy" in config:
        raise ValueError(BASELINE)
    backbone = checkpoint.load_model(run, config, info).backbone
    with sealed(path) as partial:
        apart = save_merged(backbone, partial)
    size = sum(file.stat().st_size for file in path.iterdir())
    merged = ", adapters merged in float32" if backbone.tune == "lora" else ""
    print(f"exported the language model of {run} to {path}, {size / 1e6:.1f} MB{merged}; loaded by transformers alone its hidden "
          f"states differ from the run's by at most {apart:.1e} of the largest", flush=True)  # fmt: skip


def write(policy: Any, path: str | Path, run_info: dict[str, Any], *, name: str = "") -> None:
    """Write a policy as a folder for `ExportedPolicy`, in place of an earlier export.

    Args:
        policy: a `Policy` of a single agent; its weights become float32, and its adapters are merged.
        path: a new folder.
        run_info: of the run (run.json).
        name: of the run.

    Raises:
        ImportError: the exporter is not installed.
        ValueError: the policy cannot be exported, or the folder holds something else.
    """
    path = Path(path)
    with explained("export needs onnx and onnxscript: pip install 'decisionllm[onnx]'", ImportError, raised=ImportError):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    check(policy)
    if path.exists() and not (path / "policy.json").is_file():
        raise ValueError(f"path: expected a new folder or an earlier export, got {path}, which holds something else")
    model, dataset = policy.model.float(), run_info["dataset"]
    if model.backbone.tune == "lora":
        model.backbone.model.merge_adapter()
    decoder, own = Decoder(policy), policy.resolve_targets([None])[0]
    info = {
        "format": FORMAT, "run": name, "spec": asdict(model.spec), "window": policy.window, "stride": policy.stride,
        "horizon": None if model.tokenizer.timesteps is None else model.spec.horizon,
        "target_return": None if np.isnan(own) else float(own), "return_horizon": policy.return_horizon,
        "cache": list(decoder.nothing.shape), "dataset": {key: dataset[key] for key in ALSO if key in dataset},
        "fingerprint": run_info.get("fingerprint"), "versions": checkpoint.versions(),
    }  # fmt: skip
    with sealed(path) as partial:
        graph(decoder, decoder.example(), ["actions", "return_to_go", "longer_cache"], partial / "policy.onnx")
        if dataset.get("text", "none") != "none":
            ids = torch.arange(6).view(2, 3) % model.backbone.config.vocab_size
            graph(TextReader(decoder), {"text_ids": (ids, (0, 1))}, ["cache"], partial / "text.onnx")
            model.backbone.tokenizer.backend_tokenizer.save(str(partial / "tokenizer.json"))
        (partial / "policy.json").write_text(json.dumps(info, indent=1))


def check(policy: Any) -> None:
    """Raise a ValueError that says why a policy cannot be exported, if it cannot."""
    if not isinstance(policy, Policy):
        raise ValueError(BASELINE)
    model, backbone = policy.model, policy.model.backbone
    for wrong, expected, got in (
        (model.team is not None, "a policy of a single agent", "team.execution=joint or both"),
        (bool(model.spec.entity_schema), "observations without entities", "an entity schema"),
        (policy.decode == "sample", "act.decode=mode or mean", "sample"),
        (bool(policy.planning_horizon), "act.planning_horizon=0", policy.planning_horizon),
        (backbone.features is not None, "text_encoder=none", "a text encoder"),
        (backbone.layout is None, "a backbone like Llama, Qwen or GPT-2", type(backbone.core).__name__),
    ):
        if wrong:
            raise ValueError(f"export: expected {expected}, got {got}; this policy acts through `decisionllm serve`")


def graph(module: nn.Module, inputs: dict[str, tuple[Tensor, tuple[int, ...]]], outputs: list[str], path: Path) -> None:
    """Write a module as an ONNX file. inputs: example and free dimensions of each argument by its name."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that no policy needs
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(
            module.eval(), (), path, kwargs={name: example for name, (example, _) in inputs.items()}, dynamo=True, verbose=False,
            input_names=list(inputs), output_names=outputs,
            dynamic_shapes={name: dict.fromkeys(free, Dim.DYNAMIC) for name, (_, free) in inputs.items()},
            external_data=sum(x.nbytes for x in module.state_dict().values()) > EXTERNAL,
        )  # fmt: skip


class Decoder(nn.Module):
    """One decision as a function of tensors: its token is read after the keys and values of the window so far."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model, self.decode = policy.model, policy.decode
        none = torch.zeros(1, 0, dtype=torch.long)
        keys = torch.stack(self.model.backbone.read_text(none, none.bool()).keys)  # (layers, 1, G, 0, d)
        reads = 2 if self.model.predicts_return else 1  # with the null return, to predict the maximum; with the return
        self.nothing = torch.stack([keys, keys], 1).expand(reads, -1, -1, -1, -1, -1, -1)

    def example(self) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        """Random inputs by name, with the dimensions that may have any size: N episodes, n previous actions, M keys."""
        spec, (R, layers, _, _, G, _, d) = self.model.spec, self.nothing.shape
        N, n, M = 3, 2, 5
        masks = {"action_masks": (torch.ones(N, spec.num_actions, dtype=torch.bool), (0,))} if spec.num_actions else {}
        return {
            "observations": (torch.randn(N, spec.observation_dim), (0,)), "returns_to_go": (torch.rand(N), (0,)),
            "timesteps": (torch.ones(N, dtype=torch.long), (0,)), "previous_actions": (torch.zeros(N, n, spec.action_dim), (0, 1)),
            "cache": (torch.randn(R, layers, 2, N, G, M, d), (3, 5)), **masks,
        }  # fmt: skip

    def forward(
        self, observations: Tensor, returns_to_go: Tensor, timesteps: Tensor, previous_actions: Tensor, cache: Tensor,
        action_masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Decide.

        Args:
            observations: (N, S), raw units.
            returns_to_go: (N,), raw units; NaN: the predicted maximum return.
            timesteps: (N,) int64, steps since the start of the episode.
            previous_actions: (N, n, A), raw units; n = 1: of the step before, n = 0: the window begins here.
            cache: (R, layers, 2, N, G, M, d), keys and values of the text and the window before.
            action_masks: (N, C) bool, of discrete actions.

        Returns:
            actions (N, A), the return-to-go that they are conditioned on (N,), and the longer cache.
        """
        model, caches = self.model, []
        if model.predicts_return:
            unknown = torch.zeros_like(returns_to_go)
            tokens = self.tokens(observations, unknown, timesteps, previous_actions, unknown > 0)
            hidden, longer = model.backbone.read_after(tokens, cache[0])
            caches.append(longer)
            returns_to_go = torch.where(returns_to_go.isnan(), model.predict_return(hidden.float()), returns_to_go)
        tokens = self.tokens(observations, returns_to_go, timesteps, previous_actions)
        hidden, longer = model.backbone.read_after(tokens, cache[-1])
        actions = model.choose(hidden.float(), action_masks, decode=self.decode)
        return actions, returns_to_go, torch.stack([*caches, longer])

    def tokens(
        self, observations: Tensor, returns_to_go: Tensor, timesteps: Tensor, previous_actions: Tensor,
        return_given: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The tokens that a decision adds: the previous action, the return-to-go, the observation, (N, n + k - 1, D)."""
        read, units, n = self.model.tokenizer, self.model.normalizer, previous_actions.shape[1]
        o, r, t = units.observations(observations)[:, None], units.returns_to_go(returns_to_go)[:, None], timesteps[:, None]
        a, earlier = units.actions(previous_actions), (t - 1).clamp(min=0).expand(-1, n)
        before = read(r.expand(-1, n), o.expand(-1, n, -1), a, earlier)[:, read.tokens - 1 :: read.tokens]
        now = read(r, o, torch.zeros_like(o[..., :1]).expand(-1, -1, a.shape[-1]), t, return_given)[:, :-1]
        return torch.cat([before, now], 1)


class TextReader(nn.Module):
    """Token ids of texts (N, L), none of them padding, -> keys and values (layers, 2, N, G, L, d)."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.backbone, self.nothing = decoder.model.backbone, decoder.nothing[0]

    def forward(self, text_ids: Tensor) -> Tensor:
        past = self.nothing.expand(-1, -1, text_ids.shape[0], -1, -1, -1)
        _, cache = self.backbone.read_after(self.backbone.embed(text_ids), past)
        return cache


def difference(policy: Policy, path: str | Path, *, count: int = 20) -> float:
    """Largest difference of the actions of an exported policy from `Policy.act` over random histories, as a share of their range."""
    rng, spec, units = np.random.default_rng(0), policy.model.spec, policy.model.normalizer
    mean, scale = units.observation_mean.numpy(), units.observation_scale.numpy()
    low, high = np.array(spec.low or [0.0]), np.array(spec.high or [spec.num_actions - 1.0])
    histories = []
    for t in rng.integers(min(spec.horizon, 2 * policy.window), size=count):
        observations = (mean + scale * rng.standard_normal((t + 1, len(mean)))).astype(np.float32)
        actions = rng.uniform(low, high, (t, spec.action_dim)).round(0 if spec.num_actions else 6)
        histories.append(History(observations, actions, rng.random(t)))
    return float((np.abs(ExportedPolicy(path).act(histories) - policy.act(histories)) / (high - low)).max())
