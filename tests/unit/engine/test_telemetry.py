from async_grpo.engine.telemetry import Telemetry
from async_grpo.engine_api import Load


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_throughput_is_taken_over_at_least_a_second():
    clock = Clock()
    telemetry = Telemetry(clock)
    assert telemetry.throughput(50) == 0.0
    clock.now += 2.0
    assert telemetry.throughput(60) == 30.0
    clock.now += 0.5
    telemetry.finished(4, 60, aborted=False)
    assert telemetry.throughput(40) == 30.0, "too soon for another"
    clock.now += 1.5
    assert telemetry.throughput(0) == 0.0, "what was sampled has been answered"
    clock.now += 4.0
    assert telemetry.throughput(100) == 25.0


def test_prometheus_text():
    telemetry = Telemetry(Clock())
    telemetry.finished(4, 10, aborted=False)
    telemetry.finished(6, 3, aborted=True)
    telemetry.loaded("disk", 0.5)
    telemetry.loaded("disk", 1.0)
    load = Load(num_running_reqs=2, num_waiting_reqs=1, token_usage=0.25, gen_throughput=12.5)
    text = telemetry.prometheus('a "b"\\c', load, num_paused=3)
    label = '{model_name="a \\"b\\"\\\\c"}'
    for line in (
        f"sglang:num_running_reqs{label} 2",
        f"sglang:num_queue_reqs{label} 1",
        f"sglang:num_paused_reqs{label} 3",
        f"sglang:token_usage{label} 0.25",
        f"sglang:gen_throughput{label} 12.5",
        f"sglang:prompt_tokens_total{label} 10",
        f"sglang:generation_tokens_total{label} 13",
        f"sglang:num_requests_total{label} 2",
        f"sglang:num_aborted_requests_total{label} 1",
        "# TYPE sglang:num_aborted_requests_total counter",
        'sglang:weight_load_duration_seconds_sum{model_name="a \\"b\\"\\\\c",source="disk"} 1.5',
        'sglang:weight_load_duration_seconds_count{model_name="a \\"b\\"\\\\c",source="disk"} 2',
    ):
        assert line in text.splitlines()
    assert text.endswith("\n")
