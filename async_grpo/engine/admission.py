"""What /generate accepts: parsing and every reason to refuse. Knows neither HTTP nor torch.

Log-probs are of the full distribution at the sampling temperature, so anything that samples from
a truncated one is refused rather than approximated.
"""

from dataclasses import dataclass

import msgspec

from async_grpo.engine_api import GenerateRequest, SamplingParams


class RequestRefused(Exception):  # noqa: N818 -- an answer, not a failure of this process
    """The request is answered with `status` and this message.

    Attributes:
        status: HTTP status.
        message: what is wrong, for the client.
        nested: the body is {"error": {"message": ...}} rather than {"error": ...}.
    """

    def __init__(self, message: str, *, status: int = 400, nested: bool = True) -> None:
        self.message, self.status, self.nested = message, status, nested
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    vocab_size: int
    context_length: int
    """Prompt and completion together, in tokens."""


_decode = msgspec.json.Decoder(GenerateRequest).decode


def parse_generate(body: bytes, limits: Limits) -> GenerateRequest:
    """The checked request.

    Raises:
        RequestRefused: the body has a wrong form, or asks for what is not served.
    """
    try:
        request = _decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        if "unknown field" in text:
            raise RequestRefused(text[text.index("unknown field") :], nested=False) from error
        raise RequestRefused(text) from error
    except msgspec.DecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    _check_ids(request, limits)
    _check_sampling(request.sampling_params)
    if request.logprob_start_len not in (-1, 0):
        raise RequestRefused(f"logprob_start_len must be -1 or 0, got {request.logprob_start_len}")
    if request.stream:
        raise RequestRefused("stream=true is not supported")
    return request


def _check_ids(request: GenerateRequest, limits: Limits) -> None:
    ids = request.input_ids
    if not ids:
        raise RequestRefused("input_ids must not be empty")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        raise RequestRefused(
            f"input_ids must be in [0, {limits.vocab_size}), got {min(ids)} to {max(ids)}"
        )
    num_new = request.sampling_params.max_new_tokens
    if len(ids) + num_new > limits.context_length:
        raise RequestRefused(
            f"{len(ids)} prompt tokens and {num_new} new ones exceed the context length of "
            f"{limits.context_length}"
        )


def _check_sampling(params: SamplingParams) -> None:
    full = "the returned log-probs are of the full distribution"
    problems = []
    if params.max_new_tokens < 1:
        problems.append(f"max_new_tokens must be >= 1, got {params.max_new_tokens}")
    if not 1e-3 <= params.temperature <= 1e3:  # also catches NaN
        problems.append(
            f"temperature must be in [0.001, 1000], got {params.temperature}: "
            "greedy decoding has no log-probs to learn from"
        )
    if params.top_p != 1:
        problems.append(f"top_p must be 1, got {params.top_p}: {full}")
    if params.top_k not in (-1, 0):
        problems.append(f"top_k must be -1 or 0, got {params.top_k}: {full}")
    if params.min_p != 0:
        problems.append(f"min_p must be 0, got {params.min_p}: {full}")
    if params.n != 1:
        problems.append(f"n must be 1, got {params.n}: send single requests")
    if params.min_new_tokens != 0:
        problems.append(f"min_new_tokens must be 0, got {params.min_new_tokens}: {full}")
    penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    if penalties != (0, 0, 1):
        names = "frequency_penalty, presence_penalty and repetition_penalty"
        problems.append(f"{names} must be 0, 0 and 1, got {penalties}: {full}")
    if params.sampling_seed is not None:
        problems.append("sampling_seed is not supported: requests share one random stream")
    if problems:
        raise RequestRefused("; ".join(problems))
