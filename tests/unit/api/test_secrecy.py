"""What of a job is a secret, and that nothing of it is in what others are shown."""

from typing import Any

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.secrecy import secret_values, shown
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from tests.bad_specs import with_changes


def from_secret(name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}


def template(container: str, *env: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": container, "env": list(env)}]}}


def make_spec(**changes: Any) -> PPOJobSpec:
    _, _, spec = parse_manifest(with_changes({("spec", name): value for name, value in changes.items()}))
    return resolve(spec)


def test_others_are_shown_no_environment_no_pod_template_and_no_secret_argument() -> None:
    spec = make_spec(
        env=[{"name": "WANDB_API_KEY", "value": "literal-1"}, {"name": "PLAIN", "value": "literal-2"}],
        envFrom=[{"secretRef": {"name": "bucket"}}],
        head={"podTemplate": template("proxy", {"name": "A", "value": "literal-3"})},
        reward={
            "function": {
                "module": "judge",
                "kwargs": {
                    "api_key": "literal-4",
                    "model": "m",
                    "retries": {"auth_token": "literal-5"},
                    "max_tokens": 9,
                },
            }
        },
    )

    found = shown(spec)

    assert "literal" not in str(found)
    assert not {"env", "envFrom"} & set(found)
    assert "podTemplate" not in found["head"]
    kwargs = {"api_key": "(left out)", "model": "m", "retries": {"auth_token": "(left out)"}, "max_tokens": 9}
    assert found["reward"]["function"]["kwargs"] == kwargs
    assert found["data"] == spec.to_wire()["data"]
    assert found["actor"] == spec.to_wire()["actor"]


def test_a_secret_is_known_by_its_source_its_prefix_or_its_name() -> None:
    spec = make_spec(
        env=[
            from_secret("DSN"),
            {"name": "MODE", "value": "offline"},
            {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        ],
        envFrom=[{"secretRef": {"name": "s"}, "prefix": "BUCKET_"}, {"configMapRef": {"name": "c"}, "prefix": "OPEN_"}],
        head={"podTemplate": template("ray-head", from_secret("LICENCE"))},
        pools=[
            {
                "name": "actor",
                "gpusPerNode": 1,
                "podTemplate": template("ray-worker", {"name": "DB_PASSWORD", "value": "of-the-pool"}),
            }
        ],
        placement={"actor": "actor"},
    )
    environ = {
        **{"DSN": "postgres://u:p@h", "BUCKET_ID": "bucket-id", "LICENCE": "licence-1"},
        **{"HF_TOKEN": "hf_abcdef", "aws_secret": "aws-secret", "SSH_KEY": "short"},
        **{"MODE": "offline", "HOST": "10.0.0.1", "OPEN_DOOR": "come-in", "PATH": "/usr/bin"},
    }

    assert set(secret_values(spec, environ)) == {
        *("postgres://u:p@h", "bucket-id", "licence-1", "hf_abcdef", "aws-secret"),
        "of-the-pool",
    }
