"""A policy as ONNX graphs, which `ExportedPolicy` reads without torch."""

import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from decisionllm.backbones.blocks import BlockStack, TokenPlaces, plan_attention
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.layouts import ALL
from decisionllm.datasets.action_range import action_widths
from decisionllm.export.folders import explain_write_errors
from decisionllm.files import atomic_folder, check_writable, explain_errors
from decisionllm.policy.exported_policy import FORMAT, ExportedPolicy
from decisionllm.policy.policy import Policy
from decisionllm.runs import directory
from decisionllm.schema import History, Json

# kept of the dataset's info
ALSO = ("name", "env", "observation", "context_features", "reward", "text")
EXTERNAL = 1_500_000_000  # bytes of weights beyond which they are a file beside the graph


def write_onnx(
    policy: Policy,
    path: str | Path,
    run_info: Json,
    *,
    name: str = "",
) -> None:
    """Write a policy as a folder for `ExportedPolicy`, in place of an earlier export.

    Args:
        policy: a `Policy` of a single agent; its weights become float32, and its adapters are
            merged.
        path: a new folder.
        run_info: of the run (run.json).
        name: of the run.

    Raises:
        ImportError: the exporter is not installed.
        ValueError: the policy cannot be exported, or the folder holds something else.
    """
    path = Path(path)
    with explain_errors(
        "export needs onnx and onnxscript: pip install -e '.[onnx]'",
        ImportError,
        raised=ImportError,
    ):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    check_exportable(policy)
    if path.exists() and not (path / "policy.json").is_file():
        raise ValueError(
            f"path: expected a new folder or an earlier export, got {path}, which holds "
            "something else"
        )
    check_writable(path.parent, option="path=...")
    model = policy.model.float()
    if model.backbone.text_layers:  # whose kept states of texts become float32 too
        model.backbone.cut_off(model.backbone.text_layers, model.backbone.summary)
        model.backbone.forget_texts()
    if model.backbone.tune == "lora":
        model.backbone.model.merge_adapter()
    decoder = Decoder(policy)
    info = describe_policy(policy, decoder, run_info, name)
    with explain_write_errors(path), atomic_folder(path) as partial:
        outputs = ["actions", "return_to_go", "longer_cache"]
        write_graph(decoder, decoder.example(), outputs, partial / "policy.onnx")
        if directory.has_texts(run_info):
            write_text_reader(decoder, partial)
        (partial / "policy.json").write_text(json.dumps(info, indent=1), encoding="utf-8")


def describe_policy(policy: Policy, decoder: "Decoder", run_info: Json, name: str) -> Json:
    """Return the content of policy.json, which `ExportedPolicy` reads beside the graphs."""
    model = policy.model
    dataset = run_info["dataset"]
    (target,) = policy.resolve_targets([None])
    return {
        "format": FORMAT,
        "run": name,
        "spec": asdict(model.spec),
        "window": policy.window,
        "stride": policy.stride,
        "horizon": None if model.tokenizer.timesteps is None else model.spec.horizon,
        "target_return": None if np.isnan(target) else float(target),
        "return_horizon": policy.return_horizon,
        "cache": list(decoder.nothing.shape),
        "dataset": {key: dataset[key] for key in ALSO if key in dataset},
        "fingerprint": run_info.get("fingerprint"),
        "versions": directory.versions(),
    }


def write_text_reader(decoder: "Decoder", folder: Path) -> None:
    """Write the graph that reads task texts, and the tokenizer."""
    backbone = decoder.model.backbone
    ids = torch.arange(6).view(2, 3) % backbone.config.vocab_size
    inputs = {"text_ids": Input(ids, (0, 1))}
    reader = CutTextReader(backbone) if backbone.text_layers else TextReader(decoder)
    write_graph(reader, inputs, ["cache"], folder / "text.onnx")
    backbone.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


