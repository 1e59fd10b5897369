"""Runs every check, on the policy and on each engine of a configuration."""

import asyncio
from collections.abc import Sequence
from functools import partial

import torch
from transformers.utils.logging import disable_progress_bar

from async_grpo.config.engine_keys import load_engine_keys
from async_grpo.config.schema import Config
from async_grpo.devices.choice import resolve_device
from async_grpo.doctor.examination import ENGINE_CHECKS, NAME, Examination, ExaminedPolicy
from async_grpo.doctor.model_checks import check_model
from async_grpo.doctor.report import Finding, Report, Verdict, fail, ok, skipped
from async_grpo.doctor.text_checks import (
    Texts,
    check_prompts,
    check_tokenizer,
)
from async_grpo.doctor.two_policies import TwoPolicies
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.preflight import preflight
from async_grpo.generation.starts import engine_starts
from async_grpo.training.model import load_policy

_PREFLIGHT = "preflight"


def run_doctor(config: Config, config_args: Sequence[str]) -> Report:
    """Examine the policy and the engines of `config`.

    Args:
        config: of the run.
        config_args: the command line's CONFIG and overrides, for an engine started here.

    Raises:
        ConfigError: the policy cannot be loaded, or a key cannot be read.
    """
    torch.set_num_threads(config.trainer.threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers
    findings = check_preflight(config)
    unfit = any(finding.verdict is Verdict.FAIL for finding in findings)
    policy = _examine_policy(config, findings)
    if unfit:
        findings += [skipped(check, "trainer and engines do not fit") for check in ENGINE_CHECKS]
        return Report(findings)
    keys = load_engine_keys(config.engine)
    make_client = partial(
        HttpEngineClient,
        control_timeout_s=config.engine.control_timeout_s,
        vocab_size=policy.policies.model.vocab_size,
        keys=keys,
    )
    starts = engine_starts(config, NAME, config_args, keys)
    if not config.engine.urls:
        del starts[1:]  # the others would be like the first
    unreachable = False
    for start, url in zip(starts, config.engine.urls or [""], strict=True):
        examination = Examination(config, policy, make_client, start, url)
        unreachable |= not asyncio.run(examination.run())
        findings += examination.findings
    return Report(findings, unreachable)


def check_preflight(config: Config) -> list[Finding]:
    """Versions, drivers and cards of both sides; the first finding has what was compared.

    Raises:
        ConfigError: there are too few cards, or an interpreter does not answer.
    """
    found = preflight(config, whole_run=True)
    if found.skipped:
        return [skipped(_PREFLIGHT, found.skipped)]
    figure = "; ".join([*found.sides, *(f"warning: {text}" for text in found.warnings)])
    if not found.problems:
        return [ok(_PREFLIGHT, figure)]
    return [fail(_PREFLIGHT, figure, "; ".join(found.problems))]


def _examine_policy(config: Config, findings: list[Finding]) -> ExaminedPolicy:
    device = resolve_device(config.trainer.device)
    model = load_policy(config.policy, config.trainer, device, trainable=False)
    findings += check_model(
        model, seed=config.run.seed, context_length=config.engine.context_length
    )
    finding, tokenizer = check_tokenizer(config, model)
    findings.append(finding)
    texts: Texts | None = None
    if tokenizer is None:
        findings.append(skipped("prompts", "they need a tokenizer"))
    else:
        finding, texts = check_prompts(config, tokenizer)
        findings.append(finding)
    policies = TwoPolicies(model, config.weights, seed=config.run.seed)
    return ExaminedPolicy(policies, tokenizer, texts)
