"""Rules of `spec.data` that span fields: the kind of each source, and the sources of a mixture.

`rules.py` puts them beside the others. The CEL of the kinds is beside the fields, in `data.py`; the API server itself
compares the names of a mixture, which are the keys of its list.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.data import DataSource, exactly_one_of
from ppojob_api.v1alpha1.spec import PPOJobSpec

_MAX_FILES = 256

MIXTURE = "(has(self.data.train.mixture) ? self.data.train.mixture : [])"
"""The sources of a mixture in CEL; none without one."""
TOO_MANY_FILES = f"{MIXTURE}.map(s, has(s.files) ? size(s.files.paths) : 0).sum() > {_MAX_FILES}"
"""In CEL. The rules on the paths of a mixture do not look at more: the API server limits their cost."""
_FILES_REMEDY = (
    f"all sources of a mixture together may name at most {_MAX_FILES} files: join files, or name the folder of a data "
    "set in huggingFace.path"
)

DATA_RULES = [
    Rule(
        rule=f"!({TOO_MANY_FILES})",
        message=_FILES_REMEDY,
        field_path=".data.train.mixture",
        value=f"{MIXTURE}.map(s, has(s.files) ? size(s.files.paths) : 0).sum()",
    )
]


def _sources_are_of_one_kind(spec: PPOJobSpec) -> Iterator[Problem]:
    # `sources` has the sources of a mixture in place of `train`.
    blocks: dict[str, DataSource] = {"data.train": spec.data.train, **dict(spec.data.sources())}
    for field, source in blocks.items():
        if len(source.given) != 1:
            yield field, source.given or None, exactly_one_of(source.KINDS)


def _a_mixture_has_no_system_prompt(spec: PPOJobSpec) -> Iterator[Problem]:
    train = spec.data.train
    if train.mixture is not None and train.system_prompt:
        remedy = "each source of a mixture has its own systemPrompt: move it there"
        yield "data.train.systemPrompt", train.system_prompt, remedy


def _names_of_a_mixture_are_unique(spec: PPOJobSpec) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, source in enumerate(spec.data.train.mixture or ()):
        if source.name in seen:
            remedy = "another source has this name: give each source a different name"
            yield f"data.train.mixture[{index}].name", source.name, remedy
        seen.add(source.name)


def _a_mixture_names_few_files(spec: PPOJobSpec) -> Iterator[Problem]:
    count = sum(len(source.files.paths) for source in spec.data.train.mixture or () if source.files)
    if count > _MAX_FILES:
        yield "data.train.mixture", count, _FILES_REMEDY


DATA_CHECKS = (
    _sources_are_of_one_kind,
    _a_mixture_has_no_system_prompt,
    _names_of_a_mixture_are_unique,
    _a_mixture_names_few_files,
)
