"""What is found among the objects that the chart renders."""

from typing import Any


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the one object of a kind."""
    [found] = [manifest for manifest in objects if manifest["kind"] == kind]
    return found


def identity(manifest: dict[str, Any]) -> tuple[str, str, str]:
    """Return kind, namespace and name."""
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the template of the operator's pod."""
    template: dict[str, Any] = only(objects, "Deployment")["spec"]["template"]
    return template


def role_of(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a role by its name."""
    [found] = [m for m in objects if m["kind"] in ("Role", "ClusterRole") and m["metadata"]["name"] == name]
    return found


def environment_of(objects: list[dict[str, Any]]) -> dict[str, str]:
    """Return the environment of the operator's container."""
    return {entry["name"]: entry.get("value", "") for entry in pod_of(objects)["spec"]["containers"][0]["env"]}
