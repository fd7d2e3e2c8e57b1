"""Language models that read embeddings: random weights of the true Qwen2 architecture, any pretrained one, and LoRA.

`Backbone` runs the library's own modules block by block, so that a text is read once for all rows that share it, the last
block works only where something is read out, and decoding keeps keys and values. `plain` is the library's forward on the
same embeddings; a test holds the two equal, and a model whose blocks are not understood is read the plain way.
"""

import hashlib
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from decisionllm.registry import build, register

# Letters: U texts, L their tokens, B rows, n new tokens, M keys seen, H query heads, G key heads, d head width, D width.


@register("backbone", "nano", width=128, layers=3, heads=4, kv_heads=2, inner=384)
@register("backbone", "tiny", width=256, layers=4, heads=4, kv_heads=2, inner=1408)
@register("backbone", "small", width=512, layers=8, heads=8, kv_heads=2, inner=2816)
@register("backbone", "base", width=896, layers=24, heads=14, kv_heads=2, inner=4864)  # the shape of Qwen2.5-0.5B
def qwen2(
    seed,
    *,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    dropout: float = 0.0,
    tune: str = "full",
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_targets: str = "all-linear",
):
    """Qwen2 with random weights drawn from `seed`, and the project's own text tokenizer."""
    from transformers import AutoModel, Qwen2Config

    from decisionllm.tokenizers.text import own_tokenizer

    tokenizer = own_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    return _tuned(_random(AutoModel, config, seed), tokenizer, tune, lora_rank, lora_alpha, lora_targets, seed)


@register("backbone", "dt")
def gpt2(
    seed,
    *,
    width: int = 128,
    layers: int = 3,
    heads: int = 1,
    dropout: float = 0.1,
    tune: str = "full",
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_targets: str = "all-linear",
):
    """The Decision Transformer's trunk: a small GPT-2 with ReLU and random weights drawn from `seed`."""
    from transformers import AutoModel, GPT2Config

    from decisionllm.tokenizers.text import own_tokenizer

    tokenizer = own_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=width, n_layer=layers, n_head=heads, n_positions=4096, activation_function="relu",
        resid_pdrop=dropout, attn_pdrop=dropout, embd_pdrop=dropout, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return _tuned(_random(AutoModel, config, seed), tokenizer, tune, lora_rank, lora_alpha, lora_targets, seed)


