"""The Triton backend without a GPU and without Triton: who gets it, what it refuses, what it says, its tables."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import dash_attn
from dash_attn import BooleanMask, Causal, Documents, Full, Mask, Prefix, TileMap, Window, explain, flash_attn_func, flash_attn_with_kvcache
from dash_attn.backends import _backend_of_gpu, resolve
from dash_attn.backends.hopper.support import sm_count
from dash_attn.backends.kept import Kept
from dash_attn.backends.triton import mask_tables, passes, support
from dash_attn.backends.triton.launch import Launch
from dash_attn.backends.triton.mask_tables import FAR_AWAY, Masked, distances, kept_on, visit_lists
from dash_attn.backends.triton.passes import Passes, RowValues, aligned, block_of, gradient_launches, readable, strides
from dash_attn.backends.triton.support import architecture_of, check_call, check_elements, check_triton
from dash_attn.backends.triton.tiles import DIMS, PASSES, Tile, Tiles, listed, read_table, tiles_for
from dash_attn.call.call import Call, Modifiers
from dash_attn.call.offsets import SequenceOffsets
from dash_attn.call.options import AttentionOptions
from dash_attn.errors import Unsupported
from dash_attn.masks import EMPTY, FULL, PARTIAL, PatternPerHead, TilePattern
from needs_triton import needs_triton

GOLDEN = Path(__file__).parents[1] / "golden" / "triton_tiles.txt"
CUDA = torch.device("cuda", 0)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gpu(major: int, minor: int, **more: Any) -> Any:
    """A GPU of that compute capability, as PyTorch would describe it."""
    return patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(name="GPU", major=major, minor=minor, **more))


# Who gets it


@pytest.mark.parametrize(
    ("capability", "backend"), [((9, 0), "hopper"), ((8, 0), "triton"), ((8, 9), "triton"), ((10, 0), "triton"), ((12, 0), "triton")]
)
def test_auto_chooses_by_the_gpu(capability: tuple[int, int], backend: str) -> None:
    with (
        patch("torch.cuda.is_available", return_value=True),
        patch("torch.cuda.get_device_capability", return_value=capability),
        patch("dash_attn.backends._backend_of_gpu", _backend_of_gpu.__wrapped__),
    ):
        assert resolve("auto", CUDA) == backend
        assert resolve("triton", CUDA) == "triton", "a backend that is named is never replaced"
        assert resolve("auto", torch.device("cpu")) == "cpu"


def test_an_amd_gpu_is_no_hopper() -> None:
    """PyTorch calls the capability of an MI200 9.0, too."""
    with (
        patch("torch.cuda.is_available", return_value=True),
        patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        patch("torch.version.hip", "7.0"),
    ):
        assert _backend_of_gpu.__wrapped__(CUDA) == "triton"


def test_an_amd_gpu_is_refused_by_the_other_backend() -> None:
    said = r"needs an NVIDIA GPU of compute capability 9.0 .* GPU has 9.0"
    with gpu(9, 0, multi_processor_count=104), patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        assert sm_count.__wrapped__(0) == 104, "the control"
        with patch("torch.version.hip", "7.0"), pytest.raises(ValueError, match=said):
            sm_count.__wrapped__(0)


def test_cpu_tensors_are_refused() -> None:
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ValueError, match="backend 'triton' needs cuda tensors; got tensors on cpu"):
        dash_attn.flash_attn_func(q, q, q, backend="triton")


# Where it cannot run


def test_without_triton_it_says_so() -> None:
    with patch.object(support, "find_spec", return_value=None), pytest.raises(Unsupported, match=r"needs Triton, which is not installed"):
        check_triton()


def test_an_old_triton_is_named() -> None:
    with (
        patch.object(support, "find_spec", return_value=object()),
        patch.object(support, "triton_version"),
        patch.dict(sys.modules, {"triton": SimpleNamespace(__version__="3.1.0")}),
        pytest.raises(Unsupported, match=r"backend 'triton' needs triton 3.4 or later; got 3.1.0"),
    ):
        check_triton()


def test_an_old_gpu_is_named() -> None:
    said = r"needs a GPU of compute capability 8.0 or later .* GPU has 7.5"
    with gpu(7, 5), patch.object(support, "check_triton"), pytest.raises(Unsupported, match=said):
        architecture_of.__wrapped__(CUDA)
    with gpu(8, 6), patch.object(support, "check_triton"):
        assert architecture_of.__wrapped__(CUDA) == "8.6"


@needs_triton
def test_too_little_shared_memory_is_named() -> None:
    from triton.runtime.errors import OutOfResources

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(**_: Any) -> None:
                raise OutOfResources(120000, 101376, "shared memory")

            return launch

    launch = Launch("attention_forward", 1, {}, {"HEAD_DIM": 256, "VALUE_DIM": 128}, Tile(64, 32, 4, 1))
    with patch.object(Launch, "function", Kernel()), pytest.raises(Unsupported) as raised:
        launch.run()
    for words in ("120000", "101376", "shared memory", "head dim 256", "value dim 128", "64 x 32", "Smaller head dims"):
        assert words in str(raised.value)


ENDS = torch.tensor([0, 64, 128], dtype=torch.int32)
PACKED = SequenceOffsets(ENDS, ENDS, 64, 64)
TENSORS = (meta(1, 128, 2, 64),) * 3
PATTERN = TilePattern(np.array([[PARTIAL, FULL], [EMPTY, PARTIAL]], dtype=np.uint8))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float64": ({"dtype": torch.float64}, "takes bfloat16, float16 and float32; got torch.float64"),
    "head dim": ({"dim": 264}, "takes head dims up to 256; got q/k 264"),
    "scale": ({"scale": -1.0}, "takes softmax_scale > 0; got -1.0"),
    "unordered": ({"accumulation": "unordered"}, "accumulation must be 'ordered'; got 'unordered'"),
    "schedule": ({"schedule": "descending"}, "schedule must be 'auto'; got descending"),
    "packed prefix": ({"mask": Prefix(3), "packed": True}, "packed sequences on backend 'triton' take"),
    "length": ({"length": 2**29}, "takes fewer than 2\\^29 queries and keys"),
    "dropout": ({"dropout_p": 0.5}, "has no dropout yet: dropout_p must be 0; got 0.5. Backends 'cpu' and 'hopper' have it"),
    "ALiBi": ({"alibi": True}, "has no ALiBi yet: alibi_slopes must be None"),
    "packed matrix": ({"mask": PATTERN, "packed": True}, "packed sequences on backend 'triton' take"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_raises_by_name(name: str) -> None:
    given, said = REFUSED[name]
    asked = {"dtype": torch.bfloat16, "dim": 64, "scale": 1.0, "mask": Causal(), "packed": False, "length": 128, **given}
    q = meta(1, asked["length"], 2, asked["dim"], dtype=asked["dtype"])
    rest = {name: asked[name] for name in ("accumulation", "schedule", "dropout_p", "alibi") if name in asked}
    with pytest.raises(Unsupported, match=said):
        check_call(Call(q, q, q, AttentionOptions(asked["mask"], asked["scale"], **rest), PACKED if asked["packed"] else None))


def test_a_pattern_without_its_elements_is_refused() -> None:
    """Nobody may take partial blocks for empty ones."""
    per_head = PatternPerHead((PATTERN, TileMap(np.eye(2, dtype=bool), 64, 64)), np.array([[0, 1]]))
    for mask in (PATTERN, per_head):
        for modifiers in (None, Modifiers()):
            with pytest.raises(Unsupported, match="needs the elements of a boolean mask"):
                check_elements(Call(*TENSORS, AttentionOptions(mask, 1.0), modifiers=modifiers))
    whole = PatternPerHead(per_head.patterns[1:], np.array([[0]]))
    check_elements(Call(*TENSORS, AttentionOptions(whole, 1.0)))
    modifiers = Modifiers(elements=BooleanMask(np.ones((128, 128), dtype=bool)))
    check_elements(Call(*TENSORS, AttentionOptions(PATTERN, 1.0), modifiers=modifiers))


def test_a_cache_is_refused_by_name() -> None:
    q, cache = meta(1, 1, 2, 64), meta(1, 128, 2, 64)
    with pytest.raises(NotImplementedError, match=r"backend 'triton' \(cuda tensors\) cannot attend to a cache .*; 'cpu' and 'hopper' can"):
        explain(flash_attn_with_kvcache, q, cache, cache, cache_seqlens=3, backend="triton")


def test_what_it_can_do_is_not_refused() -> None:
    for mask in (Full(), Causal(), Window(3, -1), Window(3, 4), Prefix(3), Documents((64, 64)), TileMap(np.eye(2, dtype=bool), 64, 64)):
        q, v = meta(1, 128, 2, 64), meta(1, 128, 2, 256)
        check_call(Call(q, q, v, AttentionOptions(mask, 0.1, softcap=3.0, head_offset=5)))


def test_a_grid_that_is_too_large_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"fewer than 2\^31 tiles"):
        Launch("attention_forward", 2**31, {}, {}, Tile(64, 32, 4, 1))


# What it says


def test_explain_tells_tiles_order_and_promises() -> None:
    q, k = meta(2, 4096, 16, 128), meta(2, 4096, 4, 128)
    found = explain(flash_attn_func, q, k, k, causal=True, backend="triton")
    assert (found.backend, found.schedule, found.gang) == ("triton", "two passes", 1)
    assert found.guarantees == ("run-to-run", "batch-invariant", "worker-count-invariant")
    assert found.workspace_bytes == 8 * 2 * 16 * 4096
    assert set(found.passes) == {"forward", "key gradients", "query gradients", "table"}
    assert "8.0" in found.passes["table"]
    assert "key gradients" in str(found)
    assert not found.kernels, "nothing is compiled for tensors without memory"


def test_the_order_hash_names_what_decides_the_order() -> None:
    def order(length: int = 512, batch: int = 1, **options: Any) -> str:
        q, k = meta(batch, length, 4, 64), meta(batch, length, 2, 64)
        return explain(flash_attn_func, q, k, k, backend="triton", **{"causal": True, **options}).order_hash

    assert order() == order(batch=7) == order(head_offset=3)
    others = [order(640), order(causal=False), order(window_size=(5, 0))]
    blocks = [TileMap(np.array([[True, first]]), 512, 256) for first in (True, False)]
    others += [order(causal=False, mask=mask) for mask in (*blocks, Documents((500, 12)), Documents((12, 500)))]
    draws = np.random.default_rng(0).random((2, 4, 512, 512)) < 0.5
    draws[0, 1, :64, 64:128], draws[0, 2, :64, 128:192] = True, True  # other patterns with as many partial blocks
    others += [order(batch=2, causal=False, mask=BooleanMask(matrix)) for matrix in (draws[0, 0], draws[0, 1], draws[0, 2], draws)]
    assert others[-4] == order(causal=False, mask=BooleanMask(draws[1, 0])), "one pattern has one order, whatever its elements"
    assert len({order(), *others}) == len(others) + 1


def test_documents_are_explained_as_packed_sequences() -> None:
    q = meta(2, 512, 2, 64)
    assert explain(flash_attn_func, q, q, q, mask=Documents((500, 12)), backend="triton").plan_bytes == 0
    assert explain(flash_attn_func, q, q, q, mask=Prefix(100), backend="triton").plan_bytes > 0


def test_tables_of_a_boolean_mask_live_as_long_as_it() -> None:
    draws = np.random.default_rng(0).random((200, 300)) < 0.5
    mask = BooleanMask(draws)
    masked = Masked(mask.pattern, (200, 300), torch.device("cpu"), mask)
    tile = Tile(64, 32, 4, 1)
    first = masked.tables(tile, by_keys=False)
    assert masked.tables(tile, by_keys=False) is first
    other = masked.tables(tile, by_keys=True)
    assert other is not first
    assert other.blocks is first.blocks, "passes share the words"
    words = first.blocks
    assert words is not None
    assert words.dtype == torch.int64
    assert not any(table is None for table in (first.bounds, first.visits, first.places, first.matrices))
    watched = weakref.ref(words)
    del first, other, words, masked, mask
    gc.collect()
    assert watched() is None


# Tables


def words(entry: list[int] | bool) -> str:
    return " ".join(map(str, entry)) if isinstance(entry, list) else str(entry)


def test_tiles_are_those_of_the_golden_file() -> None:
    """Rows and warps decide bits. Regenerate with DASH_ATTN_UPDATE_GOLDEN=1, and say so in CHANGELOG.md under **Bits**."""
    table = read_table()
    lines = [
        f"{architecture}, {width}, head dim {dim}, {name}: {words(rows[dim][name])}"
        for architecture in sorted(table["16 bits"])
        for width, rows in (("16 bits", table["16 bits"][architecture]), ("32 bits", table["32 bits"]))
        for dim in sorted(rows, key=int)
        for name in (*PASSES, "together")
        if name in rows[dim]
    ]
    relatives = [f"{name} as {other}" for name, other in sorted(read_table()["same_as"].items())]
    others = [f"others as {read_table()['others']}", f"other AMD GPUs as {read_table()['other_amd']}"]
    text = "\n".join([*lines, *relatives, *others]) + "\n"
    if os.environ.get("DASH_ATTN_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_table_is_complete() -> None:
    table = read_table()
    assert set(table["same_as"].values()) | {table["others"]} <= set(table["16 bits"])
    for architecture in (*table["16 bits"], *table["same_as"], "7.7"):
        for dtype in support.DTYPES:
            for dim in DIMS:
                tiles = tiles_for(architecture, dtype, dim, 8)
                assert tiles == tiles_for(architecture, dtype, dim - 7, dim), "the larger of both head dims decides"
                for name in PASSES:
                    tile = getattr(tiles, name)
                    assert {tile.q_rows, tile.kv_rows} <= {16, 32, 64, 128}
                    assert tile.warps in (4, 8)
                    assert 1 <= tile.partial_stages <= tile.stages <= 4


def test_a_gpu_that_is_not_listed_takes_the_tiles_of_another() -> None:
    assert [listed(name) for name in ("8.9", "12.1", "8.7", "99.0", "gfx90a")] == ["8.9", "12.0", "8.6", "8.6", "gfx942"]


@pytest.mark.parametrize("captured", [True, False])
def test_a_captured_graph_keeps_its_tables(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others come after them: the graph has their addresses. The control: those of a call that is over go."""
    kept: Kept[Any] = Kept(3)
    monkeypatch.setattr(mask_tables, "_kept", kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kept_on(CUDA, "first", lambda: np.zeros(5))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    of_graph = weakref.ref(kept_on(CUDA, "first", lambda: np.zeros(0)))
    assert of_graph().shape == (5,), "found, not made again"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for number in range(3):
        kept_on(CUDA, number, lambda: np.zeros(5))
    gc.collect()
    assert (of_graph() is not None) == captured


def test_visit_lists_have_every_kept_tile_once() -> None:
    tile_map = np.random.default_rng(0).integers(0, 3, (9, 7)).astype(np.uint8)
    tile_map[4] = EMPTY
    bounds, visits = visit_lists(tile_map)
    for row, (a, b, c, d) in zip(tile_map, bounds, strict=True):
        assert visits[a:b].tolist() == np.flatnonzero(row == PARTIAL).tolist()
        assert visits[b:c].tolist() == np.flatnonzero(row == FULL).tolist()
        assert c == d
    assert visit_lists(np.zeros((2, 3), dtype=np.uint8))[0].tolist() == [[0] * 4] * 2


def test_distances_of_bands() -> None:
    assert distances((-1, -1)) == (FAR_AWAY, FAR_AWAY)
    assert distances((-1, 0)) == (FAR_AWAY, 0)
    assert distances((3, -1)) == (3, FAR_AWAY)
    assert distances((2**30, 4)) == (FAR_AWAY, 4)


# Tensors


def test_tensors_are_copied_only_where_kernels_could_not_read_them() -> None:
    x = torch.arange(2 * 6 * 3 * 16, dtype=torch.float32).view(2, 6, 3, 16)
    for view in (x, x[:, ::2], x[:, :, 1:], x.transpose(1, 2), x[:1].expand(4, 6, 3, 16), x[..., :8]):
        assert aligned(view) is view
    for other in (x[..., 1:9], x[..., ::2], x[:, :, :, :1].expand(2, 6, 3, 8)):
        copied = aligned(other)
        assert copied is not other
        assert torch.equal(copied, other)
        assert copied.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in copied.stride()[:-1])
    padded = aligned(x[..., :13])
    assert padded.shape[-1] == 16
    assert not padded[..., 13:].any()


