"""PPOJobTemplate and ClusterPPOJobTemplate: what a platform team writes once for many jobs.

    spec.poolDefaults --merge--> pool of spec.template --merge--> pool of the job      of each pool
    spec.template ---------------------------------- --merge--> spec of the job        of the rest

The operator, its webhook and `ppojob` complete a job's spec with `completed`, and check it then. A template says where
and how a job runs: `TEMPLATED` lists its fields. It never says what the job learns, so the job's own file does.

The models of templates are those of the spec with every field optional and without defaults: what a template does not
name must not take precedence over anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import Field, ValidationError, create_model

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.constants import API_VERSION
from ppojob_api.v1alpha1.merging import merged
from ppojob_api.v1alpha1.pools import Pool, Topology
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.template_reference import PinnedTemplate, TemplateRef
from ppojob_api.v1alpha1.validation import (
    MISSING_FIELD,
    UNKNOWN_FIELD,
    FieldError,
    SpecError,
    explained,
    parse_spec,
)

TEMPLATED = (
    "image", "imagePullSecrets", "env", "envFrom", "serviceAccountName", "pools", "head", "storage", "telemetry",
    "runPolicy",
)  # fmt: skip
"""Fields of a job's spec that a template may set: where and how a job runs."""

OF_THE_JOB_ONLY = ("runPolicy.suspend",)
"""Fields below these that only a job may set: what is asked of one job."""

_REPLACED = (Topology,)
"""Sections that `merging` replaces whole, so that they must be complete."""


def _optional(annotation: Any, path: str) -> Any:
    """Return the type of a field of a template: sections with optional fields, and lists of pools."""
    if annotation == list[Pool]:
        return list[partial_model(Pool, "Templated", path, required=("name",))]  # type: ignore[misc]
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    [section, *_] = [choice for choice in choices if choice is not NoneType]
    is_section = isinstance(section, type) and get_origin(section) is None and issubclass(section, ApiModel)
    if is_section and section not in _REPLACED:
        return partial_model(section, "Templated", path)
    return annotation


def partial_model(
    model: type[ApiModel], prefix: str, path: str = "", *, only: Sequence[str] = (), required: Sequence[str] = ()
) -> type[ApiModel]:
    """Return a model with the fields of another one, each optional and without a default.

    Args:
        model: the other one.
        prefix: of the new model's name.
        path: of the section in the spec, for `OF_THE_JOB_ONLY`.
        only: names of the fields on the wire. Empty: all.
        required: names of the fields that are required nevertheless.
    """
    fields: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        wire = info.alias or name
        here = f"{path}.{wire}" if path else wire
        if here in OF_THE_JOB_ONLY or (only and wire not in only):
            continue
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else None
        kind = _optional(info.annotation, here)
        kind = Annotated[(kind, *info.metadata)] if info.metadata else kind
        words: dict[str, Any] = {"alias": wire, "description": info.description, "json_schema_extra": extra}
        fields[name] = (kind, Field(**words)) if wire in required else (kind | None, Field(default=None, **words))
    return create_model(f"{prefix}{model.__name__}", __base__=ApiModel, __doc__=model.__doc__, **fields)


class TemplateLimits(ApiModel):
    """What a job with the template may ask for at most, whatever its own spec says."""

    max_gpus: int | None = Field(default=None, ge=1, le=2**20, alias="maxGPUs")
    """GPUs of all pools, at their maxNodes. Absent: any number."""
    max_active_deadline_seconds: int | None = Field(default=None, ge=1, le=315_360_000)
    """Largest runPolicy.activeDeadlineSeconds. It is also the deadline of a job without one. Absent: none."""


_POOL_FIELDS = tuple(field.alias or "" for name, field in Pool.model_fields.items() if name != "name")
_TemplatedSpec: Any = partial_model(PPOJobSpec, "Templated", only=TEMPLATED)
_DefaultPool: Any = partial_model(Pool, "Default", "pools", only=_POOL_FIELDS)


