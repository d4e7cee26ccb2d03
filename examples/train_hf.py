"""Train a small Llama of Hugging Face transformers from scratch. Run it twice: the hashes agree.

pip install '.[hf]' && python examples/train_hf.py    (both in the folder that has examples/)
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dash_attn.integrations import huggingface

VOCABULARY, LENGTH, STEPS = 64, 256, 8


def batches(steps: int) -> Tensor:
    """Sequences that count up, each from its own start in its own stride."""
    source = torch.Generator().manual_seed(1)
    start, stride = torch.randint(1, VOCABULARY, (2, steps, 2, 1), generator=source)
    return (start + stride * torch.arange(LENGTH)) % VOCABULARY


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()  # --help
    huggingface.enable()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="dash_attn",  # the one changed line; it was: attn_implementation="flash_attention_2"
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, tokens in enumerate(batches(STEPS)):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
