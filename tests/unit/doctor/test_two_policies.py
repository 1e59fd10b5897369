import torch

from async_grpo.config.weights import WeightsSection
from async_grpo.doctor.two_policies import TwoPolicies, Which
from tests.fakes.tiny_policy import tiny_policy

PROMPT, IDS = [3, 4, 5], [6, 7, 8, 9]


def make(dtype=torch.float32):
    return TwoPolicies(tiny_policy(dtype=dtype), WeightsSection(), seed=0)


def test_every_tensor_is_perturbed_and_comes_back_exactly():
    policies = make()
    before = {name: tensor.clone() for name, tensor in policies.source.named_tensors()}
    policies.use(Which.PERTURBED)
    after = dict(policies.source.named_tensors())
    assert list(after) == list(before) == policies.names
    for name, tensor in after.items():
        change = (tensor - before[name]).square().mean().sqrt()
        size = before[name].square().mean().sqrt()
        assert 0.05 < change / size < 0.2, name
    policies.use(Which.OWN)
    assert all(torch.equal(t, before[name]) for name, t in policies.source.named_tensors())


def test_log_probs_are_those_of_the_model_at_the_temperature():
    policies = make()
    for which in Which:
        found = policies.logprobs(which, PROMPT, IDS, 0.7)
        with torch.no_grad():
            logits = policies.model.module(torch.tensor([PROMPT + IDS])).logits[0, 2:-1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(IDS)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)
    own = policies.logprobs(Which.OWN, PROMPT, IDS, 0.7)
    assert max(abs(a - b) for a, b in zip(own, found, strict=True)) > 0.05


def test_moments_of_the_surprisal_by_brute_force():
    policies = make(torch.float64)
    mean, variance = policies.surprisal_moments(Which.OWN, PROMPT, IDS, 1.3)
    with torch.no_grad():
        logits = policies.model.module(torch.tensor([PROMPT + IDS])).logits[0, 2:-1]
    expected_mean = expected_variance = 0.0
    for row in torch.softmax(logits / 1.3, -1):
        surprisals = -row.log()
        expectation = (row * surprisals).sum()
        expected_mean += expectation.item()
        expected_variance += (row * (surprisals - expectation) ** 2).sum().item()
    assert abs(mean - expected_mean) < 1e-9
    assert abs(variance - expected_variance) < 1e-9


def test_without_each_names_the_tensor_that_is_missing_and_restores_the_rest():
    policies = make()
    probe = policies.probe(Which.PERTURBED)
    missing = policies.names[3]
    policies.use(Which.PERTURBED)
    tensors = dict(policies.source.named_tensors())
    kept = tensors[missing].clone()
    policies.use(Which.OWN)
    own = tensors[missing].clone()
    policies.use(Which.PERTURBED)
    with torch.no_grad():  # an engine that ignores it
        tensors[missing].copy_(own)
    found = policies.source.probe().sets[0].logprobs
    with torch.no_grad():
        tensors[missing].copy_(kept)
    suspects = [
        name
        for name, logprobs in policies.without_each(Which.PERTURBED, probe)
        if max(abs(a - b) for a, b in zip(found, logprobs, strict=True)) < 1e-6
    ]
    assert suspects == [missing]
    assert policies.probe(Which.PERTURBED).logprobs == probe.logprobs