class PPOJobTemplateSpec(ApiModel):
    """Defaults and limits of the jobs that name the template."""

    template: _TemplatedSpec | None = None
    """Fields of the spec of a PPOJob: where and how it runs. The job's own values take precedence. A job that names
    pools gets those only, each completed by the pool of this name; a job without pools gets all of them."""
    pool_defaults: _DefaultPool | None = None
    """Fields of every pool of a job. The pool of the template, and that of the job, take precedence."""
    limits: TemplateLimits = TemplateLimits()
    """Upper limits for a job."""


def pinned(ref: TemplateRef, raw: Mapping[str, Any]) -> PinnedTemplate:
    """Return a template of the API server, or of a file, as the status keeps it."""
    metadata = raw.get("metadata") or {}
    uid, generation = metadata.get("uid", ""), metadata.get("generation", 0)
    return PinnedTemplate(kind=ref.kind, name=ref.name, uid=uid, generation=generation, spec=raw.get("spec") or {})


def template_problems(raw: Mapping[str, Any]) -> list[FieldError]:
    """Return what is wrong with the spec of a template, whatever a job adds to it."""
    try:
        PPOJobTemplateSpec.model_validate(raw, by_alias=True, by_name=False)
    except ValidationError as error:
        return explained(error)
    return []


def reference(raw: Mapping[str, Any]) -> TemplateRef | None:
    """Return the template that a spec names, as it is on the wire. None: it names none, or not in a valid way."""
    try:
        return TemplateRef.model_validate(raw["templateRef"])
    except (KeyError, TypeError, ValidationError):
        # `parse_spec` says what is wrong with it.
        return None


