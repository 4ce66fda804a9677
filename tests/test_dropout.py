"""The dropout mask: whose it is, how often it drops, and that oracle, kernels and backward pass share it."""

import pytest
import torch
from oracle import make

import hf_flash
from hf_flash.reference import dropout_keep, philox


def weights(backend, batch=2, heads=2, seq=48, dropout_p=0.3, packed=False, seed=None, causal=False):
    """The attention weights after dropout, (batch, heads, seq, seq), seen through v = identity."""
    if seed is not None:
        torch.manual_seed(seed)
    eye = torch.eye(seq, 64, dtype=backend.dtypes[0], device=backend.device)
    v = eye[None, :, None].expand(batch, seq, heads, 64)
    q = torch.zeros_like(v)
    if packed:
        cu = torch.arange(batch + 1, dtype=torch.int32, device=backend.device) * seq
        q, v = q.flatten(0, 1), v.flatten(0, 1)
        out = hf_flash.flash_attn_varlen_func(q, q, v, cu, cu, seq, seq, dropout_p, causal=causal)
        out = out.unflatten(0, (batch, seq))
    else:
        out = hf_flash.flash_attn_func(q, q, v, dropout_p, causal=causal)
    return out[..., :seq].transpose(1, 2).float().cpu()


def test_philox_with_seven_rounds_gives_the_published_words():
    """Two calls by hand: the function is the one of the paper, with 7 rounds."""

    def by_hand(key, counter):
        for _ in range(7):
            a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = ((b >> 32) ^ counter[1] ^ key[0], b % 2**32, (a >> 32) ^ counter[3] ^ key[1], a % 2**32)
            key = (key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32
        return counter

    for key, counter in (((0, 0), (0, 0, 0, 0)), ((2**32 - 1, 2**31 + 5), (2**32 - 1, 7, 2**31, 2**32 - 8))):
        words = philox(key, [torch.tensor([x]) for x in counter])
        assert tuple(w.item() for w in words) == by_hand(key, counter)


def test_a_part_of_the_mask_equals_that_part_of_the_whole():
    """The mask is a function of absolute indices, whatever is computed at once."""
    rng_state = torch.tensor([0x123456789ABCDEF, 77])
    whole = dropout_keep(rng_state, 0.4, range(0, 3), 2, range(0, 70), range(0, 90))
    part = dropout_keep(rng_state, 0.4, range(1, 2), 2, range(13, 61), range(25, 90))
    assert torch.equal(part, whole[1:2, :, 13:61, 25:90])
    for b, h, i, j in ((0, 0, 0, 0), (1, 1, 9, 16), (2, 0, 63, 89), (2, 1, 8, 24)):
        counter = [torch.tensor([x]) for x in (i & ~8, j & ~8, b * 2 + h, 77)]
        word = philox((0x89ABCDEF, 0x1234567), counter)[(i >> 3 & 1) * 2 + (j >> 3 & 1)]
        assert whole[b, h, i, j] == (word >= int(torch.tensor(0.4).item() * 2**32))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_backend_drops_what_the_oracle_drops(backend, packed, causal):
    """The mask of the kernels is that of the Python function, element by element."""
    got = weights(backend, packed=packed, seed=4, causal=causal) > 0
    torch.manual_seed(4)
    rng_state = torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=backend.device)
    kept = dropout_keep(rng_state, 0.3, range(2), 2, range(48), range(48)).cpu()
    assert torch.equal(got, kept.tril() if causal else kept)


def test_each_call_batch_row_and_head_has_its_own_mask(backend):
    """Row 56: two calls differ, one seed gives one mask, no two heads or rows share one."""
    first, second = weights(backend, seed=1) > 0, weights(backend) > 0
    assert not torch.equal(first, second)
    assert torch.equal(first, weights(backend, seed=1) > 0)
    masks = torch.cat([first.flatten(0, 1), second.flatten(0, 1)]).flatten(1)
    for i in range(len(masks)):
        for j in range(i):
            assert (masks[i] ^ masks[j]).float().mean() > 0.3  # independent masks differ in 0.42 of the elements


@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_p_and_the_rest_is_scaled(backend, dropout_p):
    batch = 2 if backend.name == "emulated" else 16
    kept = weights(backend, batch=batch, heads=4, dropout_p=dropout_p)
    share, n = (kept == 0).float().mean().item(), kept.numel()
    assert abs(share - dropout_p) < 5 * (dropout_p * (1 - dropout_p) / n) ** 0.5
    torch.testing.assert_close(
        kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 48 / (1 - dropout_p)), rtol=1e-2, atol=0
    )


def test_without_dropout_no_random_number_is_drawn(backend):
    """Row 59: evaluation leaves torch's generator alone and is bit-equal run to run."""
    q = make((1, 33, 2, 64), backend.dtypes[0], backend.device)
    before = torch.random.get_rng_state()
    first = hf_flash.flash_attn_func(q, q, q, 0.0, return_lse=True)[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, hf_flash.flash_attn_func(q, q, q, 0.0, return_lse=True)[0])


def test_the_mean_over_masks_is_attention_without_dropout(backend):
    rounds = 8 if backend.name == "emulated" else 200
    q, k, v = (make((1, 16, 1, 64), backend.dtypes[0], backend.device) for _ in range(3))
    q, k, v = (x.expand(rounds, -1, -1, -1) for x in (q, k, v))
    mean = hf_flash.flash_attn_func(q, k, v, 0.2).float().mean(0)
    plain = hf_flash.flash_attn_func(q[:1], k[:1], v[:1])[0].float()
    assert (mean - plain).abs().max() < 6 * 0.5 / rounds**0.5
