"""The idea of kvtailor in one file: score the tokens of a prompt, keep a budget of them, quantise what is old, decode.

python examples/minimal.py

To decode a token, a model reads the keys and values of all tokens before it. Of a long text these take more memory than
the model does, and most of them are hardly looked at. So each layer has a cache that forgets:

1. The queries at the end of the prompt show what the answer will look at: their attention gives each token a *score*.
2. Each kv head keeps the tokens with the highest scores, as many as its *budget*, and always the newest ones.
3. What it keeps is *quantised* to 4 bits; the newest tokens stay in full precision.
4. Decoding adds tokens. Once they exceed the budget by the *slack*, the cache scores, drops and quantises again.

The model never notices: a key was rotated to its position when it came, so it is right wherever it lies in the cache.

This is the plan `snapkv(window=8) + vector(bits=4, recent=8) @ tokens=48, slack=32` of kvtailor, for one text
and a model like Llama, without all that makes it fast. A test holds both to the same tokens and the same logits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvtailor


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (..., d) as whole numbers from -7 to 7, two in a byte (..., d / 2), and the step of each."""
    step = (states.abs().amax(-1, keepdim=True) / 7).clamp(min=2.0**-14)
    codes = ((states / step).round() + 7).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, step


def dequantise(codes: Tensor, step: Tensor) -> Tensor:
    """Return the vectors (..., d) that codes (..., d / 2) and steps (..., 1) stand for."""
    return (torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(step.dtype) - 7) * step


def attention(query: Tensor, key: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Return how queries (q, t, d), g to a kv head, attend to visible (h, t, n) keys (h, n, d): (h, g, t, n)."""
    logits = query.unflatten(0, (key.shape[0], -1)) @ key[:, None].transpose(-1, -2) * scaling
    return logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)


class LayerCache:
    """What one layer holds. Its h kv heads hold equally many tokens, and each head its own.

    Keys and values lie together, (2, h, n, d): what is done to the ones is done to the others.

    Args:
        module: the attention of the layer, for its sizes.
        budget: tokens that each kv head keeps.
        slack: tokens that decoding may add before the next cut.
        window: newest queries that vote, and newest tokens that always stay.
        kernel: tokens over which votes are averaged, so that a token stays with its neighbours.

    Attributes:
        codes, step: (2, h, m, d / 2) and (2, h, m, 1): the older tokens as `quantise` made them; they never change.
        recent: (2, h, n - m, d): the newest tokens in full precision.
        columns: (h, n): where in the text each token stands, ascending; those of the codes first.
        queries: (q, w, d): the newest queries, at most a window of them.
        added: tokens that came since the last cut.
    """

    def __init__(self, module: nn.Module, budget: int = 48, slack: int = 32, window: int = 8, kernel: int = 21) -> None:
        heads, size = module.config.num_key_value_heads, module.head_dim
        self.budget, self.slack, self.window, self.kernel = budget, slack, window, kernel
        self.scaling, self.added = module.scaling, 0
        self.recent, self.columns = torch.zeros(2, heads, 0, size), torch.zeros(heads, 0, dtype=torch.int64)
        self.codes, self.step = quantise(self.recent)
        self.queries = torch.zeros(heads * module.num_key_value_groups, 0, size)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, columns: Tensor) -> Tensor:
        """Return what new tokens at the columns (t,) read (q, t, d) of all that is held; then let the cache forget."""
        self.recent = torch.cat([self.recent, torch.stack([key, value])], 2)
        self.columns = torch.cat([self.columns, columns.expand(len(key), -1)], 1)
        self.queries = torch.cat([self.queries, query], 1)[:, -self.window :]
        self.added += len(columns)
        keys, values = self.states()
        visible = self.columns[:, None] <= columns[:, None]  # (h, t, n)
        output = (attention(query, keys, visible, self.scaling) @ values[:, None]).flatten(0, 1)
        if len(columns) > 1 or self.added > self.slack:
            self.cut()
        return output

    def states(self) -> Tensor:
        """Return the keys and values (2, h, n, d) of all that is held; the older ones as far as their codes tell."""
        return torch.cat([dequantise(self.codes, self.step), self.recent], 2)

    def cut(self) -> None:
        """Drop what exceeds the budget, and quantise all that stays but the newest tokens."""
        newest, heads = self.columns[:, -self.window :], torch.arange(len(self.columns))[:, None]
        ranked = self.scores().argsort(dim=-1, descending=True, stable=True)
        kept = ranked[:, : self.budget - self.window].sort(dim=-1).values  # (h, k), in the order of the text
        self.columns = torch.cat([self.columns.gather(1, kept), newest], 1)
        codes, step = quantise(self.recent[:, :, : -self.window])
        self.codes = torch.cat([self.codes, codes], 2)[:, heads, kept]
        self.step = torch.cat([self.step, step], 2)[:, heads, kept]
        self.recent, self.added = self.recent[:, :, -self.window :].clone(), 0

    def scores(self) -> Tensor:
        """Return how much the newest queries look at each token before them (h, n - w), averaged over neighbours."""
        visible = self.columns[:, None] <= self.columns[:, -self.window :, None]
        votes = attention(self.queries, self.states()[0], visible, self.scaling).sum(2).mean(1)[:, : -self.window]
        return F.avg_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2) if votes.shape[1] else votes


def forward(model: nn.Module, ids: Tensor, caches: list[LayerCache], seen: int) -> Tensor:
    """Return the logits (t, vocabulary) of new tokens (t,), before which the model has seen so many others."""
    hidden, columns = model.model.embed_tokens(ids)[None], torch.arange(seen, seen + len(ids))
    cos, sin = model.model.rotary_emb(hidden, columns[None])
    for block, cache in zip(model.model.layers, caches, strict=True):
        module, normed = block.self_attn, block.input_layernorm(hidden)
        projected = (project(normed) for project in (module.q_proj, module.k_proj, module.v_proj))
        query, key, value = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in projected)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)  # (1, heads, t, d)
        output = cache.attend(query[0], key[0], value[0], columns)
        hidden = hidden + module.o_proj(output.transpose(0, 1).flatten(1))[None]
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[0]


@torch.no_grad()
def generate(model: nn.Module, ids: Tensor, new_tokens: int, caches: list[LayerCache]) -> Tensor:
    """Return the likeliest tokens (new_tokens,) after a prompt (t,)."""
    seen, answer = 0, []
    for _ in range(new_tokens):
        logits, seen = forward(model, ids, caches, seen), seen + len(ids)
        ids = logits[-1:].argmax(-1)
        answer.append(ids)
    return torch.cat(answer)


if __name__ == "__main__":
    model, tokenizer = kvtailor.load_model("demo", dtype=torch.float32)
    text = "The ferry left the island. The code of the harbour is 48213. " + "Nobody was there. " * 30
    prompt = torch.tensor(tokenizer(text + "The code of the harbour is").input_ids)
    for budget in (len(prompt), 48):
        caches = [LayerCache(block.self_attn, budget) for block in model.model.layers]
        answer = tokenizer.decode(generate(model, prompt, 6, caches))
        held = sum(x.numel() * x.element_size() for each in caches for x in (each.codes, each.step, each.recent))
        whole = sum(each.recent[:, :, 0].numel() * each.recent.element_size() for each in caches) * (len(prompt) + 5)
        print(f"{budget} of {len(prompt)} tokens, {held} of {whole} bytes: {answer!r}")
