"""Prompts in a pool: what is written and what is refused."""

import dataclasses

import pytest
import torch

from visual_gen.models.wan import TextPool
from visual_gen.models.wan.text_pool import pooled
from visual_gen.modules.lora import LoRALinear, LowRank

C, (H, W), L = 4, (4, 6), 7


def prompt(model, seed=0, length=L):
    return torch.randn(length, model.config.text_dim, generator=torch.Generator().manual_seed(seed))


def slot_rows(pool, slot):
    """K and V of every layer that a slot's reader sees."""
    (start,), (length,) = pool.extents([slot])
    return [x[start : start + length] for x in (*pool.keys, *pool.values)]


@pytest.mark.parametrize("cross_kv", ["padded", "packed"])
@pytest.mark.parametrize("n", [0, 1, 5, 6, L, None])
def test_a_slot_holds_what_project_text_gives(make_model, cross_kv, n):
    """In a pool with room for more, behind another prompt; rows past the real ones do not count, whatever they hold."""
    model = make_model(attention={"cross_kv": cross_kv})
    pool, text = model.new_text_pool(3, L + 2), prompt(model)
    model.write_text(pool, 2, prompt(model, seed=1))
    expected = pooled(model.project_text(text[None], None if n is None else [n])).pool
    if n is not None:
        text[n:] = torch.nan
    model.write_text(pool, 1, text, n)
    assert pool.extents([1])[1] == expected.extents([0])[1]
    for found, same in zip(slot_rows(pool, 1), slot_rows(expected, 0), strict=True):
        torch.testing.assert_close(found, same, rtol=0, atol=1e-5)
    for x in (*pool.keys, *pool.values):
        assert not x[: L + 2].any() and not x[2 * (L + 2) - 2 : 2 * (L + 2)].any(), "rows of no prompt"


