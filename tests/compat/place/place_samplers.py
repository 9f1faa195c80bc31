"""The samplers: those of which the service does the work, and those of users."""

import random

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue.controller import KnownPartition
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.seqlen_balanced_sampler import (
    SeqlenBalancedSampler,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)
from transfer_queue.sampler.sequential_sampler import SequentialSampler

import tq_service


def put(size, lengths=None, partition="p", first=0):
    data = TensorDict({"x": torch.arange(size) + first}, batch_size=[size])
    if lengths is None:
        return tq.get_client().put(data, partition_id=partition)
    keys = [f"k{n}" for n in range(size)]
    return tq.kv_batch_put(keys, partition, fields=data, tags=[{"total_lengths": length} for length in lengths])


def ask(size, task="train", partition="p", **config):
    return tq.get_client().get_meta(
        data_fields=["x"], batch_size=size, partition_id=partition, task_name=task, sampling_config=config
    )


def fetch(size, task="train", **config):
    return ask(size, task, **config).global_indexes


def fetch_rows(size, dp_rank, batch_index, partition="p"):
    """Return the rows of a batch, asked for with the names that the loader gives."""
    where = {"task_name": "train", "partition_id": partition}
    meta = ask(size, partition=partition, dp_rank=dp_rank, batch_index=batch_index, **where)
    return tq.get_client().get_data(meta)["x"].tolist() if meta else []


@pytest.fixture
def use(conf):
    """Begins a run with a sampler."""

    def begin(sampler, **more):
        conf["controller"] |= {"sampler": sampler, **more}
        tq.init(conf)

    yield begin
    tq.close()


def test_the_next_samples(use):
    use("SequentialSampler")
    put(5)
    assert [fetch(2), fetch(2), fetch(2), fetch(1)] == [[0, 1], [2, 3], [], [4]]
    assert fetch(2, "other", dp_rank=0, batch_index=0) == [0, 1]
    assert fetch(2, "other", dp_rank=0, batch_index=0) == [2, 3]


def test_replicas_of_a_rank_get_the_same_samples(use):
    use(RankAwareSampler)
    put(8)
    asked = [fetch(2, dp_rank=rank, batch_index=batch) for batch in (0, 1) for rank in (1, 0)]
    assert asked == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert fetch(2, dp_rank=0, batch_index=0) == [2, 3]
    assert fetch(2, dp_rank=0, batch_index=2) == []
    for config in ({}, {"dp_rank": 0}, {"dp_rank": -1, "batch_index": 0}):
        with pytest.raises(ValueError, match="batch_index other than None"):
            fetch(2, **config)


def test_groups_of_neighbours(use):
    use(GRPOGroupNSampler(n_samples_per_prompt=3))
    written = put(7)
    tq.get_client().clear_samples(written.select_samples([0]))
    assert fetch(6, dp_rank=0, batch_index=0) == [1, 2, 3, 4, 5, 6]
    assert fetch(6, dp_rank=0, batch_index=0) == [1, 2, 3, 4, 5, 6]
    assert fetch(3, "other") == [1, 2, 3]
    with pytest.raises(ValueError, match="multiple"):
        fetch(4, "other")


def test_ranks_get_as_many_tokens(use):
    lengths = [90, 10, 10, 20, 50, 50, 10, 10]
    use(SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2))
    put(8, lengths)
    shares = [fetch(4, dp_rank=rank, batch_index=0) for rank in range(2)]
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert sorted(sum(lengths[index] for index in share) for share in shares) == [120, 130]
    assert fetch(4, dp_rank=1, batch_index=0) == shares[1]


class OddOnes(tq.BaseSampler):
    """Takes odd ones, and counts how often it was asked."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        self.count += 1
        odd = [index for index in ready_indexes if index % 2][:batch_size]
        return (odd, odd) if len(odd) == batch_size else ([], [])


def test_a_sampler_of_users(use):
    sampler = OddOnes()
    use(sampler)
    put(6)
    assert [fetch(2), fetch(1), fetch(1)] == [[1, 3], [5], []]
    assert sampler.count == 3
    assert fetch(3, "other") == [1, 3, 5]


class WithReplacement(tq.BaseSampler):
    """Draws samples that stay."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        draws = self._states.setdefault("draws", random.Random(0))
        return draws.choices(ready_indexes, k=batch_size), []