def parse_among(raw: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> PPOJobSpec:
    """Return the checked spec of a job, completed with its template among these documents.

    Raises:
        SpecError: with every problem, or because the template is not among them.
    """
    ref = reference(raw)
    if ref is None:
        return parse_spec(raw)
    found = [each for each in documents if is_named(each, ref)]
    if len(found) != 1:
        what = "several templates have this kind and name" if found else f"there is no {ref.kind.value} of this name"
        remedy = f"{what} in the files: put exactly one into the job's file, or name its file with --template"
        raise SpecError([FieldError("spec.templateRef.name", ref.name, remedy)])
    _, spec = parse_with(raw, pinned(ref, found[0]))
    if isinstance(spec, SpecError):
        raise spec
    return spec


def is_named(document: Mapping[str, Any], ref: TemplateRef) -> bool:
    """Return whether a document is the template that a reference names."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return (document.get("kind"), name) == (ref.kind.value, ref.name)


def completed_spec(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the spec of a PPOJob in the API server, completed with the template in its status."""
    spec: Mapping[str, Any] = job.get("spec", {})
    template = job.get("status", {}).get("template")
    return completed(spec, template["spec"]) if template else spec


def document_problems(raw: Mapping[str, Any]) -> list[FieldError]:
    """Return what is wrong with a template as a user writes it in a file."""
    known = ("apiVersion", "kind", "metadata", "spec")
    errors = [FieldError(str(name), None, UNKNOWN_FIELD) for name in raw if name not in known]
    if raw.get("apiVersion") != API_VERSION:
        errors.append(FieldError("apiVersion", raw.get("apiVersion"), f"must be {API_VERSION}"))
    metadata, spec = raw.get("metadata"), raw.get("spec")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        errors.append(FieldError("metadata.name", None, MISSING_FIELD))
    if not isinstance(spec, Mapping):
        return [*errors, FieldError("spec", spec, MISSING_FIELD)]
    return errors + template_problems(spec)


def parse_with(
    raw: Mapping[str, Any], template: PinnedTemplate, *, is_accepted: bool = False
) -> tuple[Mapping[str, Any], PPOJobSpec | SpecError]:
    """Return the completed spec of a job as it is on the wire, and the checked one or every problem (`rules.check`).

    A problem of a value from the template names the template.
    """
    if found := template_problems(template.spec):
        name = template.ref.shown
        return raw, SpecError([FieldError(each.path, each.value, f"{each.message} (in {name})") for each in found])
    wire = completed(raw, template.spec)
    try:
        spec = parse_spec(wire, is_accepted=is_accepted)
    except SpecError as error:
        return wire, SpecError([_with_origin(each, raw, wire, template) for each in error.errors])
    above = list(_above_the_limits(spec, template))
    return wire, SpecError(above) if above else spec


def completed(raw: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's spec, as it is on the wire, with what the spec of a template adds to it."""
    base = {name: value for name, value in template.get("template", {}).items() if name != "pools"}
    wire = merged(base, {name: value for name, value in raw.items() if name != "pools"})
    pools = _completed_pools(raw.get("pools"), template)
    limit = template.get("limits", {}).get("maxActiveDeadlineSeconds")
    policy = wire.get("runPolicy", {})
    if limit is not None and isinstance(policy, Mapping):
        wire["runPolicy"] = {"activeDeadlineSeconds": limit, **policy}
    return wire if pools is None else {**wire, "pools": pools}


def capped(wire: Mapping[str, Any], template: PinnedTemplate) -> dict[str, Any]:
    """Return a completed spec whose deadline is not above the template's limit.

    An edit of an accepted job that asks for more is refused, and the job runs with the limit.
    """
    limit, policy = template.spec.get("limits", {}).get("maxActiveDeadlineSeconds"), wire.get("runPolicy")
    given = policy.get("activeDeadlineSeconds") if isinstance(policy, Mapping) else None
    if limit is None or not isinstance(given, int) or given <= limit:
        return dict(wire)
    return {**wire, "runPolicy": {**(policy or {}), "activeDeadlineSeconds": limit}}


def _completed_pools(given: Any, template: Mapping[str, Any]) -> Any:
    """Return the pools of a job, each completed; None: neither has pools."""
    known = {pool["name"]: pool for pool in template.get("template", {}).get("pools", [])}
    if given is None:
        given = [{"name": name} for name in known] or None
    if not isinstance(given, list) or not all(isinstance(pool, Mapping) for pool in given):
        return given
    defaults = template.get("poolDefaults", {})
    return [merged(merged(defaults, known.get(pool.get("name"), {})), pool) for pool in given]


def _with_origin(
    error: FieldError, raw: Mapping[str, Any], wire: Mapping[str, Any], template: PinnedTemplate
) -> FieldError:
    """Return an error that says whether the value comes from the template."""
    steps = _steps(error.path)
    if _at(wire, wire, steps) is None or _at(raw, wire, steps) is not None:
        return error
    message = f"{error.message} (the value is from {template.ref.shown})"
    return FieldError(error.path, error.value, message)


def _steps(path: str) -> list[str | int]:
    """Return the names and indexes of a path such as `spec.pools[0].nodes`, without `spec`."""
    parts = path.replace("[", ".[").split(".")[1:]
    return [int(part[1:-1]) if part.startswith("[") and part[1:-1].isdigit() else part for part in parts]


def _at(raw: Any, wire: Any, steps: Sequence[str | int]) -> Any:
    """Return the value of `raw` at a path of `wire`; items of lists are found by their names. None: there is none."""
    for step in steps:
        if isinstance(step, int):
            item = wire[step] if isinstance(wire, list) and step < len(wire) else None
            items = raw if isinstance(raw, list) else []
            raw, wire = next((each for each in items if _is_same(each, item)), None), item
        else:
            raw = raw.get(step) if isinstance(raw, Mapping) else None
            wire = wire.get(step) if isinstance(wire, Mapping) else None
    return raw


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping) and "name" in other:
        return bool(one.get("name") == other["name"])
    return bool(one == other)


def _above_the_limits(spec: PPOJobSpec, template: PinnedTemplate) -> Iterator[FieldError]:
    limits = TemplateLimits.model_validate(template.spec.get("limits", {}))
    gpus = sum(max(pool.nodes, pool.max_nodes or 0) * pool.gpus_per_node for pool in spec.pools)
    whose = template.ref.shown
    if limits.max_gpus is not None and gpus > limits.max_gpus:
        remedy = f"{whose} allows {limits.max_gpus} GPUs of all pools at their maxNodes: use fewer or smaller pools"
        yield FieldError("spec.pools", gpus, remedy)
    limit, given = limits.max_active_deadline_seconds, spec.run_policy.active_deadline_seconds
    if limit is not None and given is not None and given > limit:
        remedy = f"{whose} allows {limit} s: lower it, or remove the field"
        yield FieldError("spec.runPolicy.activeDeadlineSeconds", given, remedy)
