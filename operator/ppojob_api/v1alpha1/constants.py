"""Names that users, the operator and the trainer meet: API group, labels, conditions, reasons, paths, metrics.

A condition's type or reason is part of the API: scripts wait for it, so it is written here and nowhere else.
"""

import re

GROUP = "ppojob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PPOJob"
PLURAL = "ppojobs"
SHORT_NAMES = ["ppo"]
CATEGORIES = ["all", "ai"]

NAME_MAX_LENGTH = 40
NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
NAME_REMEDY = "use at most 40 lower-case letters, digits and '-', beginning with a letter and not ending with '-'"

FIELD_MANAGER_OPERATOR = "ppojob-operator"
FIELD_MANAGER_PROGRESS = "ppojob-progress"

LABEL_JOB = f"{GROUP}/job"
LABEL_POOL = f"{GROUP}/pool"
LABEL_TASK = f"{GROUP}/task"
"""On pods outside the RayCluster: what they do."""
TASK_FETCH = "fetch"
"""The pods that fetch models and data."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_RAY_CLUSTER = "ray.io/cluster"
"""KubeRay's own: the RayCluster of a pod."""

LABEL_REQUIRE_TEMPLATE = f"{GROUP}/require-template"
"""On a namespace: its jobs must name a template; one of kind ClusterPPOJobTemplate, if that is the value."""

ANNOTATION_MADE_OF = f"{GROUP}/made-of"
"""On a RayCluster with a queue, and on the Job that fetches: digest of the spec that it was created from."""
ANNOTATION_CHECKPOINT = f"{GROUP}/checkpoint-request"
"""Asks a running job for a checkpoint. Each new value is a new request, which is answered once."""
ANNOTATION_RETRY = f"{GROUP}/retry-request"
"""Asks for another run of a job that has ended. Each new value is a new request, which is answered once."""
ANNOTATION_ADOPT = f"{GROUP}/adopt-checkpoints"
"""UID of the PPOJob whose run wrote to the folder or address, or "unknown": the job resumes from its checkpoints."""
MAX_REQUEST_LENGTH = 64
"""Characters of the value of a request that count."""

ANNOTATION_OPERATOR = f"{GROUP}/operator"
"""Names the operator that is to run a job: its namespace, or namespace/Lease where several have the namespace."""

POOL_RESOURCE_PREFIX = "pool_"
"""Ray resource of a pool: one unit for each GPU, so that a placement group lands in its pool."""


RAY_HEAD_PORTS = {"gcs-server": 6379, "client": 10001, "dashboard": 8265, "metrics": 8080, "serve": 8000}
"""Ports of Ray's head, under KubeRay's names for them; `metrics` are those of Ray itself."""

KUEUE_VERSIONS = ("v1beta1", "v1beta2")
"""Versions of Kueue's API that have what is read here: 0.15 stores the first, 0.20 serves the second only."""

LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
LABEL_QUEUED_UID = "kueue.x-k8s.io/job-uid"
"""Kueue's labels: by the first two it takes a RayCluster into a queue, the third is its Workload's."""

ANNOTATION_REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
ANNOTATION_PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
"""Kueue's annotations of a pod template: the label whose value all nodes of the pods share."""

METRICS_PORT_NAME = "ppojob-metrics"
"""Name of the head's port where the trainer serves `/metrics`."""


