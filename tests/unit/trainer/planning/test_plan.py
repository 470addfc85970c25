"""A job's plan: every role is in its pool's sum, what does not fit is named with a change, and the change helps."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.planning import ShapeNotFoundError, plan_job
from ppojob_trainer.planning.configs import read_shape
from ppojob_trainer.planning.gpus import GPUS, gpus_of_pools
from ppojob_trainer.planning.plan import _exported
from ppojob_trainer.planning.report import as_json, as_text, phases_beyond_limit
from ppojob_trainer.planning.seconds import TimedRun, seconds_of
from ppojob_trainer.planning.work import Measured, Work
from ppojob_trainer.planning.workload import workload_of
from tests.unit.trainer.planning.jobs import HIDDEN, VOCABULARY, job, write_config, write_experts
from tests.unit.trainer.planning.measured import measure, measure_parameters
from tests.unit.trainer.planning.stubs import H200, MB, of_roles, plan, stub, work_of


def test_every_role_is_in_the_sum_of_its_pool(tmp_path: Path) -> None:
    """Actor 70, critic 80, reference 9 and reward model 12 MB; each is a process that keeps its memory."""
    reward = {"type": "Both", "function": {"module": "r"}}
    model = {"actor": {"path": write_config(tmp_path)}, "reward": {"path": write_config(tmp_path / "reward")}}
    (pool,) = plan(tmp_path, reward=reward, model=model).pools

    assert [found.role.name for found in pool.roles] == ["actor", "critic", "ref", "reward_model"]
    assert pool.memory.training == (70 + 80 + 9 + 12) * MB
    # While engines generate, weights and moments stay: 30, 33, 5 and 6.
    assert pool.memory.generation == pytest.approx((30 + 33 + 5 + 6) * MB + 0.5 * H200.memory)
    # Four models and the engine.
    assert pool.memory.processes == 5 * 2.25e9
    assert pool.total == pool.memory.generation + pool.memory.processes


def test_offloaded_moments_leave_while_another_role_computes(tmp_path: Path) -> None:
    offload = {"actor": {"path": write_config(tmp_path), "offload": {"optimizer": True}}}
    (pool,) = plan(tmp_path, model=offload).pools
    (actor, critic, ref) = pool.roles
    assert (actor.peak, critic.peak, ref.peak) == (70 * MB, 80 * MB, 9 * MB)
    # Its log-probs leave 5 MB in the allocator; then its update takes the place of all memory of the role.
    assert actor.need.idle == 15 * MB
    assert pool.memory.training == (70 + 80 + 9) * MB


def test_pools_have_their_own_roles_and_gpus(tmp_path: Path) -> None:
    pools = [{"name": "a", "gpusPerNode": 2}, {"name": "c", "gpusPerNode": 1}]
    placement = {"actor": "a", "critic": "c", "ref": ["c"], "reward": ["c"]}
    spec = job(write_config(tmp_path), pools=pools, placement=placement)
    found = plan_job(spec, gpus_of_pools(["a", "c"], ["H200", "c=L40S"]), runner=stub)

    names = {pool.name: ([role.role.name for role in pool.roles], pool.gpu.name) for pool in found.pools}
    assert names == {"a": (["actor"], "H200"), "c": (["critic", "ref"], "L40S")}
    assert found.pools[1].memory.training == (80 + 9) * MB
    assert found.pools[1].engine is None


def test_what_does_not_fit_is_named_with_fields_to_change(tmp_path: Path) -> None:
    small = replace(H200, memory=13e9)
    found = plan(tmp_path, small, rollout={"gpuMemoryUtilization": 0.9})
    (pool,) = found.pools
    assert not found.fits
    (change,) = [one for one in pool.changes if one.startswith("rollout.gpuMemoryUtilization")]
    value = float(change.split()[1])
    assert plan(tmp_path, small, rollout={"gpuMemoryUtilization": value}).pools[0].total <= small.memory
    assert any(one.startswith("critic.maxTokensPerGPU: 512 (now 1024)") for one in pool.changes)
    assert any(one.startswith("model.critic.offload.optimizer: true (frees 0.0 GB") for one in pool.changes)


@pytest.mark.parametrize(
    ("adapters", "lora", "proposed"),
    [
        (MB, {"rank": 16}, True),
        (MB, {"rank": 1}, False),
        # Next to nothing beside the frozen weights.
        (1000, {"rank": 16}, False),
    ],
)
def test_large_adapters_may_be_smaller(tmp_path: Path, adapters: int, lora: dict[str, int], proposed: bool) -> None:
    spec = job(write_config(tmp_path), model={"actor": {"path": write_config(tmp_path), "lora": lora}})

    def measured(work: Work) -> Measured:
        in_adapters = adapters * (work.options.lora is not None)
        return replace(stub(work), num_parameters=10 * MB, num_adapters=in_adapters)

    (pool,) = plan_job(spec, {"all": replace(H200, memory=13e9)}, runner=measured).pools

    gradients, moments = pool.roles[0].need.gradients, pool.roles[0].need.optimizer
    freed = (2 * gradients + moments) / 2 / 1e9
    words = f"model.actor.lora.rank: 8 (now 16), or fewer lora.targetModules (half of the adapters: {freed:.1f} GB)"
    assert (words in pool.changes) == proposed
    assert any("model.actor.lora.rank" in one for one in pool.changes) == proposed
    assert any("model.actor.offload.optimizer" in one for one in pool.changes) == (adapters == MB)


def test_a_group_that_divides_a_sequence_may_have_fewer_tokens_than_the_sequence(tmp_path: Path) -> None:
    """A sequence has up to 128 tokens, of which each of two ranks computes 64."""
    critic = {"miniBatchSize": 8, "sequenceParallelSize": 2, "maxTokensPerGPU": 128}

    (pool,) = plan(tmp_path, replace(H200, memory=13e9), critic=critic).pools

    assert "critic.maxTokensPerGPU: 64 (now 128)" in pool.changes


def test_a_phase_that_may_take_longer_than_its_limit_is_named(tmp_path: Path) -> None:
    long: dict[str, Any] = {"data": {"maxResponseLength": 960}, "rollout": {"samplesPerPrompt": 8}}
    assert list(phases_beyond_limit(plan(tmp_path, **long))) == []
    notes = list(phases_beyond_limit(plan(tmp_path, trainer={"totalSteps": 1, "phaseTimeoutSeconds": 1}, **long)))
    assert any(note.startswith("gen may take ") and "trainer.phaseTimeoutSeconds (1) ends" in note for note in notes)


def test_a_share_without_room_for_a_sequence_does_not_fit(tmp_path: Path) -> None:
    found = plan(tmp_path, rollout={"gpuMemoryUtilization": 0.0001})
    assert found.pools[0].engine is not None
    assert found.pools[0].engine.num_sequences == 0
    assert not found.fits
    assert any(one.startswith("rollout.tensorParallelSize (now 1)") for one in found.pools[0].changes)


def test_the_cache_by_hand(tmp_path: Path) -> None:
    """3 layers, 2 key heads of 32 numbers, keys and values in bfloat16: 768 bytes for a token."""
    engine = plan(tmp_path, rollout={"maxNumSeqs": 8}).pools[0].engine
    assert engine is not None
    assert engine.cache_per_token == 2 * 3 * 2 * 32 * 2
    room = engine.share - engine.weights - engine.working
    assert engine.cache_tokens == int(room / engine.cache_per_token)
    assert engine.num_sequences == 8


def test_an_engine_in_fp8_has_smaller_weights_and_reads_them_faster(tmp_path: Path) -> None:
    """A million parameters, of which the embedding stays in bfloat16. Those that are sent stay in it, too."""

    def many(work: Work) -> Measured:
        return replace(stub(work), num_parameters=MB)

    def work(**rollout: Any) -> tuple[float, float, float]:
        spec = job(write_config(tmp_path), rollout=rollout, algorithm={"rolloutCorrection": {}})
        found = plan_job(spec, {"all": H200}, runner=many)
        (pool,) = found.pools
        assert pool.engine is not None
        of_step = workload_of(spec, *of_roles(found))
        return pool.engine.weights, of_step.decode_bytes, of_step.weight_bytes

    (plain, plain_read, plain_sent), (fp8, fp8_read, fp8_sent) = work(), work(quantization="FP8")
    assert (plain, fp8) == (2 * MB, MB + VOCABULARY * HIDDEN)
    assert plain_read - fp8_read == pytest.approx(plain - fp8)
    assert plain_sent == fp8_sent == 2 * MB


def test_hosts_by_hand(tmp_path: Path) -> None:
    """Two ranks of three roles of 4 GB each, and AdamW's moments; one of them holds the file of an export."""
    offload = {"actor": {"path": write_config(tmp_path), "offload": {"optimizer": True}}}
    found = plan(tmp_path, model=offload)
    (host,) = found.hosts
    parameters = 8 * measure_parameters(tmp_path)
    processes = 2 * 3 * 4e9
    # The critic's 12 bytes per parameter and the actor's 4 are copied for a checkpoint, to memory that is kept.
    assert host.load == host.save == pytest.approx(processes + parameters + 2 * parameters)
    assert host.export == pytest.approx(host.load + parameters / 4)
    assert host.limit == 2 * 64 * 2**30
    assert host.fits
    (waiting,) = plan(tmp_path, model=offload, checkpoint={"async": False}).hosts
    assert waiting.load == pytest.approx(processes + parameters)
    assert waiting.save == pytest.approx(waiting.load + 4 * 2**30), "each rank of both holds a file"