class OldestConsumed(tq.BaseSampler):
    """Samples the heaviest and consumes the first."""

    def sample(self, ready_indexes, batch_size, *args, partition, **kwargs):
        known = partition.get_custom_meta(ready_indexes)
        heaviest = sorted(ready_indexes, key=lambda index: -known[index]["total_lengths"])
        return heaviest[:batch_size], ready_indexes[:1]


def test_what_is_sampled_and_what_is_consumed_may_differ(use):
    use(OldestConsumed())
    put(4, [1, 9, 5, 7])
    assert [fetch(2) for _ in range(4)] == [[1, 3], [1, 3], [3, 2], []]
    status = tq.get_client().get_consumption_status("train", "p")[1]
    assert status.tolist() == [1, 1, 1, 0]


def test_a_sampler_that_draws_with_replacement(use):
    use(WithReplacement())
    put(3)
    drawn = [index for _ in range(3) for index in fetch(3)]
    assert (len(drawn), set(drawn)) == (9, {0, 1, 2})
    assert [index for index in fetch(2) if index not in (0, 1, 2)] == []
    assert tq.get_client().get_consumption_status("train", "p")[1].tolist() == [0, 0, 0]


def test_samplers_by_themselves():
    ready = [7, 1, 2, 3, 5, 6, 8]
    where = {"partition_id": "p", "task_name": "t"}
    assert SequentialSampler().sample(ready, 3) == ([7, 1, 2], [7, 1, 2])
    aware = RankAwareSampler()
    assert aware(ready, 2, dp_rank=0, batch_index=0, **where)[0] == [7, 1]
    assert aware([9], 1, dp_rank=0, batch_index=0, **where)[0] == [7, 1]
    assert aware.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    assert aware([9], 2, dp_rank=1, batch_index=0, **where) == ([], [])
    restored = RankAwareSampler()
    restored.load_checkpoint(aware.save_checkpoint())
    assert restored([], 2, dp_rank=0, batch_index=0, **where)[0] == [7, 1]
    aware.clear_cache("p")
    assert not aware.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    groups = GRPOGroupNSampler(3)
    assert groups.sample(ready, 6)[0] == [1, 2, 3, 5, 6, 7]
    assert groups.sample(ready, 9) == ([], [])
    with pytest.raises(ValueError, match="expected a multiple of n_samples_per_prompt"):
        groups.sample(ready, 4)
    balanced = SeqlenBalancedSampler(1, dp_size=2)
    shares = [balanced.sample([0, 1, 2, 3], 2, dp_rank=1, batch_index=0, **where)[0]]
    shares.append(balanced.sample([], 2, dp_rank=0, batch_index=0, **where)[0])
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3]
    assert [len(share) for share in shares] == [2, 2]
    assert balanced.sample([4], 2, dp_rank=0, batch_index=1, **where) == ([], [])
    for wrong in (lambda: GRPOGroupNSampler(0), lambda: SeqlenBalancedSampler(1, 0)):
        with pytest.raises(ValueError, match="expected at least 1"):
            wrong()


def test_samplers_take_what_transfer_queue_gives_them():
    assert RankAwareSampler().sample([3, 2, 1], 2, 0, 0, "t", "p", "more") == ([3, 2], [3, 2])
    assert GRPOGroupNSampler(2).sample([0, 1, 2], 2, "t", "p", dp_rank=0, batch_index=0) == ([0, 1], [0, 1])
    balanced = SeqlenBalancedSampler(1, 2)
    partition = KnownPartition("p", {index: {"total_lengths": index} for index in range(4)})
    assert balanced.sample([0, 1, 2, 3], 2, "t", "p", dp_rank=1, batch_index=0, partition=partition)[0] == [1, 2]
    assert balanced._states["p"]["t"] == {0: {0: ([0, 3], [0, 3])}, 1: {0: ([1, 2], [1, 2])}}
    assert SeqlenBalancedSampler(1, 2).sample([0, 1, 2, 3], 2, "t", "p", dp_rank=1, batch_index=0)[0] == [2, 3]
    assert (partition.partition_id, partition.get_custom_meta([1, 9])) == ("p", {1: {"total_lengths": 1}})
    for balance in (get_seqlen_balanced_partitions, karmarkar_karp):
        assert sorted(map(sorted, balance([4, 1, 2, 3], 2, True))) == [[0, 1], [2, 3]]