def check_exportable(policy: Policy) -> None:
    """Raise a ValueError that says why a policy cannot be exported, if it cannot."""
    model = policy.model
    backbone = model.backbone
    architecture = type(backbone.core).__name__
    for wrong, expected, got in (
        (model.team is not None, "a policy of a single agent", "team.execution=joint or both"),
        (bool(model.spec.entity_schema), "observations without entities", "an entity schema"),
        (policy.decode == "sample", "act.decode=mode or mean", "sample"),
        (bool(policy.planning_horizon), "act.planning_horizon=0", policy.planning_horizon),
        (
            backbone.features is not None and not backbone.text_layers,
            "text_encoder=none",
            "a text encoder",
        ),
        (backbone.layout is None, "a backbone like Llama, Qwen or GPT-2", architecture),
    ):
        if wrong:
            raise ValueError(
                f"export: expected {expected}, got {got}; this policy acts through "
                "`decisionllm serve`"
            )


class Input(NamedTuple):
    """An argument of a graph: an example, and which of its dimensions may have any size."""

    example: Tensor
    free: tuple[int, ...]


def write_graph(
    module: nn.Module, inputs: dict[str, Input], outputs: list[str], path: Path
) -> None:
    """Write a module as an ONNX file."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages unused here
    size = sum(x.nbytes for x in module.state_dict().values())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(
            module.eval(),
            (),
            path,
            kwargs={name: each.example for name, each in inputs.items()},
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes={name: dict.fromkeys(x.free, Dim.DYNAMIC) for name, x in inputs.items()},
            external_data=size > EXTERNAL,
            dynamo=True,
            verbose=False,
        )


class Decoder(nn.Module):
    """One decision as a function of tensors.

    Its token is read after the keys and values of the window so far.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self.decode = policy.decode
        none = torch.zeros(1, 0, dtype=torch.long)
        prefix = self.model.backbone.read_text(none, none.bool())
        # (layers, 1, G, 0, d); a summary has tokens of no words too
        keys = torch.stack(prefix.keys)[:, :, :, :0]
        # To predict the maximum return, a decision is read twice: with
        # the null return, and with the predicted one.
        reads = 2 if self.model.predicts_return else 1
        self.nothing = torch.stack([keys, keys], 1).expand(reads, -1, -1, -1, -1, -1, -1)

    def example(self) -> dict[str, Input]:
        """Random inputs by name, for N episodes, n previous actions, M keys."""
        spec = self.model.spec
        R, layers, _, _, G, _, d = self.nothing.shape
        N, n, M = 3, 2, 5
        inputs = {
            "observations": Input(torch.randn(N, spec.observation_dim), (0,)),
            "returns_to_go": Input(torch.rand(N), (0,)),
            "timesteps": Input(torch.ones(N, dtype=torch.long), (0,)),
            "previous_actions": Input(torch.zeros(N, n, spec.action_dim), (0, 1)),
            "cache": Input(torch.randn(R, layers, 2, N, G, M, d), (3, 5)),
        }
        if spec.num_actions:
            masks = torch.ones(N, spec.num_actions, dtype=torch.bool)
            inputs["action_masks"] = Input(masks, (0,))
        return inputs

    def forward(
        self,
        observations: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        previous_actions: Tensor,
        cache: Tensor,
        action_masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decide.

        Args:
            observations: (N, S), raw units.
            returns_to_go: (N,), raw units; NaN: the predicted maximum return.
            timesteps: (N,) int64, steps since the start of the episode.
            previous_actions: (N, n, A), raw units; n = 1: of the step before, n = 0: the window
                begins here.
            cache: (R, layers, 2, N, G, M, d), keys and values of the text and the window before.
            action_masks: (N, C) bool, of discrete actions.

        Returns:
            actions (N, A), the return-to-go (N,) that they are conditioned on, the longer cache.
        """
        model = self.model
        caches = []
        if model.predicts_return:
            unknown = torch.zeros_like(returns_to_go)
            tokens = self.tokens(observations, unknown, timesteps, previous_actions, unknown > 0)
            hidden, longer = model.backbone.read_after(tokens, cache[0])
            caches.append(longer)
            predicted = model.predict_return(hidden.float())
            returns_to_go = torch.where(returns_to_go.isnan(), predicted, returns_to_go)
        tokens = self.tokens(observations, returns_to_go, timesteps, previous_actions)
        hidden, longer = model.backbone.read_after(tokens, cache[-1])
        actions = model.choose(hidden.float(), action_masks, decode=self.decode)
        return actions, returns_to_go, torch.stack([*caches, longer])

    def tokens(
        self,
        observations: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        previous_actions: Tensor,
        return_given: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens that a decision adds, (N, n + k - 1, D).

        They are the previous action, the return-to-go and the observation.
        """
        tokenizer = self.model.tokenizer
        units = self.model.normalizer
        n = previous_actions.shape[1]
        o = units.observations(observations)[:, None]  # (N, 1, S)
        r = units.returns_to_go(returns_to_go)[:, None]  # (N, 1)
        t = timesteps[:, None]
        a = units.actions(previous_actions)
        earlier = (t - 1).clamp(min=0).expand(-1, n)
        previous = tokenizer(r.expand(-1, n), o.expand(-1, n, -1), a, earlier)
        previous = previous[:, tokenizer.tokens - 1 :: tokenizer.tokens]  # the action tokens
        no_action = torch.zeros_like(o[..., :1]).expand(-1, -1, a.shape[-1])
        current = tokenizer(r, o, no_action, t, return_given)[:, :-1]
        return torch.cat([previous, current], 1)


class TextReader(nn.Module):
    """Token ids of texts (N, L) without padding -> keys and values (layers, 2, N, G, L, d)."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.backbone = decoder.model.backbone
        self.nothing = decoder.nothing[0]

    def forward(self, text_ids: Tensor) -> Tensor:
        past = self.nothing.expand(-1, -1, text_ids.shape[0], -1, -1, -1)
        _, cache = self.backbone.read_after(self.backbone.embed(text_ids), past)
        return cache


class CutTextReader(nn.Module):
    """The same of a cut language model, whose lower blocks read texts alone: its own forward here,
    in place of transformers', of which their states are kept.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, text_ids: Tensor) -> Tensor:
        backbone = self.backbone
        layout = backbone.layout
        assert layout is not None, "refused by check_exportable"
        lower = slice(0, backbone.text_layers)
        kinds = backbone.kinds[lower]
        slots = torch.arange(text_ids.shape[1])[None]
        places = TokenPlaces(
            positions=slots,
            slots=slots,
            num_keys=text_ids.shape[1],
            text_mask=slots[:, :0],  # nothing stands before a text
            output_positions=ALL,
        )
        plan = plan_attention(places, {kind.window for kind in kinds})
        blocks = layout.blocks(backbone.core)[lower]
        stack = BlockStack(layout, backbone.core, blocks, kinds, plan, training=False)
        states = stack.enter(backbone.core.get_input_embeddings()(text_ids))
        for i in range(len(blocks)):
            states, _, _ = stack.run_block(i, states)
        prefix = backbone.read_states(states, torch.ones_like(text_ids, dtype=torch.bool))
        return torch.stack([torch.stack(prefix.keys), torch.stack(prefix.values)], 1)


def measure_difference(policy: Policy, path: str | Path) -> float:
    """Measure the largest difference of an exported policy's actions from `Policy.act`.

    Over 20 random histories, as a share of the range of the actions. A policy with texts reads some
    of those it was trained on.
    """
    exported = ExportedPolicy(path)
    tasks = [""]
    if exported.text_graph is not None:
        tasks = policy.info.get("tasks", [])[:4] or ["Go to the goal."]
    rng = np.random.default_rng(0)
    spec, units = policy.model.spec, policy.model.normalizer
    mean = units.observation_mean.numpy()
    scale = units.observation_scale.numpy()
    low, high = np.array([0.0]), np.array([spec.num_actions - 1.0])
    if not spec.num_actions:
        low, high = units.low.numpy().astype(float), units.high.numpy().astype(float)
    digits = 0 if spec.num_actions else 6
    histories: list[History] = []
    for t in rng.integers(min(spec.horizon, 2 * policy.window), size=20):
        observations = mean + scale * rng.standard_normal((t + 1, len(mean)))
        actions = rng.uniform(low, high, (t, spec.action_dim)).round(digits)
        task = tasks[len(histories) % len(tasks)]
        histories.append(
            History(observations.astype(np.float32), actions, rng.random(t), task=task)
        )
    differences = np.abs(exported.act(histories) - policy.act(histories))
    return float((differences / action_widths(low, high)).max())
