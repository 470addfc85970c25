"""How a step is computed: `spec.actor`, `critic`, `schedule`, `checkpoint` and `trainer`."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.engine import Engine, EngineClass
from ppojob_api.v1alpha1.quantities import Path
from ppojob_api.v1alpha1.spelling import spelled


class LossAggregation(StrEnum):
    """How the losses of tokens become one number; the denominator is that of the whole minibatch over all ranks."""

    TOKEN_MEAN = "TokenMean"
    SEQ_MEAN_TOKEN_SUM = "SeqMeanTokenSum"
    SEQ_MEAN_TOKEN_SUM_NORM = "SeqMeanTokenSumNorm"
    SEQ_MEAN_TOKEN_MEAN = "SeqMeanTokenMean"


class LearningRateSchedule(StrEnum):
    """Schedule of the learning rate after the warm-up."""

    CONSTANT = "Constant"
    COSINE = "Cosine"
    LINEAR = "Linear"


class Trained(ApiModel):
    """What actor and critic have in common."""

    engine: Engine = Engine.FSDP
    """Engine that computes and trains the model. The actor's engine also computes the reference. FSDP: PyTorch's FSDP2.
    Class: engineClass."""
    engine_class: EngineClass | None = None
    """The user's own training engine, with engine Class."""
    learning_rate_schedule: LearningRateSchedule = LearningRateSchedule.CONSTANT
    """Schedule of the learning rate after the warm-up."""
    learning_rate_warmup_steps: int = Field(default=0, ge=0, le=2**31 - 1)
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    """Weight decay of AdamW."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999]
    )
    """Decay rates of AdamW's first and second moments."""
    mini_batch_size: int = Field(default=256, ge=1, le=1_048_576)
    """Prompts per optimizer step; must divide data.trainBatchSize."""
    grad_clip: float = Field(default=1.0, ge=0, le=1_000_000)
    """Largest norm of the gradient; 0 disables clipping."""
    max_non_finite_steps: int = Field(default=3, ge=1, le=1_000_000)
    """Number of consecutive optimizer steps with a non-finite gradient after which the attempt fails with NonFinite.
    Each of these steps is skipped."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Tensor parallelism (Megatron): GPUs that each hold a part of every layer. Must divide the numbers of attention
    heads and key-value heads, and the intermediate size. Use it for models that do not fit otherwise. Experts stay
    whole: each GPU sends its part of the tokens to them."""
    sequence_parallel_size: int = Field(default=1, ge=1, le=64)
    """Sequence parallelism: GPUs that each compute a slice of every sequence. As many of them as possible divide the
    attention heads (Ulysses), and the remaining factor gathers keys and values (context parallelism), so the size may
    exceed the number of heads, and the GPUs of a node: heads are divided within a node. Use it for long sequences:
    together, the GPUs process sequenceParallelSize times maxTokensPerGPU tokens."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Pipeline parallelism (1F1B): number of stages, at most the model's layers. A stage is consecutive layers on an
    equal part of the pool's GPUs, which other fields divide further. It is idle for (stages - 1) of (micro-batches +
    stages - 1) passes: lower maxTokensPerGPU for more micro-batches. For pools of nodes with a slow network."""
    virtual_pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Virtual stages (interleaved 1F1B): with pipelineParallelSize above 1, number of stages on each part of the GPUs;
    times pipelineParallelSize at most the model's layers. With v of them, idle time is divided by about v, and messages
    between stages and their memory are multiplied by about v. For pipelines with few micro-batches and a fast
    network."""
    expert_parallel_size: int = Field(default=1, ge=1, le=64)
    """Expert parallelism, for mixtures of experts: GPUs that each own some experts of every layer, to which the tokens
    are sent. Must divide the number of experts and the GPUs of a copy, or of a pipeline stage of it (fsdpSize times
    tensorParallelSize). For mixtures whose layers are too large to gather."""
    fsdp_size: int | None = Field(default=None, ge=1, le=65_536)
    """Hybrid sharding (HSDP): GPUs over which FSDP shards one copy of the model, of its tensor-parallel part or of its
    pipeline stage. The other GPUs hold further copies, whose gradients are averaged. Absent: all GPUs hold one copy. A
    multiple of sequenceParallelSize. If the network between nodes is slow, set it to the GPUs of a node divided by
    tensorParallelSize: weights are then gathered within a node."""

    @property
    def num_peers(self) -> int:
        """GPUs that compute a layer of the same sequences together."""
        return self.tensor_parallel_size * self.sequence_parallel_size

    def gpus_of_a_copy(self, gpus: int) -> int:
        """Return over how many of the role's GPUs one copy of the model is divided."""
        if self.fsdp_size is None:
            return gpus
        return self.fsdp_size * self.tensor_parallel_size * self.pipeline_parallel_size