class NewestFirst(RankAwareSampler):
    """Gives each rank the newest samples."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        return super().sample(sorted(ready_indexes, reverse=True), batch_size, *args, **kwargs)


def clear_by_the_client(service, namespace, written):
    tq.get_client().clear_partition("p")


def clear_by_another_client(service, namespace, written):
    with tq_service.Client(service, namespace=namespace) as client:
        client.clear_partition("p")


def clear_all_samples(service, namespace, written):
    tq.get_client().clear_samples(written)


@pytest.mark.parametrize("clear", [clear_by_the_client, clear_by_another_client, clear_all_samples])
@pytest.mark.parametrize("kind", [NewestFirst, type("Groups", (GRPOGroupNSampler,), {})])
def test_a_partition_that_is_used_again_begins_again(use, service, conf, kind, clear):
    use(kind())
    for step, size in enumerate([4, 8, 4, 2]):
        written = put(size, first=100 * step)
        batches = [fetch_rows(2, 0, n) for n in range(size // 2)]
        assert sorted(x for rows in batches for x in rows) == [100 * step + n for n in range(size)]
        assert kind is not NewestFirst or batches[0] == [100 * step + size - 1, 100 * step + size - 2]
        assert fetch_rows(2, 0, 0) == batches[0]
        assert tq.get_client().check_consumption_status("train", "p")
        clear(service, conf["controller"]["namespace"], written)
        assert ask(2, dp_rank=0, batch_index=0, task_name="train", partition_id="p").size == 0


def test_a_rank_gets_what_is_left_of_a_later_use(use):
    use(NewestFirst)
    put(4)
    assert fetch_rows(2, 0, 0) == [3, 2]
    tq.get_client().clear_partition("p")
    written = put(4, first=100)
    tq.get_client().clear_samples(written.select_samples([2, 3]))
    assert fetch_rows(2, 0, 0) == [101, 100]


def test_a_batch_that_lost_a_sample_says_so(use):
    use(NewestFirst)
    written = put(4)
    assert [fetch_rows(2, 0, 0), fetch_rows(2, 1, 0)] == [[3, 2], [1, 0]]
    tq.get_client().clear_samples(written.select_samples([2]))
    with pytest.raises(tq.StorageKeyNotFoundError, match=r"cleared"):
        fetch_rows(2, 0, 0)
    assert fetch_rows(2, 1, 0) == [1, 0]


@pytest.mark.parametrize("is_other", [False, True])
def test_a_sampler_remembers_no_partition_that_is_gone(use, service, conf, is_other):
    sampler = NewestFirst()
    use(sampler)
    with tq_service.Client(service, namespace=conf["controller"]["namespace"]) as other:
        put(2, partition="kept")
        assert fetch_rows(2, 0, 0, "kept") == [1, 0]
        for step in range(5):
            put(2, partition=f"p{step}")
            assert fetch_rows(2, 0, 0, f"p{step}") == [1, 0]
            assert sampler._states.keys() == {"kept", f"p{step}"}
            (other if is_other else tq.get_client()).clear_partition(f"p{step}")


class ClearsMeanwhile(tq.BaseSampler):
    """Puts the partition in place of which it was asked, the first time."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        if not self._states:
            self._states["done"] = True
            tq.get_client().clear_partition("p")
            put(4, first=100)
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


def test_a_partition_that_is_replaced_while_it_is_sampled(use):
    use(ClearsMeanwhile())
    put(4)
    assert fetch_rows(2, 0, 0) == []
    assert tq.get_client().get_consumption_status("train", "p")[1].tolist() == [0, 0, 0, 0]
    assert fetch_rows(2, 0, 0) == [100, 101]


def test_a_sampler_that_remembers_nothing_gives_each_call_the_next_samples(use):
    use(OddOnes())
    put(8)
    assert [fetch_rows(2, 0, 0), fetch_rows(2, 0, 0), fetch_rows(2, 0, 0)] == [[1, 3], [5, 7], []]


@pytest.mark.parametrize("sampler", ["NoSampler", "Any", 3, dict])
def test_what_is_no_sampler(service, sampler):
    with pytest.raises(ValueError, match=r"controller.sampler is .*; expected the name of a class"):
        tq.init({"controller": {"address": service, "sampler": sampler}})
