"""AuctionNet's Decision Transformer as published, a bidder to compare with. Its known defects are
kept.

Source: AuctionNet (arXiv 2412.10798), `bidding_train_env/baseline/dt`; the weights are described in
`published/README.md`.
"""

import numpy as np
import torch
from torch.nn import functional as F

from decisionllm.bidding.market.advertisers import DATA
from decisionllm.bidding.market.market import Bidder, BidderContext

RETURN_SCALE = 2000.0  # conversions


class AuctionNetDT(Bidder):
    """Three single-head blocks over (return-to-go, state, action) of the last ten steps; float32.

    Multipliers are raw, possibly negative.

    Defects, with the place where each can be changed:
    - features: it receives the first three steps for the last three, though it was trained with the
      last three.
    - target: it conditions on 8000 conversions; its data holds up to about 60, so that the
      return-to-go hardly decreases.
    - window: it was trained with windows of 20 steps and acts with 10.
    - time steps: trained with all those after 23 called 23; it acts with 24 to 47, whose vectors
      were never trained.
    """

    name = "AuctionNet DT"
    features = "original"

    def __init__(self) -> None:
        self.target = 4 * RETURN_SCALE
        self.window = 10
        with np.load(DATA / "decision_transformer.npz") as file:
            self.mean = file["state_mean"]
            self.deviation = file["state_std"]
            names = [name for name in file if not name.startswith("state_")]
            self.weights = {name: torch.from_numpy(file[name]) for name in names}
        self.reset()

    def reset(self) -> None:
        self.tokens: list[torch.Tensor] = []  # (M, 64) each, of the last steps: three a step

    @torch.inference_mode()
    def act(self, states: np.ndarray, context: BidderContext) -> np.ndarray:
        returns_to_go = (self.target - np.asarray(context.conversions)) / RETURN_SCALE
        standard = (np.asarray(states, np.float64) - self.mean) / self.deviation
        self.tokens.append(self._token("return", returns_to_go[:, None], context.step))
        self.tokens.append(self._token("state", standard, context.step))
        del self.tokens[: 1 - 3 * self.window]  # this step's action is not yet among them
        x = torch.stack(self.tokens, 1)  # (M, n, 64)
        for block in ("transformer.0", "transformer.1", "transformer.2"):
            normed = self._norm(f"{block}.ln1", x)
            parts = ("query", "key", "value")
            q, k, v = (self._linear(f"{block}.attn.{part}", normed) for part in parts)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self._linear(f"{block}.attn.proj", attended)
            inner = F.gelu(self._linear(f"{block}.mlp.0", self._norm(f"{block}.ln2", x)))
            x = x + self._linear(f"{block}.mlp.2", inner)
        multipliers = self._linear("predict_action.0", x[:, -1])  # without a final norm
        self.tokens.append(self._token("action", multipliers, context.step))
        return multipliers[:, 0].double().numpy()

    def _token(self, kind: str, x: np.ndarray | torch.Tensor, step: int) -> torch.Tensor:
        """Embed the return, state or action of a step: (M, size) -> (M, 64)."""
        embedded = self._linear(f"embed_{kind}", torch.as_tensor(x, dtype=torch.float32))
        return self._norm("embed_ln", embedded + self.weights["embed_timestep.weight"][step])

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self._parameters(name))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], *self._parameters(name))

    def _parameters(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