class ActorSpec(Trained):
    """Updating the policy."""

    learning_rate: float = Field(default=1.0e-6, ge=0, le=1)
    """Learning rate of AdamW."""
    max_tokens_per_gpu: int = Field(default=16_384, ge=1, le=16_777_216)
    """Tokens per forward and backward pass and GPU. Times sequenceParallelSize, at least data.maxPromptLength +
    data.maxResponseLength (engine FSDP)."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio is clipped to at least 1 - this value. 1: no lower bound."""
    clip_ratio_high: float = Field(default=0.2, ge=0, le=1000)
    """The probability ratio is clipped to at most 1 + this value. Above clipRatioLow: DAPO's clip-higher."""
    clip_ratio_dual: float = Field(default=3.0, gt=1, le=1000)
    """Dual clip: bound of the ratio if the advantage is negative (Ye et al. 2019). policyLoss GSPO and CISPO do not
    read it."""
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN
    """How token losses are aggregated. SeqMeanTokenSumNorm: the mean over responses of their sums, divided by
    data.maxResponseLength (Dr.GRPO)."""
    entropy_coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Coefficient of the entropy bonus."""
    router_aux_loss_coefficient: float = Field(default=0.0, ge=0, le=1000)
    """For mixtures of experts: coefficient of the load-balancing loss (Fedus et al. 2021), which penalises unequal use
    of the experts. Its fractions are those of a micro-batch (maxTokensPerGPU). 0: none. Refused with
    model.actor.compile."""


class CriticSpec(Trained):
    """Updating the value model."""

    learning_rate: float = Field(default=1.0e-5, ge=0, le=1)
    """Learning rate of AdamW."""
    max_tokens_per_gpu: int = Field(default=32_768, ge=1, le=16_777_216)
    """Tokens per forward and backward pass and GPU. Times sequenceParallelSize, at least data.maxPromptLength +
    data.maxResponseLength (engine FSDP)."""
    clip_range_value: float = Field(default=0.5, gt=0, le=1_000_000)
    """Values are clipped to the old values plus or minus this value."""
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN
    """How token losses are aggregated."""
    warmup_steps: int = Field(default=0, ge=0, le=2**31 - 1)
    """Number of steps at the start of the run that update only the critic."""


class ScheduleMode(StrEnum):
    """How much of a step runs at the same time."""

    AUTO = "Auto"
    SERIAL = "Serial"
    PARALLEL_UPDATE = "ParallelUpdate"
    OVERLAPPED = "Overlapped"
    ONE_STEP_OFF = "OneStepOff"


class Overlap(StrEnum):
    """What mode Overlapped does at the same time, or saves."""

    VALUES = "Values"
    REFERENCE = "Reference"
    WEIGHT_SYNC = "WeightSync"
    NEXT_GENERATION = "NextGeneration"
    STREAMING = "Streaming"
    OLD_LOG_PROB = "OldLogProb"


class WeightUpdates(StrEnum):
    """When mode OneStepOff gives the engines new weights."""

    BETWEEN_GENERATIONS = "BetweenGenerations"
    IN_FLIGHT = "InFlight"


DEFAULT_STALENESS = 1


class ScheduleSpec(ApiModel):
    """Which phases of a step run at the same time. All modes but OneStepOff are on-policy and give the same numbers for
    the same seed."""

    mode: ScheduleMode = ScheduleMode.AUTO
    """Serial: one phase after the other. ParallelUpdate: actor and critic, in different pools, update at the same time.
    Overlapped: each phase starts when its inputs are ready and its pool is free, with or without a critic. Auto:
    Overlapped; if all roles compute in one pool, without NextGeneration and Streaming, because that pool computes one
    phase at a time (with algorithm.dynamicSampling, Streaming stays). There, a reward function that takes longer than
    the log-probs is a reason for Overlapped, which scores responses while others are generated.
    OneStepOff: the rollout, in its own pool, generates the next step's responses with older weights while a step is
    trained. OneStepOff is not on-policy: it needs algorithm.rolloutCorrection. Fixed once the job is accepted, if
    either the old or the new mode is OneStepOff."""
    max_staleness: int | None = Field(default=None, ge=1, le=4)
    """With mode OneStepOff: maximum age of the weights that generate a response when the response is trained, in steps.
    With weightUpdates InFlight: of the weights with which the response begins. Absent: 1. Fixed once the job is
    accepted."""
    weight_updates: WeightUpdates | None = None
    """With mode OneStepOff: when the engines get new weights. BetweenGenerations: every maxStaleness steps, when no
    response is being generated; the same seed gives the same results. InFlight: after each step, while they generate.
    Unfinished responses continue with the new weights and keep their cache; results depend on measured times. Absent:
    BetweenGenerations. Fixed once the job is accepted."""
    disabled_overlaps: Annotated[list[Overlap], Field(max_length=8)] = Field(default_factory=list)
    """Overlaps that mode Overlapped leaves out, to measure the effect of each. Values: compute values and reward at the
    same time as the actor's log-probs. Reference: compute the reference's log-probs at the same time as the actor's.
    WeightSync: send weights before the critic finishes. NextGeneration: start generating before the critic finishes.
    Streaming: compute values, reference and reward of finished responses while others are generated, and the actor's
    log-probs if its GPUs do not generate; with algorithm.dynamicSampling, compute their reward and request further
    prompts. OldLogProb: skip the actor's log-probs before the update if the update
    computes the same (one minibatch, one epoch, no KL in the reward)."""

    @property
    def updates_in_flight(self) -> bool:
        """Whether the engines get new weights while they generate."""
        return self.weight_updates is WeightUpdates.IN_FLIGHT


class ExportPolicy(StrEnum):
    """When the policy is exported as a HuggingFace folder."""

    FINAL = "Final"
    EACH = "Each"
    NEVER = "Never"


class ResumePolicy(StrEnum):
    """Whether a run shares the folder of its name with earlier objects of that name."""

    AUTO = "Auto"
    NEVER = "Never"


_SEGMENT = r"/[A-Za-z0-9_][-A-Za-z0-9._=]*"
BucketAddress = Annotated[
    str,
    spelled(
        rf"^(s3|gs)://[a-z0-9][-._a-z0-9]+[a-z0-9]({_SEGMENT})*$",
        "must be the address of a bucket, such as s3://bucket/prefix or gs://bucket/prefix, without '/' at the end",
        max_length=512,
    ),
]
"""A bucket of an object store, with or without a prefix: no slash at the end, no empty segment, none of dots alone."""


_HUB_NAME = r"[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?"
ExportAddress = Annotated[
    str,
    spelled(
        rf"^((s3|gs)://[a-z0-9][-._a-z0-9]+[a-z0-9]({_SEGMENT})*|hf://{_HUB_NAME}/{_HUB_NAME})$",
        "must be the address of a bucket, such as s3://bucket/prefix, or of a repository, hf://organisation/name, "
        "without '/' at the end",
        max_length=512,
    ),
]
"""A bucket as `BucketAddress` has it, or a repository of the HuggingFace hub."""


class CheckpointSpec(ApiModel):
    """Checkpoints in the job's storage or in a bucket, and the export of the policy."""

    path: BucketAddress | None = None
    """Bucket for checkpoints: `s3://bucket/prefix` or `gs://bucket/prefix`, for this job only, without a slash at the
    end. Credentials come from env, envFrom or the ServiceAccount. Everything else is in the storage. Absent:
    checkpoints are in the storage too."""
    every_steps: int = Field(default=50, ge=0, le=2**31 - 1)
    """Steps between checkpoints; 0: only the last one."""
    keep: int = Field(default=2, ge=1, le=1000)
    """How many checkpoints are kept."""
    asynchronous: bool = Field(default=True, alias="async")
    """Continue training while a checkpoint is written. Tensors on GPUs are copied to host memory meanwhile. The next
    update waits for these copies before its first step, and with offloaded tensors it waits at its end for the
    checkpoint. At most one checkpoint is written at a time. At its end, the run waits for it. If it cannot be written,
    the attempt fails. If host memory is too small, training waits for each checkpoint, and the log says so."""
    resume: ResumePolicy = ResumePolicy.AUTO
    """Where the run is written. Auto: in the folder of its name; the job fails if another object of that name left
    checkpoints there. Never: in its own folder below it, `runs/UID`. In both cases, an attempt resumes from the last
    checkpoint of the same object."""
    resume_from: Path | None = None
    """Folder, or address in a bucket, of another run's checkpoint to start from. With resume Auto, it may be a
    checkpoint of an earlier object of the same name: the folder then belongs to this run."""
    export: ExportPolicy = ExportPolicy.FINAL
    """When the policy is exported as a HuggingFace folder. Final: after the last step, to `model/` in the run's folder.
    Each: with every checkpoint, to `models/step-N`; the newest `keep` of them are kept. Never: not at all."""
    export_to: ExportAddress | None = None
    """Address to which each export is also uploaded: `s3://bucket/prefix`, `gs://bucket/prefix`, or a model repository
    of the HuggingFace hub, `hf://organisation/name`, which is created as a private one if it does not exist. With
    export Each: `prefix/step-N`, or tag `step-N` of the repository. Credentials come from env, envFrom or the
    ServiceAccount. Absent: exports are in the storage only."""


