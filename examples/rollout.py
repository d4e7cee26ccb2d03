"""Reinforcement learning (GRPO) in which sampler and trainer agree in every bit: no log-probability differs, so the ratio is exactly 1.

python examples/rollout.py              # samples by continuous batching, trains in padded micro-batches
python examples/rollout.py --without    # the same without dash_attn.invariance: some log-probabilities differ
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dash_attn import invariance
from dash_attn.integrations import huggingface

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
VOCABULARY, NEW = 24, 6  # tokens that a completion has
PROMPTS, GROUP = 4, 8  # of a step: prompts, and completions of each
AT_ONCE = 7  # tokens of a batch of the sampler; with so few, the library of a CPU also takes other kernels than in training
MICRO_BATCH = 8  # sequences
CLIP, RATE = 0.2, 1e-2
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass
class Rollout:
    """A sequence, with the log-probabilities of its last tokens as the sampler had them, and how good it is within its group."""

    tokens: Tensor
    sampled: Tensor
    reward: float
    advantage: float = 0.0


def reward(prompt: list[int], completion: list[int]) -> float:
    """The task: go forward on a clock face of all tokens. How many steps are forward, that is at most half a round."""
    steps = zip([prompt[-1], *completion], completion, strict=False)
    return sum(1 <= (token - before) % VOCABULARY <= VOCABULARY // 2 for before, token in steps) / len(completion)


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash_attn")
    return model.to(DEVICE, DTYPE).eval()  # no dropout


def make_prompts(chance: torch.Generator) -> list[list[int]]:
    lengths = torch.randint(1, 12, (PROMPTS,), generator=chance).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=chance).tolist() for length in lengths]


def sample(model: Any, prompts: list[list[int]]) -> list[Rollout]:
    """Requests of all lengths are in one batch; as some end, others begin."""
    pages = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=AT_ONCE, return_logprobs=True)
    choices = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    manager = model.init_continuous_batching(generation_config=choices, continuous_batching_config=pages)
    names = manager.add_requests(asked, max_new_tokens=NEW)  # all before it starts: whom a token is drawn with is then no matter of time
    manager.start()
    found: dict[str, Any] = {}
    while len(found) < len(names):
        result = manager.get_result()
        if result is None or result.error is not None:
            raise RuntimeError(f"the sampler stopped: {result and result.error}")
        found[result.request_id] = result
    manager.stop()
    rollouts = []
    for prompt, name in zip(asked, names, strict=True):
        tokens, scores = found[name].generated_tokens, found[name].logprobs
        rollouts.append(Rollout(torch.tensor(prompt + tokens), torch.tensor(scores), reward(prompt, tokens)))
    return rollouts


def judge(rollouts: list[Rollout]) -> None:
    """Each completion against the others of its prompt."""
    for start in range(0, len(rollouts), GROUP):
        group = rollouts[start : start + GROUP]
        rewards = torch.tensor([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            rollout.advantage = float(advantage)


def log_probabilities(model: Any, batch: list[Rollout]) -> Tensor:
    """Of the sampled tokens, in a training forward of a padded batch; as transformers takes them, the logarithm of a softmax."""
    tokens = pad_sequence([rollout.tokens for rollout in batch], batch_first=True).to(DEVICE)
    mask = pad_sequence([torch.ones_like(rollout.tokens) for rollout in batch], batch_first=True).to(DEVICE)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float()
    ends = torch.tensor([len(rollout.tokens) for rollout in batch], device=DEVICE)
    places = ends[:, None] - NEW + torch.arange(NEW, device=DEVICE)  # of the sampled tokens; logits are one place before
    rows = logits.gather(1, (places - 1)[..., None].expand(-1, -1, logits.shape[-1]))
    chosen: Tensor = rows.softmax(-1).gather(2, tokens.gather(1, places)[..., None])[..., 0]
    return chosen.log()


def train(model: Any, optimizer: torch.optim.Optimizer, rollouts: list[Rollout]) -> tuple[int, float]:
    """One update. How many log-probabilities are not the sampler's, and how far the worst ratio is from 1."""
    differ, worst = 0, 0.0
    optimizer.zero_grad()
    for start in range(0, len(rollouts), MICRO_BATCH):
        batch = rollouts[start : start + MICRO_BATCH]
        sampled = torch.stack([rollout.sampled for rollout in batch]).to(DEVICE)
        advantages = torch.tensor([[rollout.advantage] for rollout in batch], device=DEVICE)
        scores = log_probabilities(model, batch)
        ratio = (scores - sampled).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        (-gain.sum() / (len(rollouts) * NEW)).backward()
        differ += int((scores.detach().view(torch.int32) != sampled.view(torch.int32)).sum())
        worst = max(worst, float((ratio.detach() - 1).abs().max()))
    optimizer.step()
    return differ, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="store_true", help="without dash_attn.invariance: log-probabilities will differ")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    arguments = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    with huggingface.enable(), nullcontext() if arguments.without else invariance.enable():
        model, chance = make_model(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        total = 0
        for step in range(arguments.steps):
            rollouts = sample(model, make_prompts(chance))
            judge(rollouts)
            differ, worst = train(model, optimizer, rollouts)
            total += differ
            mean, tokens = sum(rollout.reward for rollout in rollouts) / len(rollouts), len(rollouts) * NEW
            print(f"step {step:3}  reward {mean:.3f}  {differ:3} of {tokens} log-probabilities differ  |ratio - 1| <= {worst:.1e}")
    weights = b"".join(x.detach().float().cpu().numpy().tobytes() for x in model.parameters())
    print(f"{total} of {arguments.steps * PROMPTS * GROUP * NEW} log-probabilities differ")
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
