"""The head in float32, against float64; and where a device multiplies bfloat16 into float32."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from async_grpo.algorithms.head import (
    add_weight_gradient,
    hidden_gradient,
    logits,
    use_float32_logits,
)

ROWS, HIDDEN, VOCABULARY = 9, 64, 9001  # more than one slice of the head


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head, and a gradient of the logits; logits are of size 10."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN), 1.25 * torch.randn(VOCABULARY, HIDDEN)
    of_logits = torch.randn(ROWS, VOCABULARY).softmax(-1)
    return hidden.to(dtype), weight.to(dtype), of_logits


class WideProducts:
    """Gives the CPU what CUDA has: torch.mm of bfloat16 with a float32 result."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("mm.dtype", self._multiply, "CPU")

    def _multiply(self, one: torch.Tensor, other: torch.Tensor, out_dtype: torch.dtype):
        assert one.dtype == other.dtype == torch.bfloat16
        self.num_calls += 1
        return one.to(out_dtype) @ other.to(out_dtype)

    def remove(self) -> None:
        self._library._destroy()


@pytest.fixture
def wide_products() -> Iterator[WideProducts]:
    made = WideProducts()
    yield made
    made.remove()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def check_logits() -> None:
    hidden, weight, _ = inputs()
    exact = hidden.double() @ weight.double().T
    found = logits(hidden, weight)
    assert found.dtype is torch.float32
    assert (found - exact).abs().max() < 1e-4
    assert ((hidden @ weight.T) - exact).abs().max() > 0.05  # what rounding would have cost
    assert torch.equal(logits(hidden[None], weight), found[None])


def test_logits_of_bfloat16_are_those_of_float64_to_seven_digits():
    check_logits()


def test_logits_by_a_product_into_float32_are_as_exact(wide_products):
    check_logits()
    assert wide_products.num_calls == 2


def test_the_gradient_of_the_head_is_summed_exactly_on_a_cpu():
    hidden, weight, of_logits = inputs()
    into = torch.ones(VOCABULARY, HIDDEN)
    add_weight_gradient(into, of_logits, hidden)
    exact = of_logits.double().T @ hidden.double()
    assert relative_error(into, exact + 1) < 1e-6
    of_hidden = hidden_gradient(of_logits, weight)
    assert of_hidden.dtype is torch.bfloat16
    assert relative_error(of_hidden, of_logits.double() @ weight.double()) < 2**-8


def test_the_gradient_of_the_head_needs_no_float32_product_where_the_card_has_better(wide_products):
    hidden, _, of_logits = inputs()
    into = torch.zeros(VOCABULARY, HIDDEN)
    add_weight_gradient(into, of_logits, hidden)
    assert wide_products.num_calls == 2  # two slices, each of bfloat16 numbers
    exact = of_logits.double().T @ hidden.double()
    assert relative_error(into, exact) < 2**-8  # of_logits is rounded once, the sum is not
    again = torch.zeros(VOCABULARY, HIDDEN)
    for _ in range(64):  # a sum kept in bfloat16 would stop to grow
        add_weight_gradient(again, of_logits, hidden)
    assert relative_error(again, 64 * exact) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_computed_as_they_always_were(dtype, wide_products):
    hidden, weight, of_logits = inputs(dtype)
    assert torch.equal(logits(hidden, weight), hidden @ weight.T)
    of_logits = of_logits.to(dtype)
    into = torch.zeros(VOCABULARY, HIDDEN, dtype=dtype)
    add_weight_gradient(into, of_logits, hidden)
    assert torch.equal(into, torch.zeros_like(into).addmm_(of_logits.T, hidden))
    assert torch.equal(hidden_gradient(of_logits, weight), of_logits @ weight)
    assert wide_products.num_calls == 0


def test_a_head_that_answers_in_float32_follows_its_weight():
    head = nn.Linear(HIDDEN, 5, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(2, 3, HIDDEN).bfloat16()
    use_float32_logits(head)
    for _ in range(2):
        found = head(hidden)
        assert found.dtype is torch.float32
        exact = hidden.double() @ head.weight.double().T
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            head.weight.mul_(2)  # as an update does, in place
    assert list(head.state_dict()) == ["weight"]
