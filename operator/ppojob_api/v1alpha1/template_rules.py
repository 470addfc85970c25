"""Fields that a spec needs, from itself or from its template, in CEL.

The schema does not require them, because the API server does not see the template. `policy.py` puts these rules beside
the others; in Python, the completed spec is checked, and pydantic finds missing fields.
"""

from ppojob_api.v1alpha1.base import Rule

_REMEDY = "required, in the job or in its template: add it, or name a template that has it (spec.templateRef)"


def _required(field: str, present: str, *, value: str = "") -> Rule:
    return Rule(
        rule=f"has(self.templateRef) || {present}",
        message=f"{field} is {_REMEDY}",
        field_path=f".{field.partition('[')[0]}",
        value=value,
    )


TEMPLATE_RULES = [
    _required("image", "has(self.image)"),
    _required("pools", "has(self.pools)"),
    _required(
        "pools[].gpusPerNode",
        "!has(self.pools) || self.pools.all(p, has(p.gpusPerNode))",
        value="self.pools.filter(p, !has(p.gpusPerNode)).map(p, p.name)",
    ),
    _required("storage.claimName", "self.?storage.?claimName.hasValue()"),
]
"""Rules on the whole spec."""

HAS_ALL = "!has(self.templateRef) && has(self.pools) && self.pools.all(p, has(p.gpusPerNode))"
"""In CEL: whether rules that read fields of a template can be evaluated."""
