"""What a run's /metrics serves: a gauge for each metric, with labels where a metric is one of several."""

import urllib.request
from collections.abc import Iterator

import pytest

from ppojob_trainer.telemetry.sinks.prometheus import PrometheusSink, Series, series_of


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    made = PrometheusSink(0, address="127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("metric", "series"),
    [
        ("actor/ppo_kl", Series("ppojob_actor_ppo_kl")),
        ("val-core/score/mean", Series("ppojob_val_core_score_mean")),
        ("timing_s/update_actor", Series("ppojob_timing_s", {"phase": "update_actor"})),
        ("timing_per_token_ms/gen", Series("ppojob_timing_per_token_ms", {"phase": "gen"})),
        ("comm_receivers/update_weights", Series("ppojob_comm_receivers", {"phase": "update_weights"})),
        ("comm_gb_per_s/update_weights", Series("ppojob_comm_gb_per_s", {"phase": "update_weights"})),
        ("comm_transport/actor/nvlink", Series("ppojob_comm_transport", {"who": "actor", "transport": "nvlink"})),
        ("perf/mfu/critic", Series("ppojob_perf_mfu", {"role": "critic"})),
        ("perf/max_memory_allocated_gb/ref", Series("ppojob_perf_max_memory_allocated_gb", {"role": "ref"})),
        ("perf/max_memory_reserved_gb/ref", Series("ppojob_perf_max_memory_reserved_gb", {"role": "ref"})),
        ("perf/throughput", Series("ppojob_perf_throughput")),
        ("pool/a-b/memory_peak_gb", Series("ppojob_pool_memory_peak_gb", {"pool": "a-b"})),
        ("mixture/gsm8k/share", Series("ppojob_mixture_share", {"source": "gsm8k"})),
        ("mixture/gsm8k/score/mean", Series("ppojob_mixture_score_mean", {"source": "gsm8k"})),
        ("val-core/openai/gsm8k/score/mean@1", Series("ppojob_val_core_openai_gsm8k_score_mean_1")),
    ],
)
def test_phases_roles_pools_and_sources_are_labels(metric: str, series: Series) -> None:
    assert series_of(metric) == series


def test_the_port_serves_the_last_step(sink: PrometheusSink) -> None:
    sink.write(1, 1e9, {"pool/a/busy_fraction": 0.5, "pool/b/busy_fraction": 0.25, "timing_s/testing": 3.0})
    sink.write(2, 2e9, {"pool/a/busy_fraction": 0.75})

    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=120) as answer:
        served = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]

    assert served == [
        "ppojob_step 2.0",
        "ppojob_last_step_timestamp_seconds 2e+09",
        'ppojob_pool_busy_fraction{pool="a"} 0.75',
        'ppojob_pool_busy_fraction{pool="b"} 0.25',
        'ppojob_timing_s{phase="testing"} 3.0',
    ]


def test_a_metric_of_a_users_own_that_has_the_name_of_another_is_named_and_the_others_are_served(
    sink: PrometheusSink,
) -> None:
    with pytest.raises(ValueError, match=r"timing_s would be ppojob_timing_s with the labels \[\], not \['phase'\]"):
        sink.write(1, 1e9, {"timing_s/gen": 1.0, "timing_s": 2.0, "actor/ppo_kl": 0.5})

    assert sink.registry.get_sample_value("ppojob_actor_ppo_kl") == 0.5