def test_an_address_chooses_no_other_kernel() -> None:
    ends = torch.arange(9, dtype=torch.int32)
    assert readable(ends) is ends
    for view in (ends[1:], ends[::2]):
        copied = readable(view)
        assert copied.data_ptr() % 16 == 0
        assert copied.is_contiguous()
        assert torch.equal(copied, view)


def test_strides_are_counted_in_units() -> None:
    assert strides("q", torch.empty(2, 6, 3, 16)) == {"q_batch": 36, "q_row": 6, "q_head": 2}
    assert strides("q", torch.empty(6, 1, 16)) == {"q_batch": 0, "q_row": 2, "q_head": 0}
    assert [block_of(dim) for dim in (1, 16, 24, 64, 72, 256)] == [16, 16, 32, 64, 128, 256]


def test_programs_of_packed_sequences_have_room_for_every_tile() -> None:
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    made = Passes(Call(*(meta(1000, 4, 64),) * 3, AttentionOptions(Causal(), 0.1), SequenceOffsets(ends, ends, 1000, 1000)))
    tile = Tile(64, 32, 4, 1)
    assert made.launch("attention_forward", tile, {}).numbers["tiles"] == 1000 // 64 + 3
    assert made.launch("key_gradients", tile, {}, by_keys=True).numbers["tiles"] == 1000 // 32 + 3


