"""Making the rows of a cache where the device has little memory left."""

import gc
import weakref

import pytest
import torch

from attention_backend.kv_cache import KVCacheError
from attention_backend.kv_cache.rows import LayerRows

SHAPE = (3, 4, 2, 8)


@pytest.fixture
def device(monkeypatch):
    """Counts what is allocated, and has no room for the tensors in `full`."""

    class Device:
        calls, full = 0, ()
        zeros = staticmethod(torch.zeros)

    def zeros(*args, **kwargs):
        Device.calls += 1
        if Device.calls in Device.full:
            raise torch.OutOfMemoryError("out of memory")
        return Device.zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    return Device


def test_caches_that_nobody_has_any_more_make_room(device):
    class Cache:
        pass

    cache = Cache()
    cache.itself, gone = cache, weakref.ref(cache)
    del cache
    gc.disable()
    try:
        device.full = (3,)
        rows = LayerRows(2, SHAPE, torch.float32, torch.device("cpu"))
    finally:
        gc.enable()
    assert gone() is None
    assert device.calls == 3 + 4 and [len(layer) for layer in rows.layers] == [2, 2]
    assert all(x.shape == SHAPE and not x.any() for layer in rows.layers for x in layer)


def test_a_full_device_is_told_with_what_was_asked_for(device):
    device.full = (2, 4)
    with pytest.raises(KVCacheError, match=r"2 layers of shape \(3, 4, 2, 8\) in torch.float32 take 0.00 GiB, for"):
        LayerRows(2, SHAPE, torch.float32, torch.device("cpu"))
    assert device.calls == 4


def test_enough_room_is_looked_for_once(device):
    LayerRows(2, SHAPE, torch.float32, torch.device("cpu"))
    assert device.calls == 4


@pytest.mark.gpu
def test_a_cache_that_a_gpu_cannot_hold_is_refused():
    with pytest.raises(KVCacheError, match="take 1464.84 GiB, for which cuda has no room: make the cache for fewer"):
        LayerRows(1, (1_000_000, 128, 12, 256), torch.bfloat16, torch.device("cuda"))
