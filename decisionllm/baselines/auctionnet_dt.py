"""AuctionNet's own Decision Transformer as it was published, a bidder to be compared with: the stock DT, every quirk of it kept.

Source: AuctionNet (arXiv 2412.10798), `bidding_train_env/baseline/dt`; the weights are told of in `auctionnet/README.md`.
"""

import numpy as np
import torch
from torch.nn import functional as F

from decisionllm.envs.auction.market import DATA

RETURN_SCALE = 2000.0  # conversions


class StockDT:
    """Three blocks of one head over (return-to-go, state, action) of the last ten steps; its answer is raw and may be negative. float32.

    What a Decision Transformer should not do and this one does, by where it can be changed:
    - features: it is shown the first three steps for the last three, though it was trained with the last three.
    - target: it asks for 8000 conversions; its data holds up to about 60, so that what is still to come hardly counts down.
    - window: it was trained with windows of 20 steps and is used with 10.
    - time steps: trained with all those after 23 called 23; used with their own numbers, 24 to 47, whose vectors were never trained.
    """

    name = "DT (stock)"

    def __init__(self, *, features="original", target=4 * RETURN_SCALE, window=10):
        self.features, self.target, self.window = features, target, window
        with np.load(DATA / "stock_dt.npz") as file:
            self.mean, self.deviation = file["state_mean"], file["state_std"]
            self.weights = {name: torch.from_numpy(file[name]) for name in file if not name.startswith("state_")}
        self.reset()

    def reset(self):
        self.tokens = []  # (M, 64) each, of the last steps: three a step

    @torch.inference_mode()
    def act(self, states, seats):
        returns_to_go = (self.target - np.asarray(seats.conversions)) / RETURN_SCALE
        standard = (np.asarray(states, np.float64) - self.mean) / self.deviation
        now = self.token("return", returns_to_go[:, None], seats.step), self.token("state", standard, seats.step)
        self.tokens = [*self.tokens, *now][1 - 3 * self.window :]  # this step's action is not yet among them
        multipliers = self.linear("predict_action.0", self.read(torch.stack(self.tokens, 1)))
        self.tokens.append(self.token("action", multipliers, seats.step))
        return multipliers[:, 0].double().numpy()

    def token(self, kind, x, step):
        """What a step holds of this kind: (M, size) -> (M, 64)"""
        embedded = self.linear(f"embed_{kind}", torch.as_tensor(x, dtype=torch.float32))
        return self.norm("embed_ln", embedded + self.weights["embed_timestep.weight"][step])

    def read(self, x):
        """Tokens (M, n, 64) -> the last one as the transformer reads it, without the usual norm at the end: (M, 64)"""
        for block in ("transformer.0", "transformer.1", "transformer.2"):
            normed = self.norm(f"{block}.ln1", x)
            q, k, v = (self.linear(f"{block}.attn.{part}", normed) for part in ("query", "key", "value"))
            x = x + self.linear(f"{block}.attn.proj", F.scaled_dot_product_attention(q, k, v, is_causal=True))
            inner = F.gelu(self.linear(f"{block}.mlp.0", self.norm(f"{block}.ln2", x)))
            x = x + self.linear(f"{block}.mlp.2", inner)
        return x[:, -1]

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