@pytest.mark.parametrize(
    ("num_parameters", "nodes", "per_node", "files_of_a_host"),
    [
        # 14 GB are three files; of four hosts, none writes two of them.
        (7e9, 4, 8, 1),
        (7e9, 1, 8, 3),
        # 140 GB are 28 files.
        (70e9, 8, 8, 4),
        (70e9, 2, 8, 8),
    ],
)
def test_each_writer_of_an_export_holds_one_file(
    tmp_path: Path, num_parameters: float, nodes: int, per_node: int, files_of_a_host: int
) -> None:
    spec = job(write_config(tmp_path), pools=[{"name": "all", "nodes": nodes, "gpusPerNode": per_node}])
    assert _exported(spec, int(num_parameters), per_node) == files_of_a_host * 5e9


def test_seconds_are_those_of_the_measured_runs(tmp_path: Path) -> None:
    """A run predicts itself; twice the operations take about twice as long."""
    found = plan(tmp_path)
    work = work_of(found, layer_parameters=1e9)
    assert set(work.operations) == {"old_log_prob", "values", "ref", "update_critic", "update_actor"}
    seconds = {**dict.fromkeys(work.operations, 2.0), "gen": 5.0}
    again = seconds_of(found.spec, work, H200, [TimedRun(work, seconds, H200)])
    assert again.phases == pytest.approx(seconds)
    assert again.step.seconds >= 15.0

    doubled = replace(work, operations={name: 2 * number for name, number in work.operations.items()})
    twice = seconds_of(found.spec, doubled, H200, [TimedRun(work, seconds, H200)])
    assert all(2.0 < twice.phases[phase] < 4.0 for phase in work.operations)


