"""A kernel of the Hugging Face Hub that tools/hub_kernel.py writes: it loads as `kernels` loads it, and has the package's bits.

With the `kernels` package by its get_local_kernel, else by the same import of a file under the name in metadata.json.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.integrations import hub
from dense import same_bits
from hub_kernel import check_source, write_kernel

HAS_KERNELS = importlib.util.find_spec("kernels") is not None
VARIANTS = ("torch-cpu", "torch-cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("hub")
    write_kernel(written)
    return written


@pytest.fixture(scope="module")
def kernel(folder: Path) -> ModuleType:
    if HAS_KERNELS:
        from kernels import get_local_kernel

        return get_local_kernel(folder)
    variant = folder / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(library: Any, **options: Any) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 150, heads, 32, generator=source).requires_grad_() for heads in (4, 2, 2)]
    out = library.flash_attn_func(*inputs, **options)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_size": (40, 40)}, {}], ids=str)
def test_the_bits_are_the_packages(kernel: ModuleType, options: dict[str, Any]) -> None:
    for found, expected in zip(results(kernel, **options), results(dash_attn, **options), strict=True):
        assert same_bits(found, expected)


def test_it_is_another_copy_with_operators_of_its_own(kernel: ModuleType) -> None:
    ours, theirs = (getattr(torch.ops, name) for name in ("dash_attn", kernel.__name__))
    traced = torch.compile(lambda *x: kernel.flash_attn_func(*x, causal=True), backend="eager", fullgraph=True)
    inputs = [torch.randn(1, 70, 1, 16) for _ in range(3)]
    assert same_bits(traced(*inputs), dash_attn.flash_attn_func(*inputs, causal=True))
    assert theirs.attention is not ours.attention
    assert inspect.getmodule(kernel.explain) is sys.modules[f"{kernel.__name__}.attention.explain"]


def test_every_name_it_offers_is_there(kernel: ModuleType) -> None:
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    assert kernel.__version__ == dash_attn.__version__


def test_packed_sequences_and_sinks_as_transformers_passes_them(kernel: ModuleType) -> None:
    """By name, `max_seqlen` and all; the control has no sinks."""
    q, k, v = (torch.randn(150, heads, 32) for heads in (4, 2, 2))
    ends, sinks = torch.tensor([0, 60, 150], dtype=torch.int32), torch.ones(4)
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 90, "max_seqlen_k": 90, "causal": True, "dropout_p": 0.0}
    found = kernel.flash_attn_varlen_func(q, k, v, **given, softmax_scale=0.2, window_size=(30, 30), deterministic=False, s_aux=sinks)
    expected = dash_attn.flash_attn_varlen_func(q, k, v, **given, softmax_scale=0.2, window_size=(30, 0), sinks=sinks)
    without = dash_attn.flash_attn_varlen_func(q, k, v, **given, softmax_scale=0.2, window_size=(30, 0))
    assert same_bits(found, expected)
    assert not same_bits(found, without)


@pytest.mark.parametrize("function", [hub.flash_attn_func, hub.flash_attn_varlen_func, hub.flash_attn_with_kvcache])
def test_sinks_have_two_names_and_one_value(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert {"s_aux", "sinks", "window_size", "softcap", "softmax_scale", "causal"} <= parameters.keys()
    with pytest.raises(TypeError, match="takes sinks or s_aux, which are two names for one thing; got both"):
        function(None, None, None, sinks=torch.ones(1), s_aux=torch.ones(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_backends_read_goes_along(folder: Path, variant: str) -> None:
    """Sources of kernels and tables of tiles, too."""
    backends = Path(dash_attn.__file__).parent / "backends"
    read = {path.relative_to(backends) for path in backends.rglob("*.*") if "__pycache__" not in path.parts}
    assert {path.suffix for path in read} >= {".py", ".cuh", ".json"}
    written = folder / "build" / variant / "backends"
    assert {path for path in read if not (written / path).exists()} == set()


def test_metadata_says_which_machines(folder: Path) -> None:
    cpu, cuda = (json.loads((folder / "build" / variant / "metadata.json").read_text()) for variant in VARIANTS)
    assert cpu["backend"] == {"type": "cpu"}
    assert cuda["backend"] == {"type": "cuda", "archs": ["8.0", "9.0", "10.0", "12.0"]}  # and later ones of each generation
    assert cpu["id"] != cuda["id"]
    assert cpu["id"].isidentifier()


@pytest.mark.skipif(not HAS_KERNELS, reason="the kernels package is not installed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_digests_are_those_that_kernels_makes(tmp_path: Path, variant: str) -> None:
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    write_kernel(tmp_path)
    written = tmp_path / "build" / variant
    told = Metadata.read_from_file(written / "metadata.json").digest
    told.validate(Digest.hash_variant(DigestAlgorithm.SHA256, written))
    (written / "__init__.py").write_text("")
    with pytest.raises(DigestValidationError):
        told.validate(Digest.hash_variant(DigestAlgorithm.SHA256, written))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import dash_attn", "imports dash_attn"),
        ("def f():\n    from dash_attn.masks import Full", r"imports dash_attn\.masks"),
        ("from torchtitan.config import override", r"imports torchtitan\.config"),
        ('import_module("dash_attn.backends")', "names the installed package"),
        ("torch.ops.dash_attn.attention(q)", "names the installed package"),
        ('custom_op("dash_attn::attention")', "names the installed package"),
    ],
)
def test_what_needs_the_installed_package_is_refused(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_source("a.py", line)
    check_source("a.py", "import torch\nfrom .masks import Full\ndef f():\n    import matplotlib")


def test_a_folder_with_files_is_left_alone(folder: Path) -> None:
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        write_kernel(folder)


MODELS = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Gemma2Config, GptOssConfig

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, max_position_embeddings=256)
CASES = [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=16),
         Gemma2Config(**SIZES, sliding_window=16, attn_logit_softcapping=20.0, query_pre_attn_scalar=16)]
SINKS = GptOssConfig(**SIZES, sliding_window=16, num_local_experts=2, num_experts_per_tok=1)
ids = torch.randint(64, (2, 70), generator=torch.Generator().manual_seed(1))
left, right = torch.ones(2, 2, 70, dtype=torch.long)
left[0, :20] = right[1, 50:] = 0

def step(config, implementation, mask):
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float()
    assert net.config._attn_implementation == implementation
    for name, p in net.named_parameters():
        if name.endswith("sinks"):
            p.data.fill_(1.5)
    hidden = (mask == 0) | (mask.roll(1, 1) == 0)  # what padding says counts nowhere
    loss = net(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(hidden, -100), use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]

for name, configs in (("org/dash-flash-attn", CASES), ("org/dash-attn", [SINKS])):
    for config in configs:
        for mask in (torch.ones_like(ids), left, right):
            for found, expected in zip(step(config, name, mask), step(config, "eager", mask), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
assert not [name for name in sys.modules if name.startswith("dash_attn")]
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not HAS_KERNELS, reason="the kernels package is not installed")
def test_models_of_transformers_load_it(folder: Path) -> None:
    pytest.importorskip("transformers")
    local = ":".join(f"{name}={folder}" for name in ("org/dash-flash-attn", "org/dash-attn"))
    environment = {**os.environ, "LOCAL_KERNELS": local, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", MODELS], capture_output=True, text=True, timeout=300, env=environment)
    if "uses an incompatible version" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])  # each transformers takes a few versions of `kernels`
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
def test_models_of_transformers_take_our_own_door(folder: Path) -> None:
    pytest.importorskip("transformers")
    code = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("_a_kernel", {str(folder / "build/torch-cpu/__init__.py")!r})
module = sys.modules["_a_kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.enable()
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
net = AutoModelForCausalLM.from_config(config, attn_implementation="dash_attn")
net(input_ids=torch.zeros(1, 20, dtype=torch.long)).logits.sum().backward()
assert "_a_kernel.integrations.huggingface" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
