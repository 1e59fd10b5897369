"""The doctor against the embedded engine: sound, and with one planted fault at a time."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.doctor.report import Finding, Report, Verdict
from async_grpo.doctor.runner import run_doctor
from async_grpo.errors import ExitCode
from async_grpo.training.toy import make_toy_tokenizer
from tests.fakes.faulty_engine import IGNORED_TENSOR, Fault

pytestmark = pytest.mark.timeout(300)  # loads models on a busy machine

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Practice:
    """An engine to plant faults in, and the configuration that attaches to it."""

    url: str
    config_path: Path

    def plant(self, fault: Fault) -> None:
        self.post("/plant", {"fault": fault.value})

    def post(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            return json.loads(reply.read())

    def config(self, *overrides: str) -> Config:
        return load_config(self.config_path, [f"engine.urls=[{self.url}]", *overrides])

    def examine(self, fault: Fault, *overrides: str) -> Report:
        self.plant(fault)
        return run_doctor(self.config(*overrides), [])


def make_model(directory: Path, *, vocab_size: int) -> None:
    """A tiny policy and its tokenizer of 50 ids."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=1024,
            tie_word_embeddings=True, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )
    ).save_pretrained(directory)  # fmt: skip
    make_toy_tokenizer().save_pretrained(directory)


@pytest.fixture(scope="module")
def practice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    directory = tmp_path_factory.mktemp("doctor")
    model = directory / "model"
    make_model(model, vocab_size=50)
    path = directory / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"output_dir": str(directory / "run"), "num_train_steps": 1},
                "policy": {"model": str(model)},
                "task": {"name": "reverse"},
                "generation": {"max_new_tokens": 24},
                "weights": {"timeout_s": 20.0},
            }
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.faulty_engine", str(path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the engine ended with {process.wait(30)}"
    yield Practice(json.loads(line)["url"], path)
    process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()


def verdicts(report: Report) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in report.findings}


def failed(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.verdict is Verdict.FAIL]


def the_failed(report: Report) -> Finding:
    (finding,) = failed(report)
    return finding


def test_a_sound_engine_passes_every_check(practice: Practice) -> None:
    report = practice.examine(Fault.NONE)
    assert failed(report) == []
    assert report.exit_code is ExitCode.OK
    assert verdicts(report) == {
        "preflight": Verdict.SKIPPED,
        "repeatable": Verdict.OK, "packing": Verdict.OK, "neighbors": Verdict.OK,
        "head": Verdict.OK, "tokenizer": Verdict.OK, "prompts": Verdict.OK,
        "reach": Verdict.OK, "vocabulary": Verdict.OK, "log-probs, T=1": Verdict.OK,
        "log-probs, T=0.7": Verdict.OK, "distribution": Verdict.OK, "noise floor": Verdict.OK,
        "text": Verdict.SKIPPED, "weights": Verdict.OK, "prefix cache": Verdict.OK,
        "spans": Verdict.OK,
    }  # fmt: skip
    measured = {finding.check: finding.values for finding in report.findings}
    assert measured["log-probs, T=0.7"]["max"] < 2e-5
    assert measured["weights"]["probe_gap"] < 2e-5
    assert measured["spans"]["retract_num_crossed"] >= 1
    assert measured["spans"]["retract_gap_max"] < 2e-5
    assert measured["spans"]["in_place_gap_max"] < 2e-5


def test_unscaled_logprobs_fail_at_the_temperature_where_they_show(practice: Practice) -> None:
    finding = the_failed(practice.examine(Fault.UNSCALED))
    assert finding.check == "log-probs, T=0.7"
    assert finding.values["mean"] > 0.1
    assert "not divided by the temperature" in finding.advice


def test_unscaled_logprobs_fail_at_the_runs_temperature(practice: Practice) -> None:
    report = practice.examine(Fault.UNSCALED, "generation.temperature=0.7")
    assert report.exit_code is ExitCode.OTHER
    assert {"log-probs, T=0.7", "log-probs, T=1.3"} <= {each.check for each in failed(report)}


def test_a_stale_prefix_cache_fails(practice: Practice) -> None:
    finding = the_failed(practice.examine(Fault.STALE_PREFIX))
    assert finding.check == "prefix cache"
    assert finding.values["cached_tokens"] > 100
    assert finding.values["retract_namespace_max"] > 0.1
    assert "--disable-radix-cache" in finding.advice


def test_a_tensor_that_the_engine_ignores_is_named(practice: Practice) -> None:
    report = practice.examine(Fault.IGNORED_TENSOR)
    finding = next(each for each in failed(report) if each.check == "weights")
    assert f"as if {IGNORED_TENSOR} had not arrived" in finding.figure


def test_a_crossing_completion_of_one_version_fails(practice: Practice) -> None:
    finding = the_failed(practice.examine(Fault.ONE_VERSION))
    assert finding.check == "spans"
    assert "their log-probs switch at token" in finding.figure


def test_a_token_counted_to_the_update_behind_it_fails(practice: Practice) -> None:
    finding = the_failed(practice.examine(Fault.LATE_TOKEN))
    assert finding.check == "spans"
    assert "in_place: the token behind every switch is of the weights before it" in finding.figure


