import json

import numpy as np
import pytest
import torch

from narrowgauge.data.loader import BatchStream, TokenSplit, permutation
from narrowgauge.errors import CheckpointError, ConfigError, DataError


def make_split(lengths=(5, 1, 40, 17, 3, 22, 60, 2, 9, 31), name="train") -> TokenSplit:
    """Documents whose tokens are all different: each token says where it lies."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    return TokenSplit(tokens, offsets, 3 * len(tokens), "hash", name)


def all_sequences(stream: BatchStream, batches: int) -> torch.Tensor:
    parts = []
    for _ in range(batches):
        ids, targets = stream.next()
        assert ids.dtype is targets.dtype is torch.int64 and ids.is_contiguous() and targets.is_contiguous()
        assert torch.equal(ids[:, 1:], targets[:, :-1])
        parts.append(torch.cat((ids, targets[:, -1:]), 1))
    return torch.cat(parts)


def test_an_epoch_takes_each_sequence_of_the_joined_documents_once():
    split = make_split()
    stream = BatchStream(split, 1, 8, seed=4)
    assert stream.sequences_per_epoch == 189 // 8
    for epoch in range(3):
        rows = all_sequences(stream, stream.sequences_per_epoch)
        order = permutation(split.documents, 4, epoch, stream=0)
        joined = np.concatenate([split.tokens[split.offsets[d] : split.offsets[d + 1]] for d in order]).astype(int)
        expected = {tuple(joined[s * 8 : s * 8 + 9]) for s in range(23)}
        assert {tuple(row.tolist()) for row in rows} == expected and len(expected) == 23
        inputs = rows[:, :-1].flatten()
        assert len(inputs.unique()) == len(inputs) == 184  # no token twice


def test_orders_differ_between_epochs_and_seeds_and_repeat_for_a_seed():
    def epochs(seed):
        stream = BatchStream(make_split(), 23, 8, seed)
        return [stream.next()[0] for _ in range(3)]

    a, b, c = epochs(0), epochs(0), epochs(1)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not any(torch.equal(x, y) for x, y in ((a[0], a[1]), (a[1], a[2]), (a[0], c[0])))


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 30])
def test_resumption_is_exact_through_json(stop):
    uninterrupted = BatchStream(make_split(), 3, 8, seed=2)
    all_sequences(uninterrupted, stop) if stop else None
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    assert state["position"] == 3 * stop
    resumed = BatchStream(make_split(), 3, 8, seed=2)
    resumed.load_state_dict(state)
    assert torch.equal(all_sequences(resumed, 20), all_sequences(uninterrupted, 20))
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_resumption_with_another_batch_size_goes_on_at_the_same_sequence():
    one = BatchStream(make_split(), 6, 8, seed=2)
    one.next()
    other = BatchStream(make_split(), 2, 8, seed=2)
    other.load_state_dict(one.state_dict())
    assert torch.equal(all_sequences(other, 9), all_sequences(one, 3))


def test_ranks_take_strides_of_the_same_stream():
    whole = BatchStream(make_split(), 6, 8, seed=2)
    ranks = [BatchStream(make_split(), 2, 8, seed=2, rank=r, world_size=3) for r in range(3)]
    for _ in range(10):  # through two epoch boundaries
        rows = whole.next()[0]
        for r, stream in enumerate(ranks):
            assert torch.equal(stream.next()[0], rows[r::3])
    assert {stream.position for stream in ranks} == {whole.position} == {60}
    assert whole.epoch == 60 / 23


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 9}, "seed 9"), ({"sequence_length": 4}, "sequence_length 4"), ({"fingerprint": "x"}, "fingerprint 'x'")],
)
def test_a_state_of_other_data_is_refused(change, named):
    stream = BatchStream(make_split(), 2, 8, seed=2)
    with pytest.raises(CheckpointError, match=f"the checkpoint's data has {named}"):
        stream.load_state_dict({**stream.state_dict(), **change})
    with pytest.raises(CheckpointError, match="lacks 'position'"):
        stream.load_state_dict({})


def test_too_little_text_and_bad_sizes_are_refused():
    split = make_split((8,), "validation")
    with pytest.raises(DataError, match="validation split has 8 tokens, fewer than one sequence of 8"):
        BatchStream(split, 1, 8, seed=0)
    ids, targets = BatchStream(split, 2, 7, seed=0).next()
    assert ids[0].tolist() == list(range(7)) and targets[1].tolist() == list(range(1, 8))
    for sizes in ((0, 8, 0), (1, 0, 0), (1, 8, -1)):
        with pytest.raises(ConfigError, match="expected a whole number, at least"):
            BatchStream(make_split(), *sizes)
    with pytest.raises(ConfigError, match="rank=2: expected 0 <= rank < world_size=2"):
        BatchStream(make_split(), 1, 8, 0, rank=2, world_size=2)


def test_permutation_is_fixed_for_all_time():
    # a change would silently reorder the data of every run that is resumed
    assert permutation(8, seed=0, epoch=0, stream=0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert sorted(permutation(1000, 5, 6, 1).tolist()) == list(range(1000))
    assert permutation(0, 0, 0, 0).tolist() == [] and permutation(1, 0, 0, 0).tolist() == [0]


def test_permutation_is_uniform():
    counts = np.zeros((4, 4))
    for seed in range(2000):
        counts[np.arange(4), permutation(4, seed, 0, 0)] += 1
    # each of 16 counts is binomial(2000, 1/4): mean 500, standard deviation 19.4
    assert np.abs(counts - 500).max() < 5 * 19.4


def test_bytes_per_token():
    assert make_split().bytes_per_token == 3.0
