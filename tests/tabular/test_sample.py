"""Samples of rows: the same whoever reads which rows in which order, and as good as random."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import stats

from snnk.tabular import sample
from snnk.tabular.sample import Held, Sample, content_hash, is_reserved

BLOCKS = (700, 1, 0, 1300, 400)  # rows
GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def splitmix64(state):
    """The published generator, with whole numbers of any size."""
    z = (state + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def rows_of(block):
    names = [f"{block}:{row}" for row in range(BLOCKS[block])]
    return pa.record_batch({"name": names, "row": np.arange(BLOCKS[block])})


def read(chunks, most):
    found = Sample(most)
    for block, first, rows in chunks:
        found.add(rows_of(block)[first : first + rows], block, first)
    return found


def chunks_of(size):
    """(block, first row, number of rows) of the whole table."""
    return [(b, first, min(size, rows - first)) for b, rows in enumerate(BLOCKS) for first in range(0, rows, size)]


def check_uniform(counts):
    """Pearson's test, in both directions: neither uneven nor too even to be random."""
    counts = np.asarray(counts)
    expected = counts.sum() / len(counts)
    assert expected >= 50
    assert 1e-4 < stats.chi2.cdf((np.square(counts - expected) / expected).sum(), len(counts) - 1) < 1 - 1e-4


def test_the_hash_is_splitmix64():
    states = np.array([0, 1, 12345, 2**63, 2**64 - 1], dtype=np.uint64)
    assert sample.mix(states).tolist() == [splitmix64(int(state)) >> 1 for state in states]
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first number of the seed 0 in the reference implementation


@pytest.mark.parametrize("most", [1, 100, 2400, 5000])
def test_a_sample_has_the_rows_of_the_least_hashes(most):
    found = read(chunks_of(10**6), most).table()
    places = [(b, row) for b, rows in enumerate(BLOCKS) for row in range(rows)]
    expected = sorted(places, key=lambda place: splitmix64(place[1] + (place[0] << 40)) >> 1)[:most]
    assert found["name"].to_pylist() == [f"{b}:{row}" for b, row in expected]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("size", [64, 333, 5000])
def test_a_sample_does_not_depend_on_who_reads_what(workers, size):
    """Chunks of several sizes, in several orders, read by one worker or many, and merged in several orders."""
    whole = read(chunks_of(10**6), 150).table()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        chunks = [chunks_of(size)[i] for i in rng.permutation(len(chunks_of(size)))]
        parts = [read(chunks[worker::workers], 150) for worker in range(workers)]
        found = Sample(150)
        for i in rng.permutation(workers):
            found.merge(parts[i])
            assert sum(part.num_rows for part in found._parts) <= 150
        assert found.table().equals(whole)


def test_a_sample_holds_few_rows_at_a_time():
    found = Sample(50)
    for block, first, rows in chunks_of(40):
        found.add(rows_of(block)[first : first + rows], block, first)
        assert sum(part.num_rows for part in found._parts) <= 2 * 50 + 40


