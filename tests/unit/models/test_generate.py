import pytest
import torch

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.models.generate import sample
from narrowgauge.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=61, layers=2, width=32, heads=4, kv_heads=2, context=32, init_std=0.3)


@pytest.fixture(params=["rope", "learned"])
def model(request) -> GPT:
    return GPT(CONFIG.replace(positions=request.param), generator=torch.Generator().manual_seed(0))


def by_full_forwards(model: GPT, ids: torch.Tensor, n: int, pick) -> torch.Tensor:
    for _ in range(n):
        ids = torch.cat((ids, pick(model(ids)[0][:, -1])[:, None]), 1)
    return ids


def test_greedy_generation_with_the_cache_equals_full_forwards(model):
    ids = torch.randint(0, 61, (3, 5))
    assert torch.equal(model.generate(ids, 27, temperature=0), by_full_forwards(model, ids, 27, lambda x: x.argmax(-1)))


def test_sampling_with_the_cache_equals_full_forwards_and_repeats_for_a_seed(model):
    ids = torch.randint(0, 61, (2, 4))
    generator = torch.Generator().manual_seed(3)
    expected = by_full_forwards(model, ids, 20, lambda x: sample(x, 0.8, 5, generator))
    for _ in range(2):
        got = model.generate(ids, 20, temperature=0.8, top_k=5, generator=torch.Generator().manual_seed(3))
        assert torch.equal(got, expected)


def test_cached_logits_equal_those_of_the_whole_sequence(model):
    from narrowgauge.models.gpt import KVCache

    ids = torch.randint(0, 61, (2, 12))
    whole = model(ids)[0]
    cache = KVCache(2, 32)
    for start, end in ((0, 5), (5, 6), (6, 12)):
        logits, _ = model(ids[:, start:end], cache=cache)
        torch.testing.assert_close(logits[:, 0], whole[:, end - 1], rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="33 tokens.*context is 32"):
        model(ids.repeat(1, 2)[:, :21], cache=cache)


def test_stops_when_all_rows_have_stopped_and_pads_the_finished_ones(model):
    ids = torch.randint(0, 61, (2, 4))
    free = model.generate(ids, 20, temperature=0)
    stop_id = int(free[0, 6])  # the first row draws it third at the latest
    stopped = model.generate(ids, 20, temperature=0, stop_id=stop_id)
    for row, (a, b) in enumerate(zip(free, stopped, strict=True)):
        hits = (a[4:] == stop_id).nonzero()
        end = 4 + int(hits[0]) + 1 if len(hits) else len(a)
        assert torch.equal(a[: min(end, len(b))], b[:end]), row
        assert (b[end:] == stop_id).all()


def test_modes_are_left_as_they_were_and_no_gradients_are_recorded(model):
    model.train()
    model.blocks[0].eval()
    out = model.generate(torch.zeros(1, 1, dtype=torch.int64), 2)
    assert out.shape == (1, 3) and not out.requires_grad
    assert model.training and model.blocks[1].training and not model.blocks[0].training


def test_temperature_and_top_k_shape_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20000, 4)
    generator = torch.Generator().manual_seed(0)

    def shares(temperature, top_k):
        return sample(logits, temperature, top_k, generator).bincount(minlength=4) / 20000

    tolerance = 4 * (0.25 / 20000) ** 0.5  # four standard deviations of a share
    torch.testing.assert_close(shares(1.0, None), torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=tolerance)
    torch.testing.assert_close(shares(1.0, 2), torch.tensor([0.625, 0.375, 0, 0]), rtol=0, atol=tolerance)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(shares(0.5, 10), squared / squared.sum(), rtol=0, atol=tolerance)
    assert (sample(logits, 0, None, None) == 0).all()


def test_bad_requests_are_refused_with_a_remedy(model):
    prompt = torch.zeros(1, 30, dtype=torch.int64)
    with pytest.raises(DataError, match="30 tokens and 3 new ones.*context of 32: ask for at most 2"):
        model.generate(prompt, 3)
    with pytest.raises(DataError, match="at least one token"):
        model.generate(prompt[:, :0], 3)
    with pytest.raises(ConfigError, match="temperature=-1"):
        model.generate(prompt, 1, temperature=-1)
    with pytest.raises(ConfigError, match="top_k=0"):
        model.generate(prompt, 1, top_k=0)
    assert torch.equal(model.generate(prompt, 0), prompt)
