"""Calls that are mistakes, each with what to do instead, for docs/errors.md. They run as they stand."""

from __future__ import annotations

PREPARATION = """
q = torch.randn(2, 10, 4, 16)  # (batch, length, heads, head dim)
k = v = torch.randn(2, 12, 2, 16)
tokens = torch.randn(10, 4, 16)  # packed: (tokens, heads, head dim)
ends = torch.tensor([0, 4, 10], dtype=torch.int32)  # two sequences, of 4 and 6 tokens
x = torch.randn(1, 300, 1, 16, requires_grad=True)
planned = torch.empty(2, 256, 4, 512, device="meta")  # stands for a tensor on a GPU
cache = torch.zeros(4, 16, 2, 16)  # four rows of 16 slots, or four pages; (rows, slots, KV heads, head dim)
table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)  # the pages of two sequences
layer = torch.nn.Identity()  # stands for a layer of a model of transformers
"""

TENSORS = (
    ("flash_attn_func(q[0], k[0], v[0])", "Add a batch dimension, or `flash_attn_varlen_func` for packed tokens."),
    ("flash_attn_func(q, k, v.tolist())", "Pass tensors."),
    ("flash_attn_func(q.int(), k.int(), v.int())", "Cast to a floating dtype that the backend has."),
    ("flash_attn_func(q, k.half(), v)", "Cast to one dtype."),
    ('flash_attn_func(q, k.to("meta"), v)', "Move all three to one device."),
    ('flash_attn_func(q.to("meta"), k.to("meta"), v.to("meta"))', "Meta tensors can be explained, not computed."),
    ("flash_attn_func(q[:1], k, v)", "Expand the batch; nothing is broadcast."),
    ("flash_attn_func(q, k[..., :8], v)", "q and k share a head dim; v may have its own where the backend takes that."),
    ("flash_attn_func(q[:, :, :3], k, v)", "Check the head counts; under tensor parallelism, that KV heads were also split."),
    ("flash_attn_func(q, k, v[:, :-1])", "k and v come in pairs."),
    ("flash_attn_func(q[:, :, :0], k, v)", "A tensor-parallel rank without heads must not call."),
)
OPTIONS = (
    ("flash_attn_func(q, k, v, dropout_p=1.0)", "A probability below 1; 0 in evaluation."),
    ("flash_attn_func(q, k, v, dropout_p=0.1, dropout_seed=7)", "`torch.full((batch,), 7)`, on the device of the tensors."),
    ("flash_attn_func(q, k, v, dropout_p=0.1, mask=Documents((4, 6)))", "Documents end to end, with a seed each ([dropout](dropout.md))."),
    ("flash_attn_func(q, k, v, alibi_slopes=torch.ones(2))", "One slope for every query head, not KV head."),
    ("flash_attn_func(q, k, v, alibi_slopes=torch.ones(4, requires_grad=True))", "Slopes are not learned, as in FlashAttention."),
    ('flash_attn_func(q, k, v, softmax_scale=float("nan"))', "Look for the NaN upstream; `None` means `head_dim ** -0.5`."),
    ("flash_attn_func(q, k, v, softmax_scale=0.0)", "`None` means `head_dim ** -0.5`."),
    ("flash_attn_func(q, k, v, softcap=-1.0)", "0 means no softcap."),
    ("flash_attn_func(q, k, v, window_size=(-2, 0))", "-1 means no limit on that side."),
    ("flash_attn_func(q, k, v, window_size=128)", "Give both sides: `(127, 0)` is 128 keys, the query's own included."),
    ('flash_attn_func(q, k, v, causal="False")', "Any word counts as true; pass `False`."),
    ("flash_attn_func(q.to_sparse(), k, v)", "`q.to_dense()`"),
    ("flash_attn_func(q, k, v, sinks=torch.zeros(2))", "One logit for every query head, not KV head."),
    ("flash_attn_func(q, k, v, sinks=0.5)", "`torch.full((4,), 0.5)`"),
    ("flash_attn_func(q, k, v, head_offset=-1)", "The index of this rank's first KV head in the unsharded model."),
    ("flash_attn_func(q, k, v, 0.0, None, False, (-1, -1), 0.0, None, False, False, Causal())", "Ours are keyword-only."),
)
MASKS = (
    ("flash_attn_func(q, k, v, mask=Causal(), causal=True)", "Give one of them."),
    (
        "flash_attn_func(q, k, v, mask=TileMap([[True, True]], 10, 6), window_size=(4, 0))",
        "Cut the window into the map's blocks, or use `Window` alone.",
    ),
    ('flash_attn_func(q, k, v, mask="causal")', "`mask=Causal()`, or `parse_mask`."),
    ("flash_attn_func(q, k, v, mask=torch.ones(10, 12))", "`mask.bool()`, or `mask == 0` of a bias that is 0 or -inf ([masks](masks.md))."),
    ("flash_attn_func(q, k, v, mask=torch.ones(2, 10, 12).bool())", "`mask[:, None]`: one per sequence, for all heads."),
    ("flash_attn_func(q, k, v, mask=Documents((5, 5)))", "Documents need as many queries as keys."),
    ("flash_attn_func(q, k, v, mask=Prefix(13))", "The prefix is a number of keys."),
    ("flash_attn_func(q, k, v, mask=TileMap([[True]], 64, 8))", "One entry for every block, the last one may overhang."),
    ("TileMap([[1, 0]], 64, 64)", "Pass booleans."),
    ("Documents((5, 0, 5))", "Leave empty documents out."),
)
CHOICES = (
    ('flash_attn_func(q, k, v, schedule="fastest")', '`"auto"` needs no choice.'),
    (
        'flash_attn_func(x, x, x, causal=True, schedule="shift").sum().backward()',
        '`"auto"`, or one that serves the mask ([support](support.md)).',
    ),
    (
        'generate("auto", Problem(Full(), 4096, 4096), workers=8)  # a slice of a GPU with 8 SMs',
        '`schedule="alternating"`, on every machine of the run, or more SMs.',
    ),
    ('flash_attn_func(q, k, v, accumulation="atomic")', '`"unordered"` gives up every guarantee.'),
    ('flash_attn_func(q, k, v, deterministic=True, accumulation="unordered")', "Decide which one is meant."),
    ('flash_attn_func(q, k, v, backend="cuda")', '`"auto"` goes by the device of the tensors.'),
    ('flash_attn_func(q, k, v, backend="hopper")', "Move the tensors to the GPU; a named backend never falls back."),
    (
        'p = planned[..., :64].bfloat16(); explain(flash_attn_func, p, p, p, backend="triton", accumulation="unordered")',
        "Nothing is unordered there; leave the argument out.",
    ),
    (
        'p = planned[..., :64].bfloat16(); explain(flash_attn_func, p, p, p, backend="triton", schedule="spt")',
        "Leave the argument out: dQ has a pass of its own.",
    ),
    ('explain(flash_attn_func, planned, planned, planned, backend="hopper")', "Cast to a dtype that the backend has."),
    ('p = planned.bfloat16(); explain(flash_attn_func, p, p, p, backend="hopper")', "See [support](support.md) for the head dims."),
    ("explain(flash_attn_func, planned, planned, planned)", "Name the backend: meta tensors have no device to choose by."),
    ("explain(flash_attn_func, q[:, :0], k, v)", "Nothing runs for such a call."),
)
PACKED = (
    ("flash_attn_varlen_func(q, k, v, ends, ends, 6, 6)", "Packed tensors have no batch dimension."),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends.long(), ends, 6, 6)", "`cu_seqlens.int()`"),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends[::2], ends[::2], 10, 10)", "`cu_seqlens.contiguous()`"),
    ("flash_attn_varlen_func(tokens, tokens, tokens, [0, 4, 10], ends, 6, 6)", "Make it an int32 tensor."),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends + 1, ends, 6, 6)", "Cumulative lengths start at 0."),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends[:2], ends[:2], 6, 6)", "All tokens belong to a sequence; cut q, k and v."),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends[[0, 2, 1]], ends, 6, 6)", "Give cumulative lengths, not lengths."),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends, ends[[0, 2]], 6, 10)", "As many key sequences as query sequences."),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends, ends, 5, 6)", "Give the longest length or more."),
    ("flash_attn_varlen_func(tokens, tokens, tokens, ends, ends, 6, 6, block_table=ends)", "With `block_table`, k and v are pages."),
    ("flash_attn_qkvpacked_func(q)", "`torch.stack([q, k, v], dim=2)`"),
    ("flash_attn_kvpacked_func(q, k)", "`torch.stack([k, v], dim=2)`"),
)
CACHES = (
    ("flash_attn_with_kvcache(q, cache, cache, k, v, cache_seqlens=8)", "A larger cache, or fewer new keys."),
    ("flash_attn_with_kvcache(q, cache, cache, k, v)", "`cache_seqlens`: the keys in use before the call."),
    ("flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([3, 4]))", "`cache_seqlens.int()`"),
    ("flash_attn_with_kvcache(q, cache, cache, cache_seqlens=33, block_table=table)", "More pages in the table."),
    ("flash_attn_with_kvcache(q, cache, cache, cache_seqlens=20, block_table=table + 1)", "Only entries that no key needs may be wrong."),
    ("flash_attn_with_kvcache(q, cache, cache, k, v, cache_seqlens=4, block_table=table[[0, 0]])", "Copy a page before two append to it."),
    (
        "i = torch.tensor([1, 1], dtype=torch.int32); flash_attn_with_kvcache(q, cache, cache, k, v, cache_seqlens=4, cache_batch_idx=i)",
        "A row of its own for each.",
    ),
    ("flash_attn_with_kvcache(q, cache[:, :9], cache[:, :9], block_table=table)", "Pages of 16, 32, 48, ... rows."),
    ("flash_attn_with_kvcache(q, cache.half(), cache.half())", "A cache in the dtype of the model."),
    ("flash_attn_with_kvcache(q, cache, cache, rotary_cos=q, rotary_sin=q)", "Rotate q and k before, as in training."),
    ("flash_attn_with_kvcache(q, cache, cache, num_splits=4)", "Leave it out."),
    ("flash_attn_with_kvcache(q.requires_grad_(), cache, cache)", "`torch.no_grad()`; train with `flash_attn_func`."),
    (
        "flash_attn_varlen_func(tokens, cache, cache, ends, ends, 6, 6, dropout_p=0.1, block_table=table)",
        "Dropout is for training: on the whole sequence.",
    ),
    (
        'explain(flash_attn_with_kvcache, q.to("meta"), cache.to("meta"), cache.to("meta"))',
        "Name the backend: meta tensors have no device to choose by.",
    ),
    ("huggingface.mask_for(1, 4, 8, q_offset=6)", "Give the layer all keys up to its last query."),
)
OTHERS = (
    (
        "huggingface.attention(layer, q, q, q, None, is_causal=False, dropout=1.0)",
        "A probability below 1 in the model's configuration.",
    ),
    (
        "huggingface.attention(layer, q, q, q, None, is_causal=False, block_indices=ends)",
        "Use another `attn_implementation`: the model chooses keys in a way that is not here ([models](models.md)).",
    ),
    (
        "huggingface.attention(layer, q, q, q, q)",
        "No 4-d `attention_mask`; a 2-d one or None ([documents](migration.md#from-hugging-face-transformers)).",
    ),
    (
        "huggingface.mask_for(2, 4, 4, attention_mask=torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))",
        "Padding on the left or on the right ([padded batches](migration.md#padded-batches)).",
    ),
    (
        "DashCoreAttention(SimpleNamespace(attention_dropout=0.1), 1, None, 'self')",
        "`attention_dropout=0.0` in Megatron's `TransformerConfig` ([Megatron-Core](migration.md#from-megatron-core)).",
    ),
    (
        "use_dash_attn(SimpleNamespace(core_attention=None))",
        "The `ModuleSpec` of a layer or a block, as Megatron's functions return it.",
    ),
    (
        "scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4))",
        "A boolean mask; a bias of 0 and -inf is `bias == 0`.",
    ),
    ("scaled_dot_product_attention(q, q[:, :5], q[:, :5])", "`enable_gqa=True`; the layout here is (batch, heads, length, head dim)."),
    (
        "torch.autograd.grad(flash_attn_func(x, x, x).sum(), x, create_graph=True)[0].sum().backward()",
        "First gradients only: no gradient penalty, no Hessian.",
    ),
    ("torch.func.grad(lambda x: flash_attn_func(x, x, x).sum())(q)", "`torch.autograd.grad`; `torch.func` is not supported."),
    ("torch.jit.trace(lambda x: flash_attn_func(x, x, x), (q,))", "`torch.compile` or `torch.export`."),
)
SHARED = (
    ("context_parallel_attention(q, k, v)", "A rank has as many keys as queries: its rows of one sequence."),
    ("context_parallel_attention(q, q, q, ulysses=2)  # on one rank", "A factor of the number of ranks."),
    ('context_parallel_attention(q, q, q, sharding="striped")', "`zigzag` suits causal masks."),
    ("context_parallel_attention(q, q, q, sharding=Sharding((5, 5), (0, 1)))  # on one rank", "As many owners as there are ranks."),
    ('context_parallel_attention(q, q, q, group="cp")', '`mesh["cp"]`'),
    ("context_parallel_attention(q, q, q, cu_seqlens=(0, 7))", "The last number is how many rows all ranks have together."),
    ("context_parallel_attention(q, q, q, cu_seqlens=(0, 7, 5, 10))", "Documents follow each other."),
    ("context_parallel_attention(q, q, q, cu_seqlens=(0, 10), mask=Documents((10,)))", "One of the two."),
    ("Sharding.by_document((100, 200), 4)", "Fewer ranks, or another sharding."),
    ("Sharding.zigzag(1001, 4)", "Pad, or choose the lengths of chunks."),
    ("Sharding.zigzag(1000, 4).check(Problem(Causal(), 1000, 1000))", "Pad, or choose the lengths of chunks."),
    ("Sharding((128, 128), (0, 2))", "Count owners from 0 and leave none out."),
    ("unshard(x)", "`unshard(x.detach())`"),
    ("shard(q, dim=4)", "The dimension of the sequence: 1 in (batch, length, heads, head dim)."),
)
MISUSE = {
    "Tensors": TENSORS,
    "Options": OPTIONS,
    "Masks": MASKS,
    "Schedules, accumulation and backends": CHOICES,
    "Packed sequences and packed tensors": PACKED,
    "Caches of keys and values": CACHES,
    "Sequences that ranks share": SHARED,
    "Other doors": OTHERS,
}
ACCEPTED = (
    "flash_attn_func(q[:0], k[:0], v[:0]).shape",
    "flash_attn_func(q[:, :0], k, v).shape",
    "flash_attn_func(q, k[:, :0], v[:, :0]).abs().max().item()",
    "flash_attn_func(q, k[:, :0], v[:, :0], return_lse=True)[1].max().item()",
    "flash_attn_func(q, k[:, :4], v[:, :4], causal=True)[:, 0].abs().max().item()",
    "flash_attn_varlen_func(tokens, tokens, tokens, ends[[0, 0, 1, 2]], ends[[0, 0, 1, 2]], 6, 6).shape",
)
