"""The reference block-table path: c tokens a latent frame, blocks of bs tokens, neither dividing the other."""

import pytest
import torch

from attention_backend import AttentionMetadataState, AttentionSpec, select_backend

HEADS, HEAD_DIM = 2, 16


def backend(dtype=torch.float32):
    return select_backend("sdpa", AttentionSpec("self", HEADS, HEAD_DIM, dtype, "cpu", needs={"paged_kv", "lse"}))


def tokens(num, seed):
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num, HEADS, HEAD_DIM, generator=gen) for _ in "qkv")


def write(pool, block_table, first_token, rows):
    """Token t of a session lives in block block_table[t // bs] at offset t % bs."""
    block_size = pool.shape[1]
    for i, row in enumerate(rows):
        block, offset = divmod(first_token + i, block_size)
        pool[block_table[block], offset] = row


def pools(num_blocks, block_size, poison):
    return tuple(torch.full((num_blocks, block_size, HEADS, HEAD_DIM), poison) for _ in "kv")


def assert_equals_dense(oracle, q, k, v, out, lse):
    expected, expected_lse = oracle(q, k, v, HEAD_DIM**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize(
    "frame, frames, block_size", [(24, 3, 16), (24, 1, 16), (24, 2, 24), (24, 3, 1), (1560, 1, 16)]
)
def test_frames_that_blocks_do_not_divide_equal_dense(make_case, check, frame, frames, block_size, host_lens, causal):
    q_len = min(frame, 64)
    case = make_case("paged", [q_len], [frame * frames], block_size=block_size, host_lens=host_lens)
    check(case, causal=causal)


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_a_denoising_forward_continues_in_the_tail_block_of_the_history(oracle, poison):
    """c 24, bs 16: a committed frame fills blocks 5 and half of 2; the chunk's first slot is block 2, offset 8."""
    frame, block_size, table = 24, 16, [5, 2, 7]
    k_pool, v_pool = pools(9, block_size, poison)
    _, k_history, v_history = tokens(frame, seed=1)
    q, k_chunk, v_chunk = tokens(frame, seed=2)
    for pool, history, chunk in ((k_pool, k_history, k_chunk), (v_pool, v_history, v_chunk)):
        write(pool, table, 0, history)
        write(pool, table, frame, chunk)
    assert torch.equal(k_pool[2, 8], k_chunk[0]) and torch.equal(k_pool[7, 15], k_chunk[23])

    metadata = AttentionMetadataState().paged_kv("self", [table + [0, 0]], [2 * frame], block_size, "cpu")
    denoised = backend().forward(q[None], k_pool[None][0], v_pool, metadata, return_lse=True)
    assert_equals_dense(
        oracle, q, torch.cat([k_history, k_chunk]), torch.cat([v_history, v_chunk]), denoised[0][0], denoised[1][0]
    )
    # The commit writes the same rows to the same slots and reads the same keys.
    for pool, chunk in ((k_pool, k_chunk), (v_pool, v_chunk)):
        write(pool, table, frame, chunk)
    committed = backend().forward(q[None], k_pool, v_pool, metadata, return_lse=True)
    assert torch.equal(denoised[0], committed[0]) and torch.equal(denoised[1], committed[1])


@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize("poison", [float("nan"), 1e4])
@pytest.mark.parametrize("where", ["null block", "tail of the last block", "block of the table's tail"])
def test_what_no_session_wrote_changes_nothing(make_case, check, where, poison, host_lens):
    case = make_case("paged", [5, 5], [24, 40], block_size=16, poison=0.0, host_lens=host_lens)
    clean = check(case)
    table = case.metadata.block_table
    for pool in (case.k, case.v):
        if where == "null block":
            pool[0] = poison
        elif where == "tail of the last block":
            pool[table[0, 1], 8:] = poison
            pool[table[1, 2], 8:] = poison
        else:
            pool[-1] = poison if (table == len(pool) - 1).sum() == 0 else pool[-1]
    if where == "block of the table's tail":
        spare = [torch.cat([pool, torch.full_like(pool[:1], poison)]) for pool in (case.k, case.v)]
        case.k, case.v = spare
        table[0, 2:] = len(case.k) - 1
    out, lse = check(case)
    assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])


def test_a_recycled_block_that_held_nan_is_clean_where_it_was_rewritten(oracle):
    k_pool, v_pool = pools(4, 16, 0.0)
    k_pool[2], v_pool[2] = float("nan"), float("nan")  # left by another session
    q, k, v = tokens(24, seed=3)
    for pool, rows in ((k_pool, k), (v_pool, v)):
        write(pool, [1, 2], 0, rows)
    metadata = AttentionMetadataState().paged_kv("self", [[1, 2, 0]], [24], 16, "cpu")
    out, lse = backend().forward(q[None], k_pool, v_pool, metadata, return_lse=True)
    assert_equals_dense(oracle, q, k, v, out[0], lse[0])


@pytest.mark.parametrize("entry", [-1, 10_000])
def test_table_entries_past_the_last_used_block_are_never_read(make_case, check, entry):
    for host_lens in (True, False):
        case = make_case("paged", [5, 5], [24, 40], block_size=16, host_lens=host_lens)
        case.metadata.block_table[0, 2:] = entry
        check(case)


def test_pools_may_be_views_of_one_tensor(make_case, check):
    case = make_case("paged", [5, 5], [24, 40], block_size=16)
    both = torch.stack([case.k, case.v], dim=1)
    case.k, case.v = both[:, 0], both[:, 1]
    check(case)
