import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.weights.flatten import (
    as_words,
    digests,
    dtype_name,
    empty_buckets,
    flatten,
    sums_of_words,
)
from async_grpo.weights.plan import ITEM_BYTES, TensorSpec, make_plan

SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.text("abcxyz.", min_size=1, max_size=6),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda spec: spec.name,
)


@given(specs=SPECS, bucket_bytes=st.integers(1, 400), data=st.data())
@settings(deadline=None, max_examples=80)
def test_every_tensor_once_aligned_and_within_its_bucket(specs, bucket_bytes, data):
    plan = make_plan(specs, bucket_bytes)
    assert sorted(t.name for bucket in plan.buckets for t in bucket) == sorted(
        spec.name for spec in specs
    )
    for bucket in plan.buckets:
        offset = 0
        for tensor in bucket:
            assert offset % ITEM_BYTES[tensor.dtype] == 0
            offset += tensor.num_bytes
        assert offset <= bucket_bytes or sum(1 for t in bucket if t.num_bytes) == 1
    shuffled = make_plan(data.draw(st.permutations(specs)), bucket_bytes)
    assert shuffled == plan


def test_the_hash_tells_plans_apart():
    one = TensorSpec("a", "float32", (4,))
    hashes = {
        make_plan([one], 100).plan_hash,
        make_plan([TensorSpec("a", "float32", (2, 2))], 100).plan_hash,
        make_plan([TensorSpec("a", "bfloat16", (4,))], 100).plan_hash,
        make_plan([one, TensorSpec("b", "float32", (4,))], 100).plan_hash,
        make_plan([one, TensorSpec("b", "float32", (4,))], 16).plan_hash,
    }
    assert len(hashes) == 5


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no tensors"),
        ([TensorSpec("a", "int8", (1,))], "int8"),
        ([TensorSpec("a", "float32", (1,)), TensorSpec("a", "float32", (2,))], "same name"),
    ],
)
def test_what_cannot_be_planned(specs, message):
    with pytest.raises(ValueError, match=message):
        make_plan(specs, 100)


def test_flattened_bytes_are_the_tensors_back_to_back():
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(3, 5).T,  # not contiguous
        "a": torch.randn(2, dtype=torch.float64),
        "c": torch.randn(3).bfloat16(),
        "d": torch.tensor(1.5),
    }
    specs = [TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()]
    plan = make_plan(specs, 80)
    buckets = empty_buckets(plan, torch.device("cpu"))
    for bucket, payload in zip(plan.buckets, buckets, strict=True):
        flatten(bucket, tensors, payload)
    for bucket, payload in zip(plan.buckets, buckets, strict=True):
        assert payload.dtype is torch.uint8
        offset = 0
        for spec in bucket:
            part = payload[offset : offset + spec.num_bytes].view(tensors[spec.name].dtype)
            assert torch.equal(part.view(spec.shape), tensors[spec.name])
            offset += spec.num_bytes
        assert offset == payload.numel()


def by_sums(tensors):
    """As on a device that is not the CPU."""
    words = [as_words(tensor) for tensor in tensors.values()]
    return dict(zip(tensors, sums_of_words(words, torch.device("cpu")), strict=True))


@pytest.mark.parametrize("digest", [digests, by_sums])
def test_the_digest_sees_every_byte_and_the_order_of_blocks(digest):
    payload = torch.zeros((1 << 24) + (1 << 20) + 3, dtype=torch.uint8)  # a block of words, a tail
    (first,) = digest({"a": payload}).values()
    assert digest({"a": payload.clone()}) == {"a": first}
    for at in (0, 5, 1 << 24, payload.numel() - 1):
        changed = payload.clone()
        changed[at] += 1
        assert digest({"a": changed}) != {"a": first}, at
    one, other = payload.clone(), payload.clone()
    one[8], other[8 + (1 << 24)] = 1, 1
    assert digest({"a": one}) != digest({"a": other})


@pytest.mark.parametrize("digest", [digests, by_sums])
def test_two_bits_that_change_places_change_the_digest(digest):
    """A step of a bfloat16 tensor may move one element up and another down by one bit."""
    before = torch.zeros(64, dtype=torch.bfloat16)
    before[4] = 1.0
    after = torch.zeros(64, dtype=torch.bfloat16)
    after[8] = 1.0
    assert digest({"a": before}) != digest({"a": after})


@pytest.mark.parametrize("digest", [digests, by_sums])
def test_a_tensor_of_odd_bytes_or_at_an_odd_place_has_the_digest_of_its_bytes(digest):
    row = torch.arange(1.0, 8.0).bfloat16()
    pieces = {"at 2": row[1:4], "alone": row[1:4].clone(), "other": row[2:5]}
    found = digest(pieces)
    assert found["at 2"] == found["alone"] != found["other"]
    grid = torch.arange(6.0).view(2, 3)
    found = digest({"turned": grid.T, "copied": grid.T.contiguous(), "flat": grid})
    assert found["turned"] == found["copied"] != found["flat"]


def test_a_tensor_that_changed_its_shape_is_refused():
    plan = make_plan([TensorSpec("a", "float32", (2,))], 80)
    for tensors in ({}, {"a": torch.zeros(3)}, {"a": torch.zeros(2).double()}):
        with pytest.raises(ValueError, match="of the plan"):
            flatten(plan.buckets[0], tensors, torch.empty(8, dtype=torch.uint8))