def test_completions_that_are_too_likely_fail(practice: Practice) -> None:
    finding = the_failed(practice.examine(Fault.SHARPENED))
    assert finding.check == "distribution"
    assert finding.values["z"] < -5
    assert finding.values["surprisal"] < finding.values["entropy"]


def test_logprobs_that_change_from_call_to_call_fail(practice: Practice) -> None:
    report = practice.examine(Fault.NOISY)
    noise = next(each for each in failed(report) if each.check == "noise floor")
    assert noise.values["twice"] > 0.01


def test_an_engine_with_another_tokenizer_fails(practice: Practice) -> None:
    finding = the_failed(practice.examine(Fault.OTHER_TEXT))
    assert finding.check == "text"
    assert "start the engine with the tokenizer of policy.model" in finding.advice


def test_a_refused_update_fails_and_what_builds_on_it_is_skipped(practice: Practice) -> None:
    report = practice.examine(Fault.REFUSES_UPDATES)
    finding = the_failed(report)
    assert finding.check == "weights"
    assert "has no tensor" in finding.figure
    assert verdicts(report)["spans"] is Verdict.SKIPPED
    # the engine goes on: it is not left paused in an open session
    assert practice.examine(Fault.NONE).exit_code is ExitCode.OK


def test_an_engine_that_falls_silent_in_an_update_is_given_up(practice: Practice) -> None:
    limits = ["weights.timeout_s=5", "engine.control_timeout_s=5"]
    report = practice.examine(Fault.SILENT, *limits)
    finding = the_failed(report)
    assert finding.check == "weights"
    assert "did not answer within 5 s" in finding.figure
    assert verdicts(report)["spans"] is Verdict.SKIPPED
    # given back its voice, it is of use again
    assert practice.examine(Fault.NONE).exit_code is ExitCode.OK


@pytest.mark.parametrize("transport", ["disk", "http"])
def test_updates_go_by_the_runs_transport(practice: Practice, transport: str) -> None:
    report = practice.examine(Fault.NONE, f"weights.transport={transport}")
    assert failed(report) == []
    assert verdicts(report)["weights"] is Verdict.OK
    # files of a run that may lie there are not touched, and none of ours are left
    root = practice.config_path.parent / "run"
    assert not (root / "weights").exists()
    assert not (root / "weights-doctor").exists()


def test_an_engine_that_is_not_there_is_exit_code_3(practice: Practice) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        report = run_doctor(practice.config(f"engine.urls=[{url}]"), [])
    assert report.exit_code is ExitCode.PEER
    finding = the_failed(report)
    assert (finding.check, finding.engine) == ("reach", url)
    assert "is it started" in finding.advice


def test_an_engine_that_somebody_uses_is_left_alone(practice: Practice) -> None:
    practice.plant(Fault.NONE)
    before = practice.get("/weights_checker")
    practice.post("/pause_generation", {"mode": "in_place"})
    body = {"input_ids": [3, 4], "rid": "theirs", "sampling_params": {"max_new_tokens": 2}}
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(practice.post, "/generate", body)
        while practice.get("/v1/loads")["loads"][0]["num_waiting_reqs"] == 0:
            assert not theirs.done()
        report = run_doctor(practice.config(), [])
        practice.post("/continue_generation", {})
        assert theirs.result(30)["meta_info"]["completion_tokens"] == 2
    assert failed(report) == []
    assert verdicts(report)["weights"] is Verdict.SKIPPED
    assert "1 requests of somebody else" in report.findings[-1].figure
    assert practice.get("/weights_checker") == before


def test_an_engine_with_another_vocabulary_is_refused_untouched(
    practice: Practice, tmp_path: Path
) -> None:
    make_model(tmp_path, vocab_size=64)
    report = run_doctor(practice.config(f"policy.model={tmp_path}"), [])
    finding = the_failed(report)
    assert finding.check == "vocabulary"
    assert "has 50 ids, the policy 64" in finding.figure
    assert verdicts(report)["weights"] is Verdict.SKIPPED


def test_a_tokenizer_of_another_vocabulary_fails(practice: Practice, tmp_path: Path) -> None:
    make_model(tmp_path, vocab_size=50)
    tokenizer = make_toy_tokenizer()
    tokenizer.add_tokens(["extra-one", "extra-two"])
    tokenizer.save_pretrained(tmp_path)
    practice.plant(Fault.NONE)
    report = run_doctor(practice.config(f"policy.model={tmp_path}"), [])
    finding = the_failed(report)
    assert finding.check == "tokenizer"
    assert "makes ids up to 51, the policy knows 50" in finding.figure
    # what needs no texts is examined all the same
    assert verdicts(report)["log-probs, T=1"] is Verdict.OK


def test_the_command_starts_an_engine_of_its_own_and_ends_it(practice: Practice) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "async_grpo", "doctor", str(practice.config_path), "--json"],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    by_name = {check["check"]: check for check in told["checks"]}
    assert by_name["spans"]["verdict"] == "ok"
    url = by_name["reach"]["engine"]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/model_info", timeout=10)