def test_two_launches_become_one_where_the_table_says_so() -> None:
    def kernels(mask: Mask, together: bool = True) -> list[str]:
        tiles = Tiles("a test", Tile(64, 64, 4, 2), Tile(64, 128, 4, 2), Tile(128, 64, 4, 2), together)
        with patch.object(passes, "tiles_for", return_value=tiles):
            made = Passes(Call(meta(2, 512, 4, 128), meta(2, 512, 2, 128), meta(2, 512, 2, 128), AttentionOptions(mask, 0.1)))
            launches = gradient_launches(made, made.q, RowValues.empty(made), (made.q, made.k, made.v))
        programs.append(sum(launch.programs for launch in launches))
        return [launch.kernel for launch in launches]

    programs: list[int] = []
    assert kernels(Causal()) == kernels(Window(5, 3)) == ["gradients"]
    assert kernels(Prefix(10)) == kernels(Causal(), together=False) == ["key_gradients", "query_gradients"], "tables are of one pass"
    assert programs[0] == programs[2] == 2 * (2 * 512 // 128 + 4 * 512 // 128)


def test_one_launch_has_one_number_of_warps_and_stages() -> None:
    tile = Tile(64, 64, 4, 2)
    for other in (Tile(64, 64, 8, 2), Tile(64, 64, 4, 3)):
        assert not Tiles("a test", tile, tile, other).together
        with pytest.raises(ValueError, match="one number of warps and of stages; got 64 x 64, 4 warps"):
            Tiles("a test", tile, tile, other, True)
    assert Tiles("a test", tile, tile, Tile(32, 64, 4, 2, 2), True).together


def test_the_table_is_sorted_as_people_read_it() -> None:
    text = json.loads((Path(dash_attn.__file__).parent / "backends" / "triton" / "tiles.json").read_text(encoding="utf-8"))
    assert list(text) == ["same_as", "others", "other_amd", "32 bits", "16 bits"]
