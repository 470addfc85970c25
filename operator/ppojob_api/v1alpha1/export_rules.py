"""Rules of `spec.checkpoint.exportTo`: there is something to upload, and it does not lie among the checkpoints.

`rules.py` puts them beside the others, each in CEL and in Python.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ExportPolicy

EXPORT_RULES = [
    Rule(
        rule="!has(self.exportTo) || self.export != 'Never'",
        message="with export Never there is nothing to upload: set export to Final or Each, or remove exportTo",
        field_path=".exportTo",
    ),
    Rule(
        rule=(
            "!has(self.exportTo) || !has(self.path) || "
            "!(self.exportTo == self.path || self.exportTo.startsWith(self.path + '/'))"
        ),
        message="exportTo is in checkpoint.path, which is only for checkpoints: use another prefix",
        field_path=".exportTo",
    ),
]


def _there_is_something_to_upload(spec: PPOJobSpec) -> Iterator[Problem]:
    checkpoint = spec.checkpoint
    if checkpoint.export_to is not None and checkpoint.export is ExportPolicy.NEVER:
        remedy = (
            "with export Never there is nothing to upload: set checkpoint.export to Final or Each, or remove exportTo"
        )
        yield "checkpoint.exportTo", checkpoint.export_to, remedy


def _exports_and_checkpoints_are_apart(spec: PPOJobSpec) -> Iterator[Problem]:
    target, path = spec.checkpoint.export_to, spec.checkpoint.path
    if target is not None and path is not None and (target == path or target.startswith(f"{path}/")):
        remedy = f"it is in checkpoint.path {path}, which is only for checkpoints: use another prefix"
        yield "checkpoint.exportTo", target, remedy


EXPORT_CHECKS = (_there_is_something_to_upload, _exports_and_checkpoints_are_apart)