@register("backbone", "pretrained")
def pretrained(
    seed,
    *,
    folder: str = "",
    hub_id: str = "",
    weights: str = "pretrained",
    dtype: str = "float32",
    tune: str = "lora",
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_targets: str = "all-linear",
):
    """A model with its own tokenizer from a local folder, or from the hub if `hub_id` asks for it. The folder may be that of a run: its trunk.

    weights=random draws the same architecture afresh: does language help? tune=frozen: does adapting help?
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    if bool(folder) == bool(hub_id):
        raise ValueError(
            "backbone: expected backbone.folder=<local folder> or backbone.hub_id=<name on the hub>, one of the two"
        )
    run = bool(folder) and (Path(folder).expanduser() / "run.json").is_file()
    if folder and not run and not (Path(folder).expanduser() / "config.json").is_file():
        raise FileNotFoundError(
            f"backbone.folder: expected a model folder with config.json, or a run with run.json, found neither at {folder}"
        )
    if weights not in ("pretrained", "random"):
        raise ValueError(f"backbone.weights: expected pretrained or random, got {weights!r}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"backbone.dtype: expected float32, bfloat16 or float16, got {dtype!r}")
    source = str(Path(folder).expanduser()) if folder else hub_id
    if run:
        model, tokenizer = _of_run(Path(source), weights)
        return _tuned(model.to(getattr(torch, dtype)), tokenizer, tune, lora_rank, lora_alpha, lora_targets, seed)
    local = bool(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        if weights == "random":
            config = AutoConfig.from_pretrained(source, local_files_only=local)
            config.dtype = getattr(torch, dtype)  # not what the file says
            model = _random(AutoModel, config, seed)
        else:
            model = AutoModel.from_pretrained(source, dtype=getattr(torch, dtype), local_files_only=local)
    except OSError as error:
        hint = (
            "is the folder complete?"
            if local
            else "no network, or no such model; backbone.folder=... output_positions a local copy"
        )
        raise OSError(f"backbone {source}: could not be loaded ({hint}): {str(error).splitlines()[0]}") from error
    return _tuned(model, tokenizer, tune, lora_rank, lora_alpha, lora_targets, seed)


def _of_run(path, weights):
    """The language model that a run trained whole, on whatever data, and its tokenizer."""
    import yaml

    config = yaml.safe_load((path / "config.yaml").read_text())
    if weights == "random" or config["backbone"].get("tune") != "full":
        raise ValueError(f"backbone.folder: expected weights=pretrained and a run with backbone.tune=full, got weights={weights} and {path} with tune={config['backbone'].get('tune')}")  # fmt: skip
    trunk = build(config["backbone"], config["seed"])
    file = path / ("best" if config.get("best") else "") / "checkpoint" / "model.safetensors"
    try:
        saved = load_file(file)
        trunk.load_state_dict({n.removeprefix("backbone."): w for n, w in saved.items() if n.startswith("backbone.")})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise OSError(f"backbone {file}: could not be loaded (is the run trained?): {str(error).splitlines()[0]}") from error
    return trunk.model, trunk.tokenizer


def _random(auto, config, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(config)


def _tuned(model, tokenizer, tune, rank, alpha, targets, seed):
    """tune: `lora` trains adapters on a frozen model, `full` trains it all, `frozen` nothing of it."""
    if tune not in ("lora", "full", "frozen"):
        raise ValueError(f"backbone.tune: expected lora, full or frozen, got {tune!r}")
    if tune == "lora":
        from peft import LoraConfig, get_peft_model
        from transformers.pytorch_utils import Conv1D

        targets = targets if targets == "all-linear" else targets.split(",")
        transposed = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2 keeps its maps the other way round
        config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, fan_in_fan_out=transposed)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that it gives up
            torch.manual_seed(seed)
            model = get_peft_model(model, config)
    else:
        model.requires_grad_(tune == "full")
    return Backbone(model, tokenizer, tune)


@dataclass(frozen=True)
class KVCache:
    """Keys and values that later tokens attend to: per layer (N, G, M, d), the text first, then steps if there is room."""

    keys: list
    values: list
    text_mask: torch.Tensor  # (N, L) True where real
    text_length: torch.Tensor  # (N,) real tokens: the position of the first step

    def rows(self, index):
        """The memory of these rows, a copy."""
        return self._each(lambda x: x[index])

    def shared(self, rows):
        """The memory of one text for many rows, a view: to read, not to write."""
        return self._each(lambda x: x.expand(rows, *x.shape[1:]))

    def with_room(self, tokens):
        """A copy with room for this many more tokens."""
        extend = lambda x: torch.cat([x, x.new_zeros(*x.shape[:2], tokens, x.shape[3])], 2)  # noqa: E731
        return KVCache([extend(k) for k in self.keys], [extend(v) for v in self.values], self.text_mask, self.text_length)

    def set_prefix(self, rows, texts):
        """Give these rows other texts, of no more tokens than there is room for: (n,) int, and the memory of n texts."""
        L = texts.text_mask.shape[1]
        for mine, new in zip([*self.keys, *self.values], [*texts.keys, *texts.values], strict=True):
            mine[rows, :, :L] = new
        self.text_mask[rows] = F.pad(texts.text_mask, (0, self.text_mask.shape[1] - L))
        self.text_length[rows] = texts.text_length

    def _each(self, take):
        return KVCache(
            [take(k) for k in self.keys], [take(v) for v in self.values], take(self.text_mask), take(self.text_length)
        )


class Backbone(nn.Module):
    """A transformers model with its text tokenizer. In: texts and embedded tokens. Out: hidden states (B, n, D)."""

    def __init__(self, model, tokenizer, tune):
        super().__init__()
        self.model, self.tokenizer, self.tune = model, tokenizer, tune
        self.config = self.core.config
        self.width = self.config.hidden_size
        self.layout = next((layout for layout in (_Llama, _GPT2) if layout.fits(self)), None)

    @property
    def core(self):
        """The transformers model itself, inside peft's wrapper where there is one."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def embed(self, text_ids):
        return self.core.get_input_embeddings()(text_ids)

    def forward(self, tokens, text_ids, text_mask, text_index, *, output_positions=slice(None)):
        """Hidden states at the read tokens: (B, n, D), texts (U, L) and each row's text (B,) -> (B, output_positions, D)

        Padding is on the right everywhere: it comes after what is real, so that causal attention never sees it, and a
        text's padding takes no position.
        """
        if self.layout is None:
            return self.plain(tokens, text_ids, text_mask, text_index)[:, output_positions]
        texts = self.read_text(text_ids, text_mask)
        memory = texts.shared(len(tokens)) if len(text_ids) == 1 else texts.rows(text_index)
        n, slots = tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device)[None]

        def with_memory(i, k, v):
            if not text_ids.shape[1]:
                return k, v
            return torch.cat([memory.keys[i], k], 2), torch.cat([memory.values[i], v], 2)

        padded = not bool(text_mask.all())
        text_mask, length = (memory.text_mask, memory.text_length) if padded else (memory.text_mask[:1], memory.text_length[:1])
        return self._run(tokens, length[:, None] + slots, _visible(text_mask, slots, n), with_memory, output_positions)

    def plain(self, tokens, text_ids, text_mask, text_index):
        """The same by the library's own forward, the text repeated for every row: (B, n, D), every token read."""
        mask = torch.cat([text_mask[text_index], text_mask.new_ones(tokens.shape[:2])], 1)
        x = torch.cat([self.embed(text_ids)[text_index].to(tokens.dtype), tokens], 1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        out = self.model(inputs_embeds=x.to(self.dtype), attention_mask=mask.long(), position_ids=positions, use_cache=False)
        return out.last_hidden_state[:, text_ids.shape[1] :].to(tokens.dtype)

    @property
    def dtype(self):
        return next(self.core.parameters()).dtype

    def read_text(self, text_ids, text_mask):
        """Read the U texts once: their Memory. What their last block would make of them nobody reads."""
        keys, values = [], []

        def keep(i, k, v):
            keys.append(k)
            values.append(v)
            return k, v

        slots = torch.arange(text_ids.shape[1], device=text_ids.device)[None]
        visible = _visible(text_mask[:1, :0], slots, text_ids.shape[1])
        self._run(self.embed(text_ids), slots, visible, keep, output_positions=slice(0, 0))
        return KVCache(keys, values, text_mask, text_mask.sum(1))

    def append(self, tokens, memory, filled, rows=None, *, output_positions=slice(None)):
        """Decode: read n more tokens of these rows into the memory's room, in place. filled: (N,) step tokens they had before.

        tokens (N, n, D) may be padded on the right; what padding writes is overwritten by the next call.
        """
        L, n = memory.text_mask.shape[1], tokens.shape[1]
        rows = torch.arange(len(memory.text_mask), device=tokens.device) if rows is None else rows
        together = bool(
            (filled == filled[0]).all() & (rows.diff() == 1).all()
        )  # they follow each other, and go on from one place
        taken = slice(int(rows[0]), int(rows[0]) + len(rows)) if together else rows
        slots = filled[:, None] + torch.arange(n, device=tokens.device)  # (N, n)
        end = L + int(filled.max()) + n

        def write(i, k, v):
            for buffer, new in ((memory.keys[i], k), (memory.values[i], v)):
                if together:
                    buffer[taken, :, end - n : end] = new
                else:
                    buffer[rows[:, None], :, L + slots] = new.transpose(1, 2).to(buffer.dtype)
            return memory.keys[i][taken, :, :end], memory.values[i][taken, :, :end]

        text_mask, length = memory.text_mask[rows], memory.text_length[rows]
        if together and bool(text_mask.all()):
            text_mask, length, slots = text_mask[:1], length[:1], slots[:1]
        return self._run(tokens, length[:, None] + slots, _visible(text_mask, slots, end - L), write, output_positions)

    def _run(self, x, positions, visible, remember, output_positions):
        """Every block in turn; the last one's queries and feed-forward only at the read tokens.

        visible: (B or 1, n, M) bool. remember(i, k, v) files the new keys and values of block i and returns all to attend to.
        """
        layout, blocks = self.layout, self.layout.blocks(self.core)
        x, rope = layout.enter(self.core, x.to(self.dtype), positions)
        bias = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill(~visible, float("-inf"))[:, None]
        for i, block in enumerate(blocks):
            read = output_positions if i == len(blocks) - 1 else slice(None)
            q, k, v = layout.project(block, x, rope, read)
            k, v = remember(i, k, v)
            x = x[:, read]
            if read == slice(0, 0):
                return x
            mixed = attend(q, k, v, bias[:, :, read], layout.attention_dropout(block) if self.model.training else 0.0)
            x = layout.finish(block, x, mixed.transpose(1, 2).flatten(2))
        return layout.norm(self.core)(x)


def attend(q, k, v, bias, dropout):
    """Softmax attention: (B, H, n, d), (B, G, M, d) twice, bias (B or 1, 1, n, M) -> (B, H, n, d)"""
    if q.is_cuda:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.to(q.dtype), dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
    B, H, n, d = q.shape  # on a CPU plain products are as fast in float32, and three times faster in bfloat16
    G, M = k.shape[1:3]
    scores = (q * d**-0.5).reshape(B, G, H // G * n, d) @ k.transpose(-1, -2)
    weights = (scores.view(B, H, n, M) + bias).softmax(-1)
    if dropout:
        weights = drop(weights, dropout)
    return (weights.to(v.dtype).view(B, G, H // G * n, M) @ v).view(B, H, n, d)


def drop(x, share):
    """Dropout of this share, for training. On a CPU from 16 random bits a number: five times faster than torch's own."""
    if x.is_cuda or not 0 < share < 1:
        return F.dropout(x, share)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    keep = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(bits[: x.numel()].view(x.shape), round(share * 2**16) - 2**15, out=keep)
    return x * keep.mul_(1 / (1 - share))


def _visible(text_mask, slots, M):
    """Which keys a token sees: all real text, and the steps' tokens up to itself. (N, L), (N, n) -> (N, n, L+M) bool"""
    text = text_mask[:, None].expand(-1, slots.shape[1], -1)
    steps = torch.arange(M, device=slots.device) <= slots[..., None]
    return torch.cat(
        [text.bool().expand(len(steps), -1, -1) if len(text) == 1 else text.bool(), steps.expand(len(text), -1, -1)], -1
    )


class _Llama:
    """How the blocks of Qwen2, Qwen3, Llama, Mistral and their like are called."""

    @staticmethod
    def fits(backbone):
        core = backbone.core
        return hasattr(core, "rotary_emb") and _same_as_plain(backbone, _Llama)

    blocks = staticmethod(lambda core: core.layers)
    norm = staticmethod(lambda core: partial(_rms, core.norm))
    attention_dropout = staticmethod(lambda block: block.self_attn.attention_dropout)

    @staticmethod
    def enter(core, x, positions):
        return x, core.rotary_emb(x, positions)

    @staticmethod
    def project(block, x, rope, read):
        attention, h = block.self_attn, _rms(block.input_layernorm, x)
        cos, sin = (part[:, None] for part in rope)  # (B, 1, n, d)
        if h.shape[1] == h[:, read].shape[1]:
            q, k, v = linear(h, attention.q_proj, attention.k_proj, attention.v_proj)
        else:
            (q,), (k, v) = linear(h[:, read], attention.q_proj), linear(h, attention.k_proj, attention.v_proj)
        q, k, v = (_heads(part, attention.head_dim) for part in (q, k, v))
        if hasattr(attention, "q_norm"):
            q, k = _rms(attention.q_norm, q), _rms(attention.k_norm, k)
        return _rotate(q, cos[:, :, read], sin[:, :, read]), _rotate(k, cos, sin), v

    @staticmethod
    def finish(block, x, mixed):
        x = x + linear(mixed, block.self_attn.o_proj)[0]
        mlp = block.mlp
        gate, up = linear(_rms(block.post_attention_layernorm, x), mlp.gate_proj, mlp.up_proj)
        return x + linear(mlp.act_fn(gate) * up, mlp.down_proj)[0]


class _GPT2:
    """How the blocks of GPT-2 are called."""

    @staticmethod
    def fits(backbone):
        return hasattr(backbone.core, "wpe") and _same_as_plain(backbone, _GPT2)

    blocks = staticmethod(lambda core: core.h)
    norm = staticmethod(lambda core: core.ln_f)
    attention_dropout = staticmethod(lambda block: block.attn.attn_dropout.p)

    @staticmethod
    def enter(core, x, positions):
        x = x + core.wpe(positions)
        return (drop(x, core.drop.p) if core.training else x), None

    @staticmethod
    def project(block, x, rope, read):
        attention = block.attn
        h = block.ln_1(x)
        if read == slice(None) or not hasattr(attention.c_attn, "nf"):  # an adapter wraps the map: it is called whole
            q, k, v = attention.c_attn(h).split(attention.split_size, -1)
            q = q[:, read]
        else:
            weight, bias, D = attention.c_attn.weight, attention.c_attn.bias, attention.split_size
            q = h[:, read] @ weight[:, :D] + bias[:D]
            k, v = (h @ weight[:, D:] + bias[D:]).split(D, -1)
        return tuple(_heads(part, attention.head_dim) for part in (q, k, v))

    @staticmethod
    def finish(block, x, mixed):
        attention, mlp = block.attn, block.mlp
        mixed = attention.c_proj(mixed)
        x = x + (drop(mixed, attention.resid_dropout.p) if block.training else mixed)
        made = mlp.c_proj(mlp.act(mlp.c_fc(block.ln_2(x))))
        return x + (drop(made, mlp.dropout.p) if block.training else made)


def linear(x, *layers):
    """x through each of these maps: [(..., out), ...]. What adapters add is what peft computes, but the products with their
    narrow sides are one, and those with their wide sides are added in place."""
    if not all(map(_adapted, layers)):
        return [layer(x) for layer in layers]
    names, rows = [layer.active_adapters[0] for layer in layers], x.flatten(0, -2)
    narrow = torch.cat([layer.lora_A[name].weight * layer.scaling[name] for layer, name in zip(layers, names, strict=True)])
    inner = F.linear(rows, narrow.to(x.dtype)).split([layer.r[name] for layer, name in zip(layers, names, strict=True)], -1)
    made = [layer.base_layer(rows) for layer in layers]
    for out, part, layer, name in zip(made, inner, layers, names, strict=True):
        out.addmm_(part, layer.lora_B[name].weight.to(out.dtype).t())
    return [out.unflatten(0, x.shape[:-1]) for out in made]


def _adapted(layer):
    """Whether this is a linear map with one plain LoRA adapter, in use and not merged."""
    if not (hasattr(layer, "lora_A") and isinstance(layer.base_layer, nn.Linear) and len(layer.active_adapters) == 1):
        return False
    special = layer.merged or layer.disable_adapters or layer.lora_variant
    return not special and isinstance(layer.lora_dropout[layer.active_adapters[0]], nn.Identity)


def _rms(norm, x):
    """What the library's own module computes, in one call where it is the usual one."""
    if not hasattr(norm, "variance_epsilon"):
        return norm(x)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _heads(x, width):
    return x.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, n, H d) -> (B, H, n, d)


def _rotate(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


@torch.no_grad()
def _same_as_plain(backbone, layout):
    """Whether a layout output_positions this model as the library does: one short text and five tokens, tried when it is loaded."""
    training, backbone.layout = backbone.model.training, layout
    backbone.model.eval()
    device = next(backbone.core.parameters()).device
    x = torch.linspace(-1, 1, 2 * 5 * backbone.width, device=device, dtype=backbone.dtype).view(2, 5, -1).sin()
    ids = torch.arange(6, device=device).view(2, 3) % backbone.config.vocab_size
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device=device, dtype=torch.bool)
    index = torch.arange(2, device=device)
    plain = backbone.plain(x, ids, mask, index)
    try:
        ours = backbone.forward(x, ids, mask, index)
    except (AttributeError, TypeError, RuntimeError):  # blocks of another kind
        return False
    finally:
        backbone.model.train(training)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-6}.get(backbone.dtype, 5e-2)
    return bool(torch.allclose(ours, plain, atol=tolerance * plain.abs().max().item(), rtol=0))


def fingerprint(module):
    """A hash of a module's frozen weights: what a saved adapter belongs to."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(module.named_parameters()):
        if not weight.requires_grad:
            digest.update(name.encode() + weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
