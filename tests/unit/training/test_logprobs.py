import pytest
import torch

from async_grpo.training.logprobs import chosen_logprobs


def inputs(rows=11, hidden=5, vocab=13, dtype=torch.float64):
    torch.manual_seed(0)
    return (
        torch.randn(rows, hidden, dtype=dtype, requires_grad=True),
        torch.randn(vocab, hidden, dtype=dtype, requires_grad=True),
        torch.randint(0, vocab, (rows,)),
        torch.rand(rows, dtype=torch.promote_types(dtype, torch.float32)) + 0.5,
    )


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_gradients_by_finite_differences(chunk):
    hidden, weight, targets, temperature = inputs()

    def function(hidden, weight):
        return chosen_logprobs(hidden, weight, targets, temperature, chunk_tokens=chunk)

    assert torch.autograd.gradcheck(function, (hidden, weight))
    for one in (0, 1):  # one of the two alone
        assert torch.autograd.gradcheck(lambda *args: function(*args)[one], (hidden, weight))  # noqa: B023


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_equals_full_logits(chunk):
    hidden, weight, targets, temperature = inputs()
    logprobs, entropy = chosen_logprobs(hidden, weight, targets, temperature, chunk_tokens=chunk)
    upstream = torch.randn(11, dtype=torch.float64)
    ours = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    full = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    chosen = full.gather(-1, targets[:, None]).squeeze(-1)
    theirs = torch.autograd.grad((chosen * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(logprobs, chosen, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=0, atol=1e-12)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_gradient_of_the_entropy_is_that_of_full_logits(chunk):
    hidden, weight, targets, temperature = inputs()
    upstream = torch.randn(11, 2, dtype=torch.float64)
    _, entropy = pair = chosen_logprobs(hidden, weight, targets, temperature, chunk_tokens=chunk)
    ours = torch.autograd.grad((torch.stack(pair, -1) * upstream).sum(), (hidden, weight))
    full = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    chosen = full.gather(-1, targets[:, None]).squeeze(-1)
    exact = -(full.exp() * full).sum(-1)
    both = torch.stack((chosen, exact), -1)
    theirs = torch.autograd.grad((both * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(entropy, exact, rtol=0, atol=1e-12)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_low_precision_reduces_in_float32():
    hidden, weight, targets, temperature = inputs(dtype=torch.bfloat16)
    logprobs, entropy = chosen_logprobs(hidden, weight, targets, temperature, chunk_tokens=4)
    assert logprobs.dtype is entropy.dtype is torch.float32
    logprobs.sum().backward()
    assert hidden.grad.dtype is weight.grad.dtype is torch.bfloat16


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, targets, temperature = inputs()
    logprobs, entropy = chosen_logprobs(
        hidden, weight.detach(), targets, temperature, chunk_tokens=4
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("fp32_head", [True, False])
def test_bfloat16_against_float64(fp32_head):
    """Log-probs of a float32 head are exact; gradients are rounded once, when they are returned."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 64).bfloat16().requires_grad_()
    weight = torch.randn(300, 64).bfloat16().requires_grad_()  # logits of size 8
    targets, temperature = torch.randint(0, 300, (40,)), torch.full((40,), 0.7)
    upstream = torch.randn(40)
    logprobs, entropy = chosen_logprobs(
        hidden, weight, targets, temperature, chunk_tokens=16, fp32_head=fp32_head
    )
    ours = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    full = (wide[0] @ wide[1].T / temperature[:, None]).log_softmax(-1)
    chosen = full.gather(-1, targets[:, None]).squeeze(-1)
    theirs = torch.autograd.grad((chosen * upstream).sum(), wide)
    error = (logprobs - chosen).abs().max()
    pairs = zip(ours, theirs, strict=True)
    errors = [((found.double() - exact).norm() / exact.norm()).item() for found, exact in pairs]
    if fp32_head:
        assert error < 1e-5
        # a difference of numbers of size 40, in float32
        assert (entropy + (full.exp() * full).sum(-1)).abs().max() < 2e-4
        assert max(errors) < 2**-8
    else:
        assert error > 0.01