def test_an_update_has_three_times_the_operations_of_a_pass_and_what_is_computed_again(tmp_path: Path) -> None:
    def operations(**model: Any) -> dict[str, float]:
        found = plan(tmp_path, model={"actor": {"path": write_config(tmp_path)}, "critic": model})
        return dict(work_of(found, layer_parameters=1e9).operations)

    plain, again, adapters = (
        operations(gradientCheckpointing=False),
        operations(),
        operations(lora={"rank": 4}),
    )
    assert plain["update_critic"] == 3 * plain["values"]
    assert again["update_critic"] == 4 * plain["values"]
    # 32 sequences of 128 tokens: 2 operations for each parameter, and for each pair 2 x layers x width.
    of_parameters, of_pairs = 2 * 1e9 * 32 * 128, 2 * 3 * 128 * 32 * 128**2
    assert plain["values"] == of_parameters + of_pairs
    assert adapters["update_critic"] == 3 * of_parameters + 4 * of_pairs


def test_the_report_of_divided_experts_says_what_it_assumes(tmp_path: Path) -> None:
    spec = job(write_experts(tmp_path), actor={"expertParallelSize": 2})
    found = plan_job(spec, {"all": H200}, runner=measure)
    assert found.fits
    content = json.loads(as_json(found))
    over = {role["role"]: role["expertsOver"] for role in content["pools"][0]["roles"]}
    assert over == {"actor": 2, "critic": 1, "ref": 2}
    (assumed,) = content["assumptions"]
    assert assumed.startswith("Routing is taken to be even (actor, ref): all experts of a layer get equally many")
    # 8 sequences of 128 tokens, each with experts on both ranks: hidden state, two choices and two weights of a token
    # go to both, with the numbers of rows. Two micro-batches, 3 layers; updates send hidden states and weights twice,
    # and gradients.
    tokens = 8 * 128 * 2
    hidden, choices, weights, sizes = tokens * HIDDEN * 2, tokens * 2 * 4, tokens * 2 * 2, 8 * (8 + 2)
    of_pass, of_update = 2 * hidden + choices + weights + sizes, 5 * hidden + choices + 3 * weights + sizes
    links = {(link["what"], link["way"]): link["bytes_each"] for link in content["links"]}
    assert links["actor: experts", "between its ranks"] == 2 * 3 * (of_pass + of_update)
    printed = io.StringIO()
    Console(file=printed, width=200).print(as_text(found))
    assert "actor (experts over 2)" in printed.getvalue()
    assert assumed in " ".join(printed.getvalue().split())
    (whole,) = plan_job(job(write_experts(tmp_path)), {"all": H200}, runner=measure).pools
    assert json.loads(as_json(replace(found, pools=[whole])))["assumptions"] == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere/model", "spec.model.actor.path: /nowhere/model: no config.json on this machine. Copy the model's "),
        ("hf://somebody/unknown", "spec.model.actor.path: hf://somebody/unknown: an address that a plan does not "),
        ("s3://bucket/model", "spec.model.actor.path: s3://bucket/model: an address that a plan does not fetch"),
    ],
)
def test_a_shape_that_is_not_known_is_refused_with_a_remedy(path: str, words: str) -> None:
    with pytest.raises(ShapeNotFoundError) as refusal:
        read_shape("model.actor.path", path, False)
    assert words in str(refusal.value)
    assert "--set spec.model.actor.path=hf://Qwen/Qwen2.5-7B. Known: HuggingFaceTB/SmolLM2-135M, " in str(refusal.value)


