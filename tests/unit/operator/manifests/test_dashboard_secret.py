"""The token of a dashboard can be made again from the operator's key, and from nothing else."""

from ppojob_operator.manifests.dashboard_secret import dashboard_secret, dashboard_token
from ppojob_operator.plan import JobKey, Surroundings

KEY = b"k" * 32


def test_a_token_is_the_same_each_time() -> None:
    assert dashboard_token(KEY, "uid", "cluster") == dashboard_token(KEY, "uid", "cluster")


def test_another_key_object_or_cluster_has_another_token() -> None:
    tokens = {
        dashboard_token(KEY, "uid", "cluster"),
        dashboard_token(b"x" * 32, "uid", "cluster"),
        dashboard_token(KEY, "other", "cluster"),
        dashboard_token(KEY, "uid", "other"),
    }

    assert len(tokens) == 4
    assert {len(token) for token in tokens} == {64}


def test_the_secret_is_what_kuberay_expects() -> None:
    secret = dashboard_secret(JobKey("ns", "job"), "uid", "job-12345", "T")

    assert secret["metadata"]["name"] == "job-12345-ray"
    assert secret["stringData"] == {"auth_token": "T"}
    assert secret["immutable"] is True


def test_the_key_does_not_show_where_an_observation_is_printed() -> None:
    assert "kkkk" not in repr(Surroundings("url", "ca", KEY))
