"""What a PPOJob resolves to, as a short table for people: roles, pools, GPUs, schedule, sizes."""

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.resolve import resolve, roles
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ExportPolicy

_EXPORTS = {
    ExportPolicy.FINAL: "after the last step",
    ExportPolicy.EACH: "with each checkpoint",
    ExportPolicy.NEVER: "none",
}


def describe(spec: PPOJobSpec) -> Group:
    """Return the tables of a checked spec, resolved or not."""
    resolved = resolve(spec)
    placement = Table(
        "role", "pool", "GPUs" if spec.device is Device.CUDA else "workers", box=None, padding=(0, 2, 0, 0)
    )
    for role, pool in roles(resolved):
        placement.add_row(role.value, pool.name, _size(pool))
    for worker in spec.workers:
        placement.add_row(worker.name, worker.pool, f"{worker.num_workers} of your own")
    facts = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, text in _facts(resolved):
        facts.add_row(name, text)
    return Group(placement, "", facts)


def _size(pool: Pool) -> str:
    nodes = "node" if pool.nodes == 1 else "nodes"
    return f"{pool.gpus} ({pool.nodes} {nodes} x {pool.gpus_per_node})"


def _schedule(spec: PPOJobSpec) -> str:
    disabled = ", ".join(overlap.value for overlap in spec.schedule.disabled_overlaps)
    return f"{spec.schedule.mode.value}{f' without {disabled}' if disabled else ''}"


def _facts(spec: PPOJobSpec) -> Iterator[tuple[str, str]]:
    batch, samples = spec.data.train_batch_size, spec.rollout.samples_per_prompt
    yield "schedule", _schedule(spec)
    yield "total", f"{sum(pool.gpus for pool in spec.pools)} on {spec.device.value}"
    yield "batch", f"{batch} prompts x {samples} = {batch * samples} sequences a step"
    yield (
        "updates",
        f"actor {_updates(spec, spec.actor.mini_batch_size)}"
        + (f", critic {_updates(spec, spec.critic.mini_batch_size)}" if spec.algorithm.needs_critic else ""),
    )
    if shares := spec.data.shares:
        yield "mixture", ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    yield "tokens", f"prompt {spec.data.max_prompt_length} + response {spec.data.max_response_length} at most"
    trainer, checkpoint = spec.trainer, spec.checkpoint
    length = f"{trainer.total_steps}" if trainer.total_epochs is None else f"those of {trainer.total_epochs} epochs"
    yield "steps", f"{length}, {_each(trainer.validate_every_steps, 'validation', spec.data.validation)}"
    place = f", in {checkpoint.path}" if checkpoint.path else ""
    yield "checkpoints", f"{_each(checkpoint.every_steps, 'one', True)}, {checkpoint.keep} kept{place}"
    target = f", uploaded to {checkpoint.export_to}" if checkpoint.export_to else ""
    yield "exports", f"{_EXPORTS[checkpoint.export]}{target}"


def _updates(spec: PPOJobSpec, mini_batch: int) -> str:
    count = spec.data.train_batch_size // mini_batch * spec.algorithm.epochs
    return f"{count} a step ({mini_batch} prompts each)"


def _each(steps: int, what: str, source: object) -> str:
    if not source or not steps:
        return f"no {what}" if what == "validation" else "one at the end"
    return f"{what} every {steps}"