def test_jobs_that_cannot_be_planned_are_refused(tmp_path: Path) -> None:
    path, gpus = write_config(tmp_path), {"all": H200}
    with pytest.raises(ValueError, match=r"spec.device: CPU: a plan is of GPUs: add --set spec.device=CUDA"):
        plan_job(job(path, device="CPU"), gpus)
    with pytest.raises(ModelMismatchError, match=r"actor.tensorParallelSize 8 does not divide this qwen2's"):
        plan_job(job(path, 8, actor={"tensorParallelSize": 8}), gpus)
    own = {"engine": "Class", "engineClass": {"module": "mine", "className": "Mine"}}
    with pytest.raises(ValueError, match=r"spec.critic.engine: Class: a plan knows the memory of engine FSDP alone"):
        plan_job(job(path, critic=own), gpus)
    with pytest.raises(ModelMismatchError, match=r"actor.expertParallelSize 2: qwen2 is no mixture of experts: set it"):
        plan_job(job(path, 2, actor={"expertParallelSize": 2}), gpus)
    by_experts = {"rollout": {"tensorParallelSize": 2, "enableExpertParallel": True}}
    with pytest.raises(ModelMismatchError, match=r"rollout.enableExpertParallel true: qwen2 is no mixture of experts"):
        plan_job(job(path, 2, **by_experts), gpus)
    with pytest.raises(ModelMismatchError, match=r"critic.pipelineParallelSize 4 is more than this qwen2's num_hidden"):
        plan_job(job(path, 4, critic={"pipelineParallelSize": 4}), gpus)
    fp8: dict[str, Any] = {"rollout": {"quantization": "FP8"}, "algorithm": {"rolloutCorrection": {}}}
    with pytest.raises(ValueError, match=r"spec.rollout.quantization: FP8: the A100 of pool all has no FP8 units"):
        plan_job(job(path, **fp8), {"all": GPUS["A100"]})
    with pytest.raises(ModelMismatchError, match=r"rollout.quantization FP8: qwen3_moe is a mixture of experts"):
        plan_job(job(write_experts(tmp_path / "experts"), **fp8), gpus)
    with pytest.raises(ValueError, match=r"--gpu c=H9000: H9000 is not known: use one of B200"):
        gpus_of_pools(["c"], ["c=H9000"])
    with pytest.raises(ValueError, match=r"--gpu d=H200: the job has no pool d: use one of c"):
        gpus_of_pools(["c"], ["d=H200"])