class Condition:
    """Types of `status.conditions`."""

    TEMPLATE_RESOLVED = "TemplateResolved"
    ACCEPTED = "Accepted"
    SOURCES_FETCHED = "SourcesFetched"
    ADMITTED = "Admitted"
    POOLS_READY = "PoolsReady"
    SUBMITTED = "Submitted"
    PROGRESSING = "Progressing"
    STALLED = "Stalled"
    LAYOUT_APPLIED = "LayoutApplied"
    MODEL_UPLOADED = "ModelUploaded"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason:
    """Reasons of conditions, Events and `status.lastFailure`."""

    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    TEMPLATE_RESOLVED = "TemplateResolved"
    TEMPLATE_MISSING = "TemplateMissing"
    KUBERAY_MISSING = "KubeRayMissing"
    STORAGE_MISSING = "StorageMissing"
    STORAGE_UNFIT = "StorageUnfit"
    KUEUE_MISSING = "KueueMissing"
    FETCHING = "Fetching"
    FETCHED = "Fetched"
    FETCH_FAILED = "FetchFailed"
    QUEUED = "Queued"
    ADMITTED = "Admitted"
    NOT_QUEUED = "NotQueued"
    PREEMPTED = "Preempted"
    WAITING_FOR_PODS = "WaitingForPods"
    PODS_READY = "PodsReady"
    INSUFFICIENT_GPUS = "InsufficientGPUs"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    POD_FAILED = "PodFailed"
    PODS_REFUSED = "PodsRefused"
    CLUSTER_REFUSED = "ClusterRefused"
    CLUSTER_RESTORED = "ClusterRestored"
    CLUSTER_DELETED = "ClusterDeleted"
    CLUSTER_SUSPENDED = "ClusterSuspended"
    DASHBOARD_UNREACHABLE = "DashboardUnreachable"
    HEAD_LOST = "HeadLost"
    POD_LOST = "PodLost"
    NODE_LOST = "NodeLost"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    STARTUP_DELAYED = "StartupDelayed"
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    TRAINER_SUBMITTED = "TrainerSubmitted"
    NOT_SUBMITTED = "NotSubmitted"
    STARTING = "Starting"
    TRAINING = "Training"
    NO_PROGRESS = "NoProgress"
    REPORTS_MISSING = "ReportsMissing"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    REALLOCATING = "Reallocating"
    REBALANCED = "Rebalanced"
    POOL_RESIZED = "PoolResized"
    OPERATOR_TOO_OLD = "OperatorTooOld"
    OTHER_OPERATOR = "OtherOperator"
    NAMESPACE_NOT_SERVED = "NamespaceNotServed"
    OPERATOR_FAULT = "OperatorFault"
    PODS_RELEASED = "PodsReleased"
    API_REQUEST_FAILED = "ApiRequestFailed"
    TAKEN_OVER = "TakenOver"
    INVALID_ANNOTATION = "InvalidAnnotation"
    LAYOUT_APPLIED = "LayoutApplied"
    TRAINER_STOPPED = "TrainerStopped"
    GRACE_PERIOD_EXCEEDED = "GracePeriodExceeded"
    TRAINER_SUCCEEDED = "TrainerSucceeded"
    NOT_UPLOADED = "NotUploaded"
    UPLOADED = "Uploaded"
    RETRIED = "Retried"
    RETRY_REFUSED = "RetryRefused"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    FAILURE_POLICY = "FailurePolicy"
    RELEASED = "ClusterReleased"
    # Named failures of the trainer.
    TRAINER_FAILED = "TrainerFailed"
    TRAINER_TOO_OLD = "TrainerTooOld"
    JOB_FILE_MISSING = "JobFileMissing"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_MISMATCH = "ModelMismatch"
    DATA_UNREADABLE = "DataUnreadable"
    REWARD_IMPORT_FAILED = "RewardImportFailed"
    REWARD_FAILED = "RewardFailed"
    ALGORITHM_FUNCTION_FAILED = "AlgorithmFunctionFailed"
    BATCH_NOT_FILLED = "BatchNotFilled"
    WORKER_IMPORT_FAILED = "WorkerImportFailed"
    HOOK_FAILED = "HookFailed"
    POOL_NOT_PLACED = "PoolNotPlaced"
    PHASE_TIMEOUT = "PhaseTimeout"
    WORKER_LOST = "WorkerLost"
    COMMUNICATION_FAILED = "CommunicationFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    GPU_FAULT = "GPUFault"
    NON_FINITE = "NonFinite"
    CHECKPOINT_UNREADABLE = "CheckpointUnreadable"
    CHECKPOINT_UNWRITABLE = "CheckpointUnwritable"
    BUCKET_REFUSED = "BucketRefused"
    BUCKET_UNREACHABLE = "BucketUnreachable"
    FENCED_OUT = "FencedOut"
    UPLOAD_REFUSED = "UploadRefused"
    UPLOAD_FAILED = "UploadFailed"
    INTERRUPTED = "Interrupted"


class Phase:
    """Values of `status.phase`, derived from the conditions for the column only."""

    PENDING = "Pending"
    FETCHING = "Fetching"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EnvName:
    """Environment variables of the trainer."""

    ATTEMPT = "PPOJOB_ATTEMPT"
    RAY_CLUSTER = "RAY_CLUSTER_NAME"
    """Set by KubeRay in all containers of Ray."""


CONFIG_MOUNT_PATH = "/etc/ppojob"
JOB_FILE = "job.json"
CA_FILE = "ca.crt"
TOKEN_MOUNT_PATH = "/var/run/secrets/ppojob.dev"
TOKEN_FILE = "token"
TOKEN_EXPIRATION_SECONDS = 3600

JOBS_FOLDER = "ppojob"
"""Folder below the mount path: `<mountPath>/ppojob/<namespace>/<name>` is a job's own."""

CACHE_FOLDER = ".ppojob-cache"
"""Folder below the mount path: what can be computed again, for later attempts and other jobs."""

MAX_LOG_LINES = 100
MAX_LOG_LINE_LENGTH = 1000
MAX_METRICS = 64
MAX_AVOIDED_NODES = 16
"""Nodes that a RayCluster avoids; the oldest is forgotten first."""
MAX_SOURCES = 32
"""Fetched addresses that the status lists: a job may have hundreds of data files."""

STATUS_METRICS = (
    "critic/score/mean", "critic/score/max", "critic/score/min", "critic/rewards/mean",
    "critic/advantages/mean", "critic/returns/mean", "critic/values/mean",
    "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr",
    "critic/vf_explained_var", "critic/non_finite_steps",
    "actor/pg_loss", "actor/entropy", "actor/kl_loss", "actor/kl_coef", "actor/pg_clipfrac", "actor/pg_clipfrac_lower",
    "actor/ppo_kl", "actor/grad_norm", "actor/lr", "actor/reward_kl_penalty", "actor/non_finite_steps",
    "response_length/mean", "response_length/max", "response_length/clip_ratio", "prompt_length/mean",
    "timing_s/step", "timing_s/gen", "timing_s/reward", "timing_s/old_log_prob", "timing_s/ref", "timing_s/values",
    "timing_s/adv", "timing_s/update_actor", "timing_s/update_critic", "timing_s/update_weights",
    "timing_s/save_checkpoint", "timing_s/testing", "overlap/saved_s", "overlap/idle_fraction",
    "perf/total_num_tokens", "perf/throughput", "perf/time_per_step", "perf/mfu/actor", "perf/mfu/critic",
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", "training/global_step", "training/epoch",
    "rollout/lost_engines", "rollout/elastic_losses", "rollout/lost_s", "rollout/repeated_tokens",
    "rollout/accepted_tokens_per_draft",
    "staleness/max", "staleness/oldest_version", "rollout_corr/kl", "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_ratio_fraction_high",
    "val-core/score/mean",
)  # fmt: skip
"""The metrics that `status.metrics` shows; all of them are in the job's storage."""
