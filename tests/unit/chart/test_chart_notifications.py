"""Notifications by choice: how the receiver and its Secret reach the operator, and which addresses are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.notification import NotificationType
from ppojob_operator.notifications.receiver import AUTHORIZATION_FILE, CA_FILE, URL_FILE
from ppojob_operator.settings import Settings, SettingsError
from tests.unit.chart.rendered import environment_of, only, pod_of

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
ADDRESS = "https://events.example.com/ppojob?x=1"


def test_they_are_off_by_default_and_nothing_of_them_is_there(helm: Any) -> None:
    objects = helm.objects({})

    assert not Settings.from_environment(environment_of(objects)).has_receiver
    assert "notification" not in str(only(objects, "Deployment")).lower()


def test_all_values_reach_the_operator(helm: Any) -> None:
    values = {
        "notifications.enabled": True,
        "notifications.url": ADDRESS,
        "notifications.types": ["failed", "started"],
        "notifications.clusterName": "training-1",
        "notifications.timeoutSeconds": 3,
        "notifications.giveUpAfterSeconds": 604_800,
    }
    settings = Settings.from_environment(environment_of(helm.objects(values)))

    assert (settings.notification_url, settings.notification_folder) == (ADDRESS, "")
    assert settings.types_to_notify == {"failed", "started"}
    assert settings.notification_cluster == "training-1"
    assert (settings.notification_timeout, settings.notification_give_up_after) == (3, 604_800)


def test_the_defaults_are_those_of_the_operator(helm: Any) -> None:
    found = Settings.from_environment(
        environment_of(helm.objects({"notifications.enabled": True, "notifications.url": ADDRESS}))
    )

    names = [name for name in Settings.model_fields if name.startswith("notification_") and name != "notification_url"]
    assert {name: getattr(found, name) for name in names} == {name: getattr(Settings(), name) for name in names}


def test_the_secret_is_mounted_as_a_folder_and_is_in_no_environment(helm: Any) -> None:
    objects = helm.objects({"notifications.enabled": True, "notifications.existingSecret": "receiver"})
    spec = pod_of(objects)["spec"]
    [mount] = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "notifications"]
    [volume] = [each for each in spec["volumes"] if each["name"] == "notifications"]

    assert mount["mountPath"] == Settings.from_environment(environment_of(objects)).notification_folder
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "a file of a subPath never changes"
    assert volume["secret"] == {"secretName": "receiver"}
    assert "secretKeyRef" not in json.dumps(spec)


def test_the_values_name_the_keys_that_the_operator_reads() -> None:
    words = (CHART / "values.yaml").read_text()

    assert all(f"`{key}`" in words for key in (AUTHORIZATION_FILE, URL_FILE, CA_FILE))


def test_without_an_address_the_chart_says_where_to_set_one(helm: Any) -> None:
    done = helm.template({"notifications.enabled": True})

    assert done.returncode != 0
    assert "set notifications.url, or notifications.existingSecret with key url" in done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "events.example.com",
        "ftp://events.example.com",
        "HTTPS//events",
        "https://",
        "https:///path",
        "https://user:password@events.example.com",
        "https://events.example.com/a b",
        "https://events.example.com/#part",
    ],
)
def test_a_bad_address_is_refused_by_the_chart_and_by_the_operator(helm: Any, url: str) -> None:
    done = helm.template({"notifications.enabled": True, "notifications.url": url})

    assert done.returncode != 0
    assert f"notifications.url is {json.dumps(url)}: it must begin with http:// or https://" in done.stderr
    with pytest.raises(SettingsError, match="PPOJOB_NOTIFICATION_URL="):
        Settings.from_environment({"PPOJOB_NOTIFICATION_URL": url})


@pytest.mark.parametrize("url", [ADDRESS, "http://broker.events.svc:8080", "https://[::1]:8443/x", "http://10.0.0.1?a"])
def test_a_good_address_is_taken_by_both(helm: Any, url: str) -> None:
    objects = helm.objects({"notifications.enabled": True, "notifications.url": url})

    assert Settings.from_environment(environment_of(objects)).notification_url == url


def test_the_schema_has_all_types() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    listed = schema["properties"]["notifications"]["properties"]["types"]["items"]["enum"]
    assert listed == [kind.value for kind in NotificationType]