def test_every_row_is_as_likely():
    """Places of the rows of a sample in their blocks."""
    n, most = 40_000, 4000
    for block in range(3):
        found = Sample(most)
        for first in range(0, n, 7000):
            rows = np.arange(first, min(first + 7000, n))
            found.add(pa.record_batch({"row": rows}), block, first)
        rows = found.table()["row"].to_numpy()
        assert len(set(rows)) == most
        check_uniform(np.bincount(rows * 40 // n, minlength=40) / (1 - most / n))  # drawn without replacement
        check_uniform(np.bincount(rows % 40, minlength=40) / (1 - most / n))


@pytest.mark.parametrize(
    "rows",
    [
        torch.randn(20_000, 5, generator=torch.Generator().manual_seed(0)),
        torch.arange(20_000.0)[:, None],
        torch.stack([torch.arange(20_000.0) % 200, torch.arange(20_000.0) // 200], 1),
        1e-3 * torch.arange(20_000.0)[:, None] * torch.tensor([[0.0, 1.0, 0.0, 0.0]]) + 7,
    ],
    ids=["random", "integers", "grid", "one column"],
)
def test_hashes_of_contents_are_uniform(rows):
    hashes = content_hash(rows)
    assert hashes.dtype == torch.int64 and int(hashes.min()) >= 0
    for bits in (0, 20, 57):  # the highest six, six in the middle, and the lowest six
        check_uniform(np.bincount((hashes.numpy() >> (57 - bits)) % 64, minlength=64))
    assert abs(float(is_reserved(hashes).double().mean()) - 0.1) < 5 * (0.09 / 20_000) ** 0.5


def test_hashes_depend_on_values_and_their_places_alone(monkeypatch):
    rows = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    hashes = content_hash(rows)
    assert len(hashes.unique()) == 100 and torch.equal(content_hash(rows.flip(0)), hashes.flip(0))
    assert not (content_hash(rows[:, [1, 0, 2]]) == hashes).any()
    assert torch.equal(content_hash(rows.T.contiguous().T), hashes)  # other strides
    assert torch.equal(content_hash(torch.tensor([[0.0, -0.0]])), content_hash(torch.tensor([[-0.0, 0.0]])))
    monkeypatch.setattr(sample, "CHUNK", 7)
    assert torch.equal(content_hash(rows), hashes)
    assert content_hash(rows[:0]).shape == (0,) and content_hash(rows[:, :0]).shape == (100,)


def held_rows(n=4000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, y


def add_all(x, y, splits):
    found = Held.empty(x.shape[1], y.shape[1])
    for part in splits:
        found = found.add(x[part], y[part])
    return found


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), two.tensors(), strict=True))


@pytest.mark.parametrize("most", [1, 60, 4096])
def test_held_rows_are_those_of_the_least_hashes(monkeypatch, most):
    monkeypatch.setattr(sample, "MOST_HELD", most)
    x, y = held_rows()
    found, hashes = add_all(x, y, [slice(None)]), content_hash(x)
    chosen = hashes.argsort()[: min(most, int((hashes < 2**63 / 10).sum()))]
    assert (
        torch.equal(found.hashes, hashes[chosen])
        and torch.equal(found.x, x[chosen])
        and torch.equal(found.y, y[chosen])
    )
    assert same(Held.of(found.tensors()), found)


def test_rows_with_equal_inputs_are_held_together(monkeypatch):
    """The last of too many inputs has some rows only, chosen by their targets; it does not count."""
    monkeypatch.setattr(sample, "MOST_HELD", 40)
    x = torch.arange(200.0)[:, None].repeat_interleave(7, 0)
    y = torch.arange(1400.0).double()[:, None]
    found = Held.empty(1, 1).add(x, y)
    held = found.whole()
    assert len(found.x) == 40 and held.inputs == 5 and held.x.unique(return_counts=True)[1].tolist() == [7] * 5
    assert Held.empty(1, 1).add(x[:70], y[:70]).whole().inputs == len(
        x[:70][is_reserved(content_hash(x[:70]))].unique()
    )


@pytest.mark.parametrize("most", [60, 4096])
@pytest.mark.parametrize("copies", [1, 8], ids=["different", "equal inputs"])
def test_held_rows_do_not_depend_on_who_reads_what(monkeypatch, most, copies):
    """Rows with equal inputs may have different targets."""
    monkeypatch.setattr(sample, "MOST_HELD", most)
    x, y = held_rows()
    x = x[: len(x) // copies].repeat(copies, 1)
    whole = add_all(x, y, [slice(None)])
    assert len(whole.x) == 60 if most == 60 else 300 < len(whole.x) < 500
    for seed, workers in itertools.product(range(3), (1, 2, 5)):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        parts = [add_all(x, y, order[worker::workers].split(97)) for worker in range(workers)]
        found = parts[0]
        for part in parts[1:]:
            found = part.merge(found)
        assert same(found, whole)


def test_wide_rows_are_fewer(monkeypatch):
    monkeypatch.setattr(sample, "MOST_HELD_NUMBERS", 120)
    assert Held.empty(40, 1).most == 3 and Held.empty(0, 1).most == 120 and Held.empty(1000, 1).most == 1
    x, y = held_rows()
    assert len(add_all(x, y, [slice(None)]).x) == 40


def test_most_rows_of_a_sample_are_not_reserved():
    """Features are learnt from rows that no assessment uses: whether a row is in the sample decides nothing."""
    x, _ = held_rows(20_000)
    found = Sample(5000)
    found.add(pa.record_batch({"row": np.arange(20_000)}), 0, 0)
    share = float(
        is_reserved(content_hash(x[torch.from_numpy(found.table()["row"].to_numpy().copy())])).double().mean()
    )
    assert abs(share - 0.1) < 5 * (0.09 / 5000) ** 0.5
