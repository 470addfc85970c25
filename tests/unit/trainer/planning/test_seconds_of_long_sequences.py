"""Seconds of long sequences: attention between tokens has a lower rate than the other operations."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppojob_trainer.planning.comparison import timed_runs
from ppojob_trainer.planning.gpus import GPUS
from ppojob_trainer.planning.seconds import TimedRun, seconds_of
from ppojob_trainer.planning.workload import Workload
from tests.unit.trainer.planning.jobs import write_config
from tests.unit.trainer.planning.stubs import H200, plan, work_of

SEQUENCES, LENGTH, LAYERS, WIDTH = 32, 128, 3, 128


def test_pairs_by_hand(tmp_path: Path) -> None:
    """A pass has each pair of tokens once, an update four times: forward, computed again, and twice backward."""
    critic = {"lora": {"rank": 4}}
    found = plan(tmp_path, model={"actor": {"path": write_config(tmp_path)}, "critic": critic})
    of_pass = 2 * LAYERS * WIDTH * SEQUENCES * LENGTH**2
    work = work_of(found, layer_parameters=1e9)
    # The critic trains adapters alone, and attention has no matrices that could be frozen.
    assert work.pairs == {
        "old_log_prob": of_pass,
        "values": of_pass,
        "ref": of_pass,
        "update_critic": 4 * of_pass,
        "update_actor": 4 * of_pass,
    }
    of_matrices = 2 * 1e9 * SEQUENCES * LENGTH
    assert work.operations["values"] == of_matrices + of_pass
    assert work.operations["update_critic"] == 3 * of_matrices + 4 * of_pass


@pytest.mark.parametrize(("layer_parameters", "is_long"), [(1e9, False), (0.0, True)])
def test_sequences_are_long_if_attention_is_a_large_part(
    tmp_path: Path, layer_parameters: float, is_long: bool
) -> None:
    assert work_of(plan(tmp_path), layer_parameters=layer_parameters).is_long == is_long


def test_attention_takes_what_remained_of_the_measured_run(tmp_path: Path) -> None:
    """Two seconds for the operations; long sequences took five for a pass, eleven for an update with three times the
    pairs."""
    found = plan(tmp_path)
    phases = ("old_log_prob", "update_actor")
    operations, gpus = dict.fromkeys(phases, 1e18), dict.fromkeys(phases, 2)
    short = replace(work_of(found, layer_parameters=1e9), operations=operations, gpus=gpus, pairs={})
    long = replace(short, pairs={"old_log_prob": 3e17, "update_actor": 9e17})
    runs = [
        TimedRun(short, dict.fromkeys(phases, 2.0), H200),
        TimedRun(long, {"old_log_prob": 5.0, "update_actor": 11.0}, H200),
    ]

    assert seconds_of(found.spec, long, H200, runs).phases == pytest.approx({"old_log_prob": 5.0, "update_actor": 11.0})
    assert seconds_of(found.spec, short, H200, runs).phases == pytest.approx(dict.fromkeys(phases, 2.0))
    half = replace(long, pairs={phase: size / 2 for phase, size in long.pairs.items()})
    assert seconds_of(found.spec, half, H200, runs).phases == pytest.approx({"old_log_prob": 3.5, "update_actor": 6.5})


def test_attention_is_scaled_by_the_arithmetic_of_the_gpu(tmp_path: Path) -> None:
    found = plan(tmp_path)
    short = replace(work_of(found, layer_parameters=1e9), operations={"ref": 1e18}, gpus={"ref": 2}, pairs={})
    long = replace(short, pairs={"ref": 9e17})
    runs = [TimedRun(short, {"ref": 1.0}, H200), TimedRun(long, {"ref": 3.0}, H200)]
    of_attention = [
        seconds_of(found.spec, long, GPUS[name], runs).phases["ref"]
        - seconds_of(found.spec, short, GPUS[name], runs).phases["ref"]
        for name in ("H200", "A100")
    ]
    assert of_attention[1] / of_attention[0] == pytest.approx(GPUS["H200"].peak_flops / GPUS["A100"].peak_flops)


def test_the_measured_runs_of_long_sequences_hardly_change_short_ones(tmp_path: Path) -> None:
    found = plan(tmp_path)
    work = work_of(found, layer_parameters=7e9)
    short = [run for run in timed_runs() if not run.workload.is_long]
    assert 0 < len(short) < len(timed_runs())
    with_long = seconds_of(found.spec, work, H200, timed_runs()).phases
    without = seconds_of(found.spec, work, H200, short).phases
    assert {phase: with_long[phase] for phase in work.operations} == pytest.approx(
        {phase: without[phase] for phase in work.operations}, rel=0.01
    )


def test_a_decoding_step_takes_longer_with_more_sequences(tmp_path: Path) -> None:
    """Three milliseconds of the host for 100 sequences and five for 200, beside the GPU's own; a slow host hardly
    counts."""
    found = plan(tmp_path)
    work = replace(work_of(found, layer_parameters=1e9), decode_steps=1000, decode_bytes=0.0, decode_operations=0.0)
    few, many, more, slow = (replace(work, decode_sequences=number) for number in (100, 200, 300, 150))
    on_gpu = replace(many, decode_bytes=H200.bandwidth / 1000, decode_operations=H200.peak_flops / 500)
    runs = [TimedRun(one, {"gen": one.decode_sequences / 50 + 1}, H200) for one in (few, many, more)]
    runs.append(TimedRun(slow, {"gen": 20.0}, H200))
    runs.append(TimedRun(on_gpu, {"gen": 5.0 + 3.0}, H200))

    def seconds(of: Workload) -> float:
        return seconds_of(found.spec, of, H200, runs).phases["gen"]

    assert seconds(replace(work, decode_sequences=50)) == pytest.approx(2.0, rel=0.1)
    assert seconds(many) == pytest.approx(5.0, rel=0.1)
    assert seconds(on_gpu) == pytest.approx(8.0, rel=0.1)


def test_work_of_decoding_by_hand(tmp_path: Path) -> None:
    """32 sequences on two engines of a GPU each, of which an engine takes eight at once."""
    found = plan(tmp_path, rollout={"maxNumSeqs": 8})
    work = work_of(found, layer_parameters=1e9)
    actor = found.roles["actor"].role.config
    assert work.decode_sequences == 8
    assert work.decode_operations == 8 * 2 * (1e9 + actor.vocab_size * actor.hidden_size)
    assert work.decode_steps == 2 * found.spec.data.max_response_length
