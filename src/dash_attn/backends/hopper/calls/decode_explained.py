"""What a call with a cache would do on this backend. Tensors on the meta device need no GPU; nothing is compiled for them."""

from __future__ import annotations

from ....call.cache_explanation import CACHE_GUARANTEES, CacheExplanation, bytes_at_most, call_in_words
from ....call.kv_cache import CachePlaces, CacheTensors
from ....call.options import AttentionOptions
from ..driver.launch import device_index
from ..support import DTYPES
from ..tiles import decode_tiles
from .decode import APPEND, Work, check_cache_call


def explain_cache(tensors: CacheTensors, places: CachePlaces, options: AttentionOptions) -> CacheExplanation:
    check_cache_call(tensors, places, options)
    work = Work.of(tensors, *tensors.q.shape[:2])
    return CacheExplanation(
        call=call_in_words(tensors, places, options),
        backend="hopper",
        guarantees=CACHE_GUARANTEES,
        kv_rows=decode_tiles(work.dim).kv_rows,
        units=work.units,
        served_by=f"each by a cluster of {work.ctas_of_unit} CTAs" if work.columns else "each by one CTA",
        new_keys=places.new,
        read_bytes=bytes_at_most(tensors, places, options),
        kernels={} if tensors.q.is_meta else _hashes(work, tensors, places, options),
    )


def _hashes(work: Work, tensors: CacheTensors, places: CachePlaces, options: AttentionOptions) -> dict[str, str]:
    """Of the machine code; what is not compiled yet is compiled."""
    names = {"decode": work.kernel(DTYPES[tensors.q.dtype], bool(options.softcap)), **({"append": APPEND} if places.new else {})}
    index = device_index(tensors.q.device)
    return {name: kernel.load(index).kernel.sha256 for name, kernel in names.items()}