DEFAULT_STEPS = 100


class TrainerSpec(ApiModel):
    """The run as a whole."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="!has(self.totalSteps) || !has(self.totalEpochs)",
                message="set totalSteps or totalEpochs, not both",
                field_path=".totalEpochs",
            )
        )
    )

    total_steps: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Steps of the run. Absent: 100, or the steps of totalEpochs."""
    total_epochs: int | None = Field(default=None, ge=1, le=1_000_000)
    """Passes over the training prompts, instead of totalSteps. A pass has as many steps as the prompts, after
    overlongPrompts, fill batches of data.trainBatchSize; of a mixture, the prompts of all sources together. The trainer
    counts them when it starts."""
    validate_every_steps: int = Field(default=10, ge=0, le=2**31 - 1)
    """Steps between validations; 0: no validation."""
    validate_before_training: bool = True
    """Validate once before the first step (with validateEverySteps above 0)."""
    seed: int = Field(default=1, ge=0, le=2**31 - 1)
    """Seed of the order of the data, of samples, and of a new value head."""
    data_workers: int = Field(default=4, ge=1, le=256)
    """Processes that tokenize the prompts before the first step, on the node of the first actor rank. They do not
    change results. Fewer than 50,000 prompts are tokenized without them."""
    phase_timeout_seconds: int = Field(default=1800, ge=1, le=31_536_000)
    """Longest time for one phase of a step, in seconds. A longer phase fails the attempt with PhaseTimeout."""

    def with_length(self) -> "TrainerSpec":
        """Return it with the default of totalSteps, if it has neither totalSteps nor totalEpochs."""
        is_given = self.total_steps is not None or self.total_epochs is not None
        return self if is_given else self.model_copy(update={"total_steps": DEFAULT_STEPS})
