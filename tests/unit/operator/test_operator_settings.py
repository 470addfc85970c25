"""Settings come from the environment, and a wrong one is named."""

import re

import pytest

from ppojob_operator.settings import DashboardAccess, Settings, SettingsError


def test_without_an_environment_there_are_defaults() -> None:
    assert Settings.from_environment({}) == Settings()


def test_variables_are_read_under_their_names() -> None:
    settings = Settings.from_environment(
        {
            "POD_NAMESPACE": "here",
            "POD_NAME": "me",
            "PPOJOB_WATCH_NAMESPACES": "team-a, team-b",
            "PPOJOB_PORT": "9443",
            "PPOJOB_DASHBOARD_ACCESS": "PodIP",
            "PPOJOB_EXTRA_NAMES": "a.example, 10.0.0.1,",
            "UNRELATED": "x",
        }
    )

    assert (settings.namespace, settings.pod_name) == ("here", "me")
    assert settings.watch_namespaces == ("team-a", "team-b")
    assert settings.port == 9443
    assert settings.dashboard_access is DashboardAccess.POD_IP
    assert settings.certificate_names == ("a.example", "10.0.0.1")


def test_an_empty_variable_is_not_set() -> None:
    assert Settings.from_environment({"PPOJOB_PORT": "", "PPOJOB_WORKERS": ""}) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PPOJOB_WATCH_NAMESPACES", ","),
        ("PPOJOB_WATCH_NAMESPACES", "team-a,team-b,"),
        ("PPOJOB_WATCH_NAMESPACES", "team-a,,team-b"),
        ("PPOJOB_WATCH_NAMESPACES", "team-a team-b"),
        ("PPOJOB_WATCH_NAMESPACES", "Team_A"),
        ("PPOJOB_WATCH_NAMESPACES", "team-*"),
        ("PPOJOB_WATCH_NAMESPACES", "team-a,team-a"),
        ("PPOJOB_PORT", "tcp://10.0.0.1:443"),
        ("PPOJOB_PORT", "0"),
        ("PPOJOB_WORKERS", "0"),
        ("PPOJOB_REQUEST_TIMEOUT", "-1"),
        ("PPOJOB_DASHBOARD_ACCESS", "Ingress"),
        ("PPOJOB_LOG_LEVEL", "loud"),
        ("PPOJOB_LOG_FORMAT", "XML"),
        ("PPOJOB_JOB_NETWORK_POLICY", "maybe"),
        ("PPOJOB_OPERATOR_LABELS", "app"),
        ("PPOJOB_NOTIFICATION_URL", "https://host:99999/"),
        ("PPOJOB_NOTIFICATION_URL", "https://host/ü"),
        ("PPOJOB_NOTIFICATION_TYPES", ","),
        ("PPOJOB_NOTIFICATION_TYPES", "failed,deleted"),
        ("PPOJOB_NOTIFICATION_CLUSTER", "a/b"),
        ("PPOJOB_NOTIFICATION_TIMEOUT", "0"),
        ("PPOJOB_NOTIFICATION_GIVE_UP_AFTER", "59"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"{name}={value!r}")):
        Settings.from_environment({name: value})


@pytest.mark.parametrize(
    "variables",
    [
        {"PPOJOB_LEASE_DURATION": "10"},
        {"PPOJOB_LEASE_RENEW_DEADLINE": "15"},
        {"PPOJOB_LEASE_RETRY_PERIOD": "10"},
    ],
)
def test_times_with_which_two_would_lead_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="PPOJOB_LEASE_RETRY_PERIOD < PPOJOB_LEASE_RENEW_DEADLINE < PPOJOB_LEASE_D"):
        Settings.from_environment(variables)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("team-a,,Team_B", "['', 'Team_B'] are not names of namespaces: separate the names by single commas"),
        ("a,b,a,c,c", "['a', 'c'] are repeated: name each namespace once"),
    ],
)
def test_a_wrong_list_of_namespaces_is_refused_with_its_wrong_parts(value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        Settings.from_environment({"PPOJOB_WATCH_NAMESPACES": value})


def test_an_unknown_type_of_notification_is_named_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"unknown types \['deleted'\]: name one or more of queued, started"):
        Settings.from_environment({"PPOJOB_NOTIFICATION_TYPES": "failed, deleted"})


@pytest.mark.parametrize("name", ["PPOJOB_NOTIFICATION_URL", "PPOJOB_NOTIFICATION_FOLDER"])
def test_a_receiver_is_one_with_an_address_or_a_secret(name: str) -> None:
    assert not Settings().has_receiver
    assert Settings.from_environment({name: "http://receiver"}).has_receiver
