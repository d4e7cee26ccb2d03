"""Sample from a small language model with a cache of keys and values, recompute the same tokens in a training forward, and compare bits.

python examples/sample_and_train.py
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from dash_attn import flash_attn_func, flash_attn_with_kvcache

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 128, 4, 2, 32, 3
SEQUENCES, PROMPT, LENGTH = 3, 150, 210  # tokens of each prompt, and with what is sampled
PAGE = 16  # slots of a page of the cache
ROWS = 32  # of every matrix product, where products are pinned


class PinnedLinear(nn.Linear):
    """Products of one size, whatever the number of tokens: a library chooses its kernel, and so the order of its sums, by the size."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        blocks = pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS)
        return torch.cat([super(PinnedLinear, self).forward(block) for block in blocks])[: len(rows)].unflatten(0, x.shape[:-1])


class Attention:
    """What a training forward calls."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)


@dataclass
class Cached(Attention):
    """What sampling calls: new keys and values go into pages, and only new queries are computed. Notes what each layer got and gave."""

    notes: list[list[tuple[Tensor, ...]]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])
    length: int = 0

    def __post_init__(self) -> None:
        columns = -(-LENGTH // PAGE)
        shape = LAYERS, 2, SEQUENCES * columns, PAGE, KV_HEADS, HEAD_DIM
        self.pages = torch.full(shape, torch.nan, device=DEVICE, dtype=DTYPE)  # what nobody has written does not matter
        self.table = torch.randperm(SEQUENCES * columns).view(SEQUENCES, columns).int().to(DEVICE)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        used = torch.full((SEQUENCES,), self.length, dtype=torch.int32, device=DEVICE)
        k_cache, v_cache = self.pages[layer]
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, block_table=self.table, causal=True)
        self.notes[layer].append((q, k, v, out))
        return out

    def of_layer(self, layer: int) -> list[Tensor]:
        """q, k, v and output of all tokens so far."""
        return [torch.cat(tensors, 1) for tensors in zip(*self.notes[layer], strict=True)]


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(linear(WIDTH, 4 * WIDTH), nn.GELU(), linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attend: Attention, layer: int) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        x = x + self.out(attend(layer, q, k, v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(linear) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, attend: Attention, first: int = 0) -> Tensor:
        """Log-probabilities of the token behind each of these, the first of which is at position `first`."""
        x = self.words(tokens) + self.places.weight[first : first + tokens.shape[1]]
        for layer, block in enumerate(self.blocks):
            x = block(x, attend, layer)
        return self.head(self.norm(x)).float().log_softmax(-1)


@torch.no_grad()
def sample(model: Model) -> tuple[Tensor, Tensor, Cached]:
    """Tokens, the log-probabilities they were sampled with, and what attention did."""
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, PROMPT), generator=source).to(DEVICE)
    cache, chosen, new = Cached(), [], tokens
    while tokens.shape[1] < LENGTH:
        scores = model(new, cache, cache.length)[:, -1]
        cache.length = tokens.shape[1]
        new = torch.multinomial(scores.exp().cpu(), 1, generator=source).to(DEVICE)
        chosen.append(scores.gather(1, new))
        tokens = torch.cat([tokens, new], 1)
    return tokens, torch.cat(chosen, 1), cache


def train(model: Model, tokens: Tensor) -> Tensor:
    """The log-probabilities of the sampled tokens in a training forward. Its backward runs, too, for some reward."""
    scores = model(tokens[:, :-1], Attention())[:, PROMPT - 1 :].gather(2, tokens[:, PROMPT:, None])[..., 0]
    reward = torch.tensor([1.0, -0.5, -0.5], device=DEVICE)[:, None]
    (-reward * scores).mean().backward()
    return scores.detach()


def sdpa_as_sampled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The prompts, then one query at a time."""
    ends = [PROMPT, *range(PROMPT + 1, q.shape[1] + 1)]
    parts = [sdpa(q[:, start:end], k[:, :end], v[:, :end]) for start, end in zip([0, *ends], ends, strict=False)]
    return torch.cat(parts, 1)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=q.shape[1] > 1, enable_gqa=True).transpose(1, 2)


def show(what: str, sampled: Tensor, trained: Tensor) -> None:
    """A line of the table."""
    hashes = [hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8] for x in (sampled, trained)]
    apart = (sampled.double() - trained.double()).abs().max().item()
    verdict = "equal" if hashes[0] == hashes[1] else f"differ  by up to {apart:.1e}"
    print(f"{what:50}  {hashes[0]}  {hashes[1]}  {verdict}")


def compare(linear: type[nn.Linear], words: str) -> Cached:
    torch.manual_seed(0)
    model = Model(linear).to(DEVICE, DTYPE)
    tokens, sampled, cache = sample(model)
    show(f"log-probabilities, {words}", sampled, train(model, tokens))
    return cache


def main() -> None:
    print(f"{'':50}  sampled   trained")
    cache = compare(nn.Linear, "products as they come")
    for layer in range(LAYERS):
        q, k, v, out = cache.of_layer(layer)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        show(f"attention of layer {layer}, equal inputs", out, flash_attn_func(*inputs, causal=True))
    for layer in range(LAYERS):
        q, k, v, _ = cache.of_layer(layer)
        show(f"SDPA of layer {layer}, equal inputs (control)", sdpa_as_sampled(q, k, v), sdpa(q, k, v))
    compare(PinnedLinear, f"products of {ROWS} rows each")
    print(
        """
Promised: attention. A token that was sampled with a cache has the bits of the training forward, given the same queries, keys and values.
Not promised: the rest of a model. A matrix product of one token may be summed in another order than one of a whole batch, so
log-probabilities differ in the last bits, and with them the inputs of the next layer. People pin it in one of three ways:
- products of one size for any number of tokens, as in the last line, or kernels that are made for it (called batch-invariant);
- the log-probabilities of a second forward by the trainer in place of the sampler's: a pass more, but no kernel changes;
- the ratio of both as a weight of the loss (importance sampling): nothing is equal, but the bias is accounted for.
Normalization and softmax work row by row and agree here. Expert layers choose by scores, so a last bit can choose another expert."""
    )


if __name__ == "__main__":
    main()
