"""`spec.templateRef`, and the template in `status.template`: the one that a job's spec is completed with.

`templates.py` has the templates themselves; it needs the whole spec, of which this is a part.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.quantities import ObjectName, RawObject


class TemplateKind(StrEnum):
    """Kinds of templates."""

    NAMESPACED = "PPOJobTemplate"
    CLUSTER = "ClusterPPOJobTemplate"


class TemplateRef(ApiModel):
    """The template that completes the spec."""

    kind: TemplateKind = TemplateKind.NAMESPACED
    """PPOJobTemplate: one in the job's namespace. ClusterPPOJobTemplate: one for all namespaces."""
    name: ObjectName
    """Name of the template."""

    @property
    def shown(self) -> str:
        """Kind and name, for messages."""
        return f"{self.kind.value} {self.name}"


class PinnedTemplate(ApiModel):
    """The template of an accepted job, as it was when the job was accepted."""

    kind: TemplateKind
    """Kind of the template."""
    name: Annotated[str, Field(max_length=253)]
    """Name of the template."""
    uid: Annotated[str, Field(max_length=128)]
    """UID of the template."""
    generation: int = Field(ge=0)
    """Generation of the template's spec."""
    spec: RawObject
    """The template's spec. Later edits of the template do not change it."""

    @property
    def ref(self) -> TemplateRef:
        """Return the reference that names it."""
        return TemplateRef(kind=self.kind, name=self.name)
