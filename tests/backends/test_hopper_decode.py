"""The way of a call with a cache from Python to its launches, on a driver that launches nothing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Full, Window
from dash_attn.call.kv_cache import CacheCall
from dash_attn.call.offsets import SequenceOffsets
from dash_attn.call.options import AttentionOptions
from dash_attn.masks import Prefix

decode = import_module("dash_attn.backends.hopper.calls.decode")
kernel_names = import_module("dash_attn.backends.hopper.calls.kernel_names")
recently_used = import_module("dash_attn.backends.kept")
trouble = import_module("dash_attn.backends.hopper.driver.trouble")
parameters = import_module("dash_attn.backends.hopper.driver.parameters")
OPTIONS = AttentionOptions(Causal(), 0.125)


@dataclass
class Driver:
    """Notes what would have been launched."""

    launched: list[tuple[str, int]] = field(default_factory=list)
    boxes: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def load(self, device: int, header: str, name: str, threads: int, shared_bytes: int) -> Any:
        self.loaded.append(name)
        return Kernel(self, name)


@dataclass
class Kernel:
    driver: Driver
    name: str

    def prepare(self, grid: int, addresses: list[int]) -> Kernel:
        assert grid > 0
        assert all(addresses)
        return Kernel(self.driver, f"{self.name.split('<')[0]} {grid}")

    def on(self, stream: Any) -> None:
        name, grid = self.name.split()
        self.driver.launched.append((name, int(grid)))


class NothingToReset:
    @staticmethod
    def cuMemsetD32Async(*_: Any) -> tuple[int]:
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()

    class Map:
        address = 1

        def __init__(self, tensor: Tensor, rows: int, columns: int = 64) -> None:
            driver.boxes.append(rows)
            driver.columns.append(columns)

        def point_to(self, pointer: int) -> None:
            assert pointer % 16 == 0

    monkeypatch.setattr(kernel_names, "load_kernel", driver.load)
    for name, value in {
        "sm_count": lambda index: 132,
        "TensorMap": Map,
        "current_stream": lambda index: 0,
        "raise_if_troubled": lambda: None,
        "_calls": recently_used.Kept(8),
        "on_device": lambda index: nullcontext(),
        "device_index": lambda device: 0,
        "report_address": lambda: 0,
        "cuda_driver": NothingToReset,
        "CLUSTERS": (),
    }.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def only_call() -> Any:
    (call,) = decode._calls.values.values()
    return call


def test_rows_of_a_plain_cache(driver: Driver) -> None:
    call = CacheCall(half(3, 1, 32, 128), half(5, 1000, 8, 128), half(5, 1000, 8, 128), OPTIONS, cache_seqlens=numbers(7, 8, 9))
    out, lse = decode.attention_with_cache(call)
    assert (out.shape, lse.shape, lse.dtype) == ((3, 1, 32, 128), (3, 32, 1), torch.float32)
    assert driver.launched == [("attention_decode", 3 * 8)]
    assert driver.boxes == [128, 128], "one box per KV tile"
    assert driver.loaded == ["attention_decode<bf16, 128, false>"]
    params = only_call().params
    assert (params.group, params.row_tiles, params.q_len, params.cache.capacity, params.cache.count) == (4, 1, 1, 1000, 5)
    assert (params.window_left, params.window_right) == (-1, 0)
    assert list(params.q_strides) == list(call.q.stride()[:3])


def test_pages_and_new_keys(driver: Driver) -> None:
    """Rows of all query heads of a group share units: 5 queries of 16 heads are 80 rows, in two units."""
    table = torch.zeros(2, 9, dtype=torch.int32)
    given = CacheCall(half(2, 5, 32, 64), half(40, 48, 2, 64), half(40, 48, 2, 64), OPTIONS, half(2, 5, 2, 64), half(2, 5, 2, 64))
    given = given._replace(cache_seqlens=numbers(7, 8), block_table=table)
    for _ in range(2):
        decode.attention_with_cache(given)
    assert driver.launched == 2 * [("append_to_cache", 10), ("attention_decode", 2 * 2 * 2)]
    assert driver.boxes == [16, 16], "48 and 128 have 16 rows in common"
    call = only_call()
    cache = call.params.cache
    assert (cache.capacity, cache.page_size, cache.page_stride, cache.added, cache.count) == (9 * 48, 48, 9, 5, 40)
    assert cache.pages == table.data_ptr()
    append = call.append.params
    assert (append.cache.lengths, append.entries, list(append.dims)) == (cache.lengths, 9, [64, 64])
    assert list(append.k_cache_strides) == list(given.k_cache.stride()[:3])
    assert append.owners


def test_a_number_for_all_lengths_is_no_new_call(driver: Driver) -> None:
    call = CacheCall(half(2, 1, 4, 128), half(2, 100, 4, 128), half(2, 100, 4, 128), OPTIONS, half(2, 1, 4, 128), half(2, 1, 4, 128))
    for length in (3, 4):
        decode.attention_with_cache(call._replace(cache_seqlens=length))
        params = only_call().params
        assert (params.cache.length, params.cache.lengths) == (length, None)
        assert only_call().append.params.cache.length == length
    assert only_call().append.params.owners is None, "every sequence has a row of its own"


def test_few_units_are_served_by_clusters(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 8 rows then, and every CTA of a cluster loads its columns of V: the fewer, the fewer units there are."""
    given = CacheCall(half(2, 3, 32, 128), half(2, 1000, 8, 128), half(2, 1000, 8, 128), OPTIONS, cache_seqlens=numbers(7, 8))
    few, many = (128, 16, 31), (128, 64, 33)
    for columns, clusters in ((16, [(128, 16, 32), many]), (32, [few, (128, 32, 32), many]), (64, [few, (128, 32, 31), many])):
        monkeypatch.setattr(decode, "CLUSTERS", tuple(clusters))
        decode.attention_with_cache(given)
        assert driver.loaded[-1] == f"attention_decode_cluster<bf16, 128, {columns}, false>"
        assert driver.launched[-1] == ("attention_decode_cluster", 2 * 8 * 2 * 128 // columns), "12 rows: two units"
        assert driver.columns[-2:] == [64, columns]
        assert [call.params.row_tiles for call in decode._calls.values.values()][-1] == 2
    for clusters in ((few,), ((64, 16, 100),)):
        monkeypatch.setattr(decode, "CLUSTERS", clusters)
        decode.attention_with_cache(given)
        assert driver.launched[-1] == ("attention_decode", 16)
        assert driver.columns[-2:] == [64, 64]


def test_packed_queries(driver: Driver) -> None:
    offsets = SequenceOffsets(numbers(0, 60, 70), numbers(0, 90, 110), 60, 90)
    call = CacheCall(half(70, 6, 128), half(9, 16, 2, 128), half(9, 16, 2, 64), OPTIONS, cache_seqlens=numbers(90, 20), offsets=offsets)
    out, lse = decode.attention_with_cache(call._replace(block_table=torch.zeros(2, 6).int()))
    assert (out.shape, lse.shape) == ((70, 6, 64), (6, 70))
    assert driver.launched == [("attention_decode", 2 * 2 * 3)], "60 queries of 3 heads: 180 rows, three units"
    params = only_call().params
    assert (params.tokens, params.q_len, params.count, list(params.q_strides)) == (70, 60, 2, [0, 6 * 128, 128])
    assert params.cu_q == offsets.cu_seqlens_q.data_ptr()


def test_no_queries_still_append(driver: Driver) -> None:
    call = CacheCall(half(2, 0, 4, 128), half(2, 100, 4, 128), half(2, 100, 4, 128), OPTIONS, half(2, 3, 4, 128), half(2, 3, 4, 128))
    out, _ = decode.attention_with_cache(call)
    assert out.shape == (2, 0, 4, 128)
    assert driver.launched == [("append_to_cache", 6)]


def test_windows(driver: Driver) -> None:
    assert decode.window_of(Full()) == (-1, -1)
    assert decode.window_of(Window(5, -1)) == (5, -1)
    assert decode.window_of(Window(2**31 - 1, 3)) == (2**29, 3)
    with pytest.raises(decode.Unsupported, match="a full or causal mask or a window; got prefix:4"):
        decode.window_of(Prefix(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 1, 4, 128)}, "takes bfloat16 and float16"),
        ({"q": half(2, 1, 4, 20), "k_cache": half(2, 64, 4, 20)}, "multiples of 8; got k_cache"),
        ({"v_cache": half(2, 64, 4, 12)}, "multiples of 8; got v_cache"),
        ({"k_cache": half(2, 64, 4, 132)[..., :128]}, "reads caches where they lie"),
        ({"k_cache": half(2, 64, 128, 4).transpose(2, 3)}, "reads caches where they lie"),
        ({"q": half(2, 1, 4, 320), "k_cache": half(2, 64, 4, 320)}, "head dims up to 256"),
    ],
)
def test_refused(driver: Driver, change: dict[str, Tensor], message: str) -> None:
    tensors: dict[str, Any] = {"q": half(2, 1, 4, 128), "k_cache": half(2, 64, 4, 128), "v_cache": half(2, 64, 4, 128), **change}
    with pytest.raises(decode.Unsupported, match=message):
        decode.attention_with_cache(CacheCall(**tensors, options=OPTIONS, cache_seqlens=3))
    assert driver.launched == []


def test_padding_and_pages_do_not_go_together(driver: Driver) -> None:
    call = CacheCall(half(2, 1, 4, 128), half(8, 16, 4, 128), half(8, 16, 4, 128), OPTIONS, cache_seqlens=numbers(4, 5))
    call = call._replace(cache_leftpad=numbers(1, 2), block_table=torch.zeros(2, 4).int())
    with pytest.raises(decode.Unsupported, match="takes cache_leftpad without block_table"):
        decode.attention_with_cache(call)


def test_what_a_kernel_says_of_a_cache() -> None:
    for what, text in (
        (parameters.Trouble.CacheLength, "cache_seqlens is 9 for sequence 4"),
        (parameters.Trouble.CachePadding, "cache_leftpad is 9 for sequence 4"),
        (parameters.Trouble.CachePosition, "first_position is 9 for sequence 4"),
        (parameters.Trouble.CacheRow, "cache_batch_idx is 9 for sequence 4"),
        (parameters.Trouble.CachePage, "entry 9 of sequence 4 in block_table is not a page"),
        (parameters.Trouble.CacheShared, "page or row 9 of the cache is appended to by sequence 4 and by another one"),
    ):
        assert text in trouble._message(what, 0, 4, 9)