def test_a_lora_on_the_projection_counts(make_model):
    model, outs = make_model(), []
    pool, text, width = model.new_text_pool(1, L), prompt(model), model.config.hidden_size
    for with_lora in (False, True):
        if with_lora:
            linear = LoRALinear.around(model.blocks[1].cross_text.to_kv)
            linear.add("a", [LowRank(0, torch.randn(2, width), torch.randn(width, 2))], 1.0)
            model.blocks[1].cross_text.to_kv = linear
        model.write_text(pool, 0, text, 5)
        outs.append([x.clone() for x in slot_rows(pool, 0)])
    changed = [not torch.equal(*pair) for pair in zip(*outs, strict=True)]
    assert changed == [False, True, False, False, False, False]
    for found, same in zip(outs[1], slot_rows(pooled(model.project_text(text[None], [5])).pool, 0), strict=True):
        torch.testing.assert_close(found, same, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cross_kv", ["padded", "packed"])
def test_a_forward_over_slots_is_one_over_projected_text(make_model, make_text, write_text, make_contiguous, cross_kv):
    model = make_model(attention={"cross_kv": cross_kv})
    pool = model.new_text_pool(4, 9)
    sides = [pool.keys[0].untyped_storage().data_ptr(), pool.values[0].untyped_storage().data_ptr()]
    assert sides[0] != sides[1], "tiles of one would reach into the other"
    addresses = [x.data_ptr() for x in (*pool.keys, *pool.values)]
    write_text(model, pool, 3, 5)
    write_text(model, pool, 1, 3, seed=1)
    x, timestep = torch.randn(2, C, 2, H, W), torch.zeros(2)
    cache = make_contiguous(model, 2, 4)
    with cache.begin(2) as chunk:
        out = model(x, timestep, kv=cache.batch(chunk), text_kv=pool.rows([3, 1]))
    for row, (n, seed) in enumerate(((5, 0), (3, 1))):
        cache = make_contiguous(model, 1, 4)
        with cache.begin(2) as chunk:
            alone = model(x[row, None], timestep[:1], kv=cache.batch(chunk), text_kv=make_text(model, (n,), seed=seed))
        torch.testing.assert_close(out[row, None], alone, rtol=0, atol=1e-5)
    assert addresses == [x.data_ptr() for x in (*pool.keys, *pool.values)]
    assert pool.num_bytes == 3 * 2 * 4 * 9 * 24 * 4


def test_the_bits_of_a_prompt_do_not_depend_on_slot_or_neighbours(make_model):
    model = make_model()
    alone, full = model.new_text_pool(1, L), model.new_text_pool(3, L)
    for seed, slot in enumerate((1, 0, 2, 1)):
        model.write_text(full, slot, prompt(model, seed), 4 + seed % 2)
    model.write_text(alone, 0, prompt(model, 3), 5)
    assert all(map(torch.equal, slot_rows(alone, 0), slot_rows(full, 1)))


def test_k_v_with_gradients_leave_the_pool_without(make_model):
    pool = make_model().new_text_pool(1, L)
    pool.write(0, *([torch.ones(3, 2, 12, requires_grad=True)] * 3 for _ in "kv"))
    assert pool.keys[0].sum() == 72 and not pool.keys[0].requires_grad


def test_k_v_of_another_form_are_refused(make_model):
    pool = make_model().new_text_pool(2, L)
    good = [torch.ones(3, 2, 12)] * 3
    for keys, values, says in [
        (good[:1], good[:1], "1 and 1 layers.*expected 3 layers of"),
        (good, good[:2], "3 and 2 layers"),
        ([x.double() for x in good], good, "float64"),
        ([x[:, :1] for x in good], good, r"\(3, 1, 12, torch.float32\)"),
        (good, [x[:2] for x in good], r"\(2, 2, 12, torch.float32\)"),
        ([], [], "0 and 0 layers"),
        ([x[:0] for x in good], [x[:0] for x in good], "repeats is 2 of 0 rows"),
    ]:
        with pytest.raises(ValueError, match=says):
            pool.write(0, keys, values, repeats=2)
    with pytest.raises(ValueError, match="repeats is -1"):
        pool.write(0, good, good, repeats=-1)
    assert not any(x.any() for x in (*pool.keys, *pool.values))


def test_what_is_refused_before_anything_is_written(make_model, make_text):
    model = make_model()
    pool, text = model.new_text_pool(2, L), prompt(model)
    heads = make_model(dataclasses.replace(model.config, num_attention_heads=1, attention_head_dim=24))
    layers = make_model(dataclasses.replace(model.config, num_layers=2))
    packed = make_model(attention={"cross_kv": "packed"})
    viewed = pooled(make_text(model, (5,))).pool
    for call, says in [
        (lambda: heads.write_text(pool, 0, text), r"pool holds heads, head_dim \(2, 12\).*this model has \(1, 24\)"),
        (lambda: make_model(dtype=torch.bfloat16).write_text(pool, 0, text), "torch.float32 on cpu; this model has"),
        (lambda: layers.write_text(pool, 0, text), "the text pool has 3 layers.*this model has 2.*new_text_pool"),
        (lambda: packed.write_text(pool, 0, text), "in mode 'padded', this model has 3 in mode 'packed'"),
        (lambda: model.write_text(viewed, 0, text), "shows the rows of a TextKV: write into one that new_text_pool"),
        (lambda: model.write_text(pool, 2, text), "slot is 2; the text pool has slots 0 to 1"),
        (lambda: model.write_text(pool, True, text), "slot is True"),
        (lambda: model.write_text(pool, 0, text[None]), r"text has shape \(1, 7, 10\); expected \[L, text_dim 10\]"),
        (lambda: model.write_text(pool, 0, text[:, :9]), r"text has shape \(7, 9\)"),
        (lambda: model.write_text(pool, 0, text, 8), "text_len.* is 8; it must be between 0 and 7"),
        (lambda: model.write_text(pool, 0, text, torch.tensor(5)), r"text_len.* is tensor\(5\)"),
        (lambda: model.write_text(pool, 0, prompt(model, length=8), 3), "the text has 8 rows, a slot of the pool 7"),
        (lambda: packed.write_text(packed.new_text_pool(1, 4), 0, text, 5), "the text has 5 rows, a slot of the pool"),
        (lambda: pool.rows([0, -1]), "slot is -1"),
        (lambda: model.new_text_pool(0, 7), "slots is 0"),
        (lambda: TextPool(model.config, 1, 7, cross_kv="packed_pad_exact"), "packed_pad_exact"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()
    assert not any(x.any() for x in (*pool.keys, *pool.values))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_v_that_are_not_finite_are_refused_and_the_old_text_still_serves(make_model, device, dtype, bad):
    model = make_model(dtype=dtype).to(device)
    pool = model.new_text_pool(2, L)
    model.write_text(pool, 1, prompt(model).to(device), 3)
    before = [x.clone() for x in slot_rows(pool, 1)]

    def refused(text):
        with pytest.raises(ValueError, match="slot 1 hold NaN or infinity: the encoder's output is damaged"):
            model.write_text(pool, 1, text.to(device), 6)
        assert all(map(torch.equal, slot_rows(pool, 1), before))

    text = prompt(model, seed=1)
    text[5, 2] = bad
    refused(text)
    # One number in the last layer's values.
    model.blocks[-1].cross_text.to_kv.bias[-1] = bad
    refused(prompt(model, seed=1))
