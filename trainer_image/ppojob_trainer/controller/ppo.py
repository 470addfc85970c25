"""One step of PPO as a dataflow of awaits. In Overlapped, with critic, ref and reward in a separate pool:

    time ────────────────────────────────────────────────────────────────────────────────▶
    actor pool    gen N ───────┬─ old_log_prob N ─┐       ┌─ update_actor N ─ update_weights ─ gen N+1 ──────┬─ ...
                    │ │ │ │    │                  ├─ adv ─┤                                      │ │ │ │     │
    critic pool     └─┴─┴─┴ values, ref N ────────┤       └─ update_critic N ───────────────────▶┴─┴─┴ values, ref N+1
    CPU cores       └─┴─┴─┴ reward N ─────────────┘

* Phases of one pool run one after the other; phases of different pools run at the same time. Whatever the schedule
  allows, a phase waits for its turn in its pool (`Phases.run_alone`). So if the rollout is in the critic's pool,
  update_weights N and gen N+1 run after update_critic N. A reward model is a phase of its pool; a reward function runs
  on CPU cores, independent of its pool's GPUs.
* In a pool that is shared with the rollout, the engines generate their part of gen N+1 after update_critic N, and
  values N+1 run after that. When the engines of one pool are done, its phases start on the finished responses while
  engines of other pools still generate. Engines that sleep allocate memory when they receive the weights, so
  update_weights N waits for that pool too.
* Responses go to the other pools as they finish: see `forward`. If a user-defined worker changes the batch after gen,
  the phases wait for the whole batch.
* User-defined workers are called after gen, after the scores (before adv), and after update_weights. The columns that
  they return are merged into the batch.
* The weights are sent when the actor's update is done. If the critic is in another pool, neither the weights nor the
  next generation waits for it; engines in a pool that is shared with the rollout are the exception.
* values N+1 wait for update_critic N, so every number equals that of the serial order.
* Without a critic (GRPO, RLOO, REINFORCE++) the phases are the same less the critic's. If the rollout has its own pool,
  log-probs, reference and reward run while it generates; in one pool the reward function runs beside the log-probs.
* With dynamic sampling, responses are scored while others are generated, and further prompts are requested, until the
  batch is full (`batch_filler`). So all other phases wait for the whole batch.
* With one minibatch and one epoch, the policy that is updated is the one that computes old_log_prob: it is left out.
  So it is if the engine's log-probs take its place (`algorithm.rolloutCorrection.method: Bypass`).
* With a reference or a reward model in several pools, each computes rows of it when it has nothing else to compute
  (`shared_rows`).
* In mode OneStepOff, `queue` draws which steps are generated while others are trained, also with weights that are
  updated in flight. reward N+1 (ref too, if its pool neither trains nor generates) runs while step N is trained.
  old_log_prob stays that of the policy at the start of the step, so the clipping does not depend on the staleness.

`loop` calls `queue.begin` (generations), `prepare` (up to the advantages: it changes no model and can be dropped) and
`apply` (cannot be dropped). Each sample has its own seed (see `RolloutPort.generate`), so a generation that is dropped
and repeated gives the same responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.batch_filler import BatchFiller, FillerCalls, Scored
from ppojob_trainer.controller.dynamic_sampling import DynamicSampler, SamplingSettings
from ppojob_trainer.controller.engine_weights import EngineWeights
from ppojob_trainer.controller.forward import StreamedPhases, on_whole
from ppojob_trainer.controller.forward_plan import SCORING, ForwardPlan
from ppojob_trainer.controller.generation import Generation, Listener
from ppojob_trainer.controller.metrics import length_metrics, staleness_metrics
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import B, Metrics, Ports, Prompts, Rollout
from ppojob_trainer.controller.queue import Generated, GenerationQueue
from ppojob_trainer.controller.schedule import Schedule, leaves_out_old_log_prob

if TYPE_CHECKING:
    # `maths` imports torch, which the controller does not need.
    from ppojob_trainer.maths.kl import KLController

__all__ = ["PPO", "PPOSettings", "Prepared"]

T = TypeVar("T")


@dataclass(frozen=True)
class PPOSettings:
    """The settings of the spec that a step reads.

    pool_of: pool of each role. max_response_length: in tokens, for the clip ratio of lengths. critic_warmup_steps:
    steps at the start that update only the critic. is_one_update: each batch is used for one update and nothing else
    reads old_log_probs, so the ratio is 1. is_bypassed: they are the engine's. sampling: None: no dynamic sampling.
    gpus: of each pool; those that are left out have one.
    """

    pool_of: Mapping[str, str]
    max_response_length: int
    critic_warmup_steps: int = 0
    is_one_update: bool = False
    is_bypassed: bool = False
    sampling: SamplingSettings | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared(Generic[B]):
    """The data that the updates of a step read."""

    step: int
    batch: B
    metrics: dict[str, float]


class PPO(Generic[B]):
    """Runs steps. It keeps the running update of the critic, because the next step's values wait for it.

    queue: the generations; `loop` saves and restores them. load_again: sends the engines their weights again; or None.
    """

    def __init__(
        self, ports: Ports[B], schedule: Schedule, phases: Phases, settings: PPOSettings, kl: KLController
    ) -> None:
        self._ports, self._schedule, self._phases = ports, schedule, phases
        self._settings, self._kl = settings, kl
        # On-policy, the policy does not change while the engines generate, so its weights can be sent again.
        self.load_again = None if schedule.max_staleness else self._load_again
        self._generation = Generation(ports, phases, self.load_again, keeps=schedule.max_staleness > 0)
        self._weights = EngineWeights(ports.weights, phases, self._generation.roles, in_flight=schedule.in_flight)
        self.queue = GenerationQueue(self._generate, schedule.max_staleness, in_flight=schedule.in_flight)
        self._writing = {settings.pool_of[role] for role in self._generation.roles}
        self._plan = ForwardPlan(
            ports,
            schedule,
            phases,
            settings.pool_of,
            settings.gpus,
            self._writing,
            has_old_log_prob=not leaves_out_old_log_prob(
                schedule, is_one_update=settings.is_one_update, is_bypassed=settings.is_bypassed
            ),
            critic_is_done=self.critic_metrics,
        )
        self._critic_update: asyncio.Task[Metrics] | None = None
        self._step_hooks: asyncio.Task[Metrics] | None = None
        # With older weights, those of several steps.
        self._streamed: set[StreamedPhases[B]] = set()
        self._sampler = None if settings.sampling is None else DynamicSampler(settings.sampling)

    async def _generate(self, step: int, version: int) -> Generated[B]:
        """Get the prompts of a step and generate the responses, with the engines' weights of that version.

        Raises:
            BatchNotFilledError: dynamic sampling reached its limit.
        """
        if self._sampler is not None:
            return await self._filled(self._sampler, step, version)
        prompts = await self._run(Phase.DATA, "data", step, self._ports.data.prompts(step))
        start = self._phases.now()
        streamed: StreamedPhases[B] | None = None
        if self._schedule.streaming and not self._has_generate_hooks:
            rollout, streamed = await self._stream(prompts, step)
        else:
            rollout = await self._generation.write(prompts, step)
        batch, metrics = prompts.batch.union(rollout.batch), self._weights.paused_metrics(start)
        return Generated(step, batch, rollout, prompts.epoch, version, streamed, metrics=metrics)

    async def _filled(self, sampler: DynamicSampler, step: int, version: int) -> Generated[B]:
        """Generate and score until the batch is full of prompts whose scores differ."""
        data, phases = self._ports.data, self._plan.scoring(step)
        calls = FillerCalls(
            prompts=lambda count: self._run(Phase.DATA, "data", step, data.prompts(step, count)),
            give_back=lambda used: self._run(Phase.DATA, "data", step, data.give_back(step, used)),
            reload=lambda: self._reload(step),
            score=lambda batch: self._score(batch, step),
            sources=list(phases),
        )
        can_score = not self._has_generate_hooks and self._plan.can_score_while_generating()
        is_streamed = self._schedule.streaming and can_score
        found = await BatchFiller(sampler, self._generation, calls, step, is_streamed=is_streamed).fill()
        of_scores = {
            key: value for name in found.scores for key, value in phases[name].metrics(found.scores[name]).items()
        }
        rollout, metrics = self._ports.rollout.joined(found.rollout), {**found.metrics, **of_scores}
        return Generated(step, found.batch, rollout, found.epoch, version, is_scored=True, metrics=metrics)

    async def _reload(self, step: int) -> None:
        """Send the weights to engines that have released them, in the middle of a step."""
        if self._weights.are_released:
            # The policy is still that of the last step.
            await self._weights.push(step, step - 1)

    async def _score(self, batch: B, step: int) -> Scored[B]:
        hooked: Metrics = {}
        if self._has_generate_hooks:
            batch, hooked = await self._generate_hooks(batch, step)
        phases, reward = self._plan.scoring(step), self._ports.reward
        scores = await on_whole(phases, self._plan.chains(phases).values(), batch)
        # In one order for all parts: they are joined by position.
        scored = batch.union(*(scores[name] for name in phases))
        batch, total = await self._run(Phase.REWARD, "reward", step, reward.total(scored))
        return Scored(batch, scores, reward.row_scores(batch), {**hooked, **total})

    async def validation_scores(self, batch: B, step: int) -> list[B]:
        """Return the scores of each source, in the order of `SCORING`; all sources compute at the same time."""
        phases = self._plan.scoring(step, recorded_as=Phase.VALIDATE).values()
        return list(await asyncio.gather(*(phase.compute(batch) for phase in phases)))

    @property
    def _has_generate_hooks(self) -> bool:
        return any(hook.after is HookPoint.GENERATE for hook in self._ports.hooks)

    async def prepare(self, step: int) -> Prepared[B]:
        """Compute everything that the updates read. Waits for the last step's critic update before the values."""
        ports, generated = self._ports, await self.queue.take(step)
        if not generated.is_scored:
            batch, hooked = await self._generate_hooks(generated.batch, step)
            generated = replace(generated, batch=batch, metrics={**generated.metrics, **hooked})
        batch, found = await self._forward(generated)
        batch, hooked = await self._hooks(HookPoint.SCORE, batch, step)
        coefficient = self._kl.coefficient
        computed, statistics = await self._run(
            Phase.ADVANTAGES, self._advantage_role, step, ports.advantages.compute_advantages(batch, coefficient)
        )
        metrics = {
            **length_metrics(generated.rollout, self._settings.max_response_length),
            **staleness_metrics(step, generated.version, generated.rollout),
            **self._generation.metrics(),
            **generated.metrics,
            **found,
            **hooked,
            **statistics,
            "training/global_step": float(step),
            "training/epoch": float(generated.epoch),
        }
        if "actor/reward_kl_penalty" in statistics:
            metrics["actor/reward_kl_penalty_coeff"] = coefficient
            self._kl.update(statistics["actor/reward_kl_penalty"], len(batch))
        return Prepared(step, batch.union(computed), metrics)

    async def apply(self, prepared: Prepared[B], has_engine: Callable[[], Awaitable[bool]]) -> dict[str, float]:
        """Update the models, and send the weights if `has_engine` returns True. The critic's update may run on."""
        step, batch = prepared.step, prepared.batch
        self.queue.forget(step)
        if self._ports.critic is not None:
            work = self._run(Phase.UPDATE_CRITIC, "critic", step, self._ports.critic.update(batch))
            self._critic_update = asyncio.create_task(work)
            # Its request for the pool must be the first in the pool's queue.
            await asyncio.sleep(0)
            if not self._schedule.updates:
                await self._critic_update
        updated = await self._update_actor(prepared, has_engine)
        self._step_hooks = asyncio.create_task(self._after_step(prepared))
        if not self._schedule.next_generation:
            await self._hook_metrics()
        return {**updated, **self._weights.compared_metrics()}

    async def _update_actor(self, prepared: Prepared[B], has_engine: Callable[[], Awaitable[bool]]) -> Metrics:
        """Update the policy, unless the critic warms up, and send its weights if the next generations need them."""
        step, batch = prepared.step, prepared.batch
        is_trained = step > self._settings.critic_warmup_steps
        updated: Metrics = {}
        if is_trained:
            updated = await self._run(Phase.UPDATE_ACTOR, "actor", step, self._ports.actor.update(batch))
        if not self.queue.is_due(step):
            return updated
        if not self._schedule.in_flight:
            await self.queue.idle()
        if is_trained or self._weights.are_released:
            if not self._schedule.weight_sync:
                await self.critic_metrics()
            if await has_engine():
                updated = {**updated, **await self._weights.push(step, step)}
        # Also without an engine: nothing generates before the next attempt, which begins with a push.
        self.queue.pushed(step)
        return updated

    async def load_engines(self, step: int) -> None:
        """Send the weights after `step`, the last one, to engines that have older ones; for validation."""
        if self.queue.loaded != step:
            await self.queue.idle()
            await self._weights.push(step, step)
            self.queue.pushed(step, is_base=False)

    async def _load_again(self, step: int) -> None:
        await self._weights.push(step, self.queue.loaded)

    async def critic_metrics(self) -> Metrics:
        """Wait for the last step's critic update and return its metrics; none without a critic."""
        # The caller may be cancelled; the update continues.
        return {} if self._critic_update is None else await asyncio.shield(self._critic_update)

    async def late_metrics(self) -> dict[str, float]:
        """Wait for everything that `apply` left running; return its metrics."""
        return {**await self.critic_metrics(), **await self._hook_metrics()}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: of the KL controller, and of dynamic sampling."""
        sampling = {} if self._sampler is None else {"sampling": self._sampler.state_dict()}
        return {"kl": self._kl.state_dict(), **sampling}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore it. A checkpoint of a run without dynamic sampling has none of its state."""
        self._kl.load_state_dict(dict(state["kl"]))
        if self._sampler is not None and "sampling" in state:
            self._sampler.load_state_dict(state["sampling"])

    def close(self) -> None:
        """Cancel what still runs when the run ends by an error or a stop."""
        self.queue.drop()
        for streamed in self._streamed:
            streamed.cancel()
        for task in (self._critic_update, self._step_hooks):
            if task is not None:
                task.cancel()
                # Retrieve its exception, so that asyncio does not log it as never retrieved.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _hooks(self, point: HookPoint, batch: B, step: int) -> tuple[B, Metrics]:
        """Call the users' methods of a point one after the other; each sees the columns of the earlier ones."""
        metrics: dict[str, float] = {}
        for hook in self._ports.hooks:
            if hook.after is point:
                batch, found = await self._run(f"hook_{hook.worker}", hook.worker, step, hook.call(batch, step))
                metrics |= found
        return batch, metrics

    async def _generate_hooks(self, batch: B, step: int) -> tuple[B, Metrics]:
        # A user-defined worker gets the hook calls of all steps in order.
        await self._hook_metrics()
        return await self._hooks(HookPoint.GENERATE, batch, step)

    async def _after_step(self, prepared: Prepared[B]) -> Metrics:
        _, metrics = await self._hooks(HookPoint.STEP, prepared.batch, prepared.step)
        return metrics

    async def _hook_metrics(self) -> Metrics:
        return {} if self._step_hooks is None else await asyncio.shield(self._step_hooks)

    async def _forward(self, generated: Generated[B]) -> tuple[B, dict[str, float]]:
        """Compute scores, log-probs, reference and values; the result does not depend on which finishes first."""
        step, streamed = generated.step, generated.streamed
        done = SCORING if generated.is_scored else ()
        phases = {name: phase for name, phase in self._plan.phases(step).items() if name not in done}
        chains = self._plan.chains(phases)
        if streamed is None:
            streamed, others = StreamedPhases(phases, len(generated.batch)), list(chains.values())
            streamed.end()
        else:
            others = [names for chain, names in chains.items() if not self._plan.is_streamed(chain)]
        try:
            found = await streamed.found(others, generated.batch)
        finally:
            # A stop drops the step, and so the phases that have already started.
            streamed.cancel()
            self._streamed.discard(streamed)
        batch = generated.batch.union(*(found[name] for name in phases))
        metrics = {key: value for name in phases for key, value in phases[name].metrics(found[name]).items()}
        if generated.is_scored:
            return batch, metrics
        batch, total = await self._run(Phase.REWARD, "reward", step, self._ports.reward.total(batch))
        return batch, {**metrics, **total}

    async def _stream(self, prompts: Prompts[B], step: int) -> tuple[Rollout[B], StreamedPhases[B]]:
        """Generate the responses. Phases start on finished responses in pools where no engine generates any more."""
        phases, pool_of = self._plan.phases(step), self._settings.pool_of
        written = {pool_of[role]: asyncio.Event() for role in self._generation.roles}
        streamed = StreamedPhases(phases, len(prompts.batch))
        for chain, names in self._plan.chains(phases).items():
            if self._plan.is_streamed(chain):
                streamed.follow(names, after=written.get(chain))
        self._streamed.add(streamed)

        def take(rows: Sequence[int], responses: B) -> None:
            streamed.add(rows, prompts.batch.take(rows).union(responses))

        listener = Listener(take, streamed.drop, lambda role: written[pool_of[role]].set())
        try:
            rollout = await self._generation.write(prompts, step, listener)
        except BaseException:
            streamed.cancel()
            raise
        if self._schedule.max_staleness:
            # The responses are kept apart from the engines now, as the rows must be that wait until later steps.
            streamed.read_from(prompts.batch.union(rollout.batch))
        streamed.end()
        return rollout, streamed

    async def _run(self, phase: str, role: str, step: int, work: Coroutine[Any, Any, T]) -> T:
        return await self._phases.run_alone(phase, role, step, work)

    @property
    def _advantage_role(self) -> str:
        return "actor" if self._ports.critic is None else "critic"
