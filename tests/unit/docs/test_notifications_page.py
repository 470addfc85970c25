"""The page of the notifications: its tables are those of the code, and its relay relays what the operator sends."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.notification import MAX_PENDING, NotificationType, PendingNotification
from ppojob_operator.notifications import RESULTS, Backoff, Receiver
from ppojob_operator.notifications.cloud_event import CONTENT_TYPE, TYPE_PREFIX, cloud_event
from ppojob_operator.notifications.notifier import MAX_QUEUED
from ppojob_operator.notifications.receiver import AUTHORIZATION_FILE, CA_FILE, URL_FILE, Outcome
from ppojob_operator.plan import JobKey
from ppojob_operator.reconcile.outbox import PASSING
from ppojob_operator.settings import Settings
from tests.ports import server_port
from tests.unit.docs.test_reference_pages import CODE, rows, section

PAGE = Path("docs/notifications.md").read_text()
EXAMPLE = json.loads(PAGE.split("```json\n")[1].split("```")[0])
RELAY = PAGE.split("```python\n")[1].split("```")[0]


def notification(data: dict[str, Any]) -> PendingNotification:
    """Return the notification of the page's event."""
    fields = {name: data[name] for name in ("number", "phase", "reason", "message", "attempt", "step", "checkpoint")}
    kind = EXAMPLE["type"].removeprefix(TYPE_PREFIX)
    more = {"type": kind, "totalSteps": data["totalSteps"], "reward": str(data["reward"]), "time": EXAMPLE["time"]}
    return PendingNotification.model_validate({**fields, **more})


def event_of_the_page() -> bytes:
    data = EXAMPLE["data"]
    return cloud_event(data["cluster"], JobKey(data["namespace"], data["name"]), data["uid"], notification(data))


def test_the_event_of_the_page_is_one_of_the_operator() -> None:
    assert json.loads(event_of_the_page()) == EXAMPLE
    assert f"`{CONTENT_TYPE}`" in PAGE


def test_every_member_is_explained() -> None:
    explained = {code for row in rows(section(PAGE, "The event")) for code in CODE.findall(row[0])}
    constant = {"specversion", "datacontenttype", "data"}

    assert explained == set(EXAMPLE) - constant | {f"data.{name}" for name in EXAMPLE["data"]}


def test_every_type_is_explained_and_the_defaults_are_those_of_the_operator() -> None:
    found = {CODE.findall(row[0])[0]: row[2] == "yes" for row in rows(section(PAGE, "Types"))}

    assert list(found) == [kind.value for kind in NotificationType]
    assert {kind for kind, is_default in found.items() if is_default} == Settings().types_to_notify
    assert all(f"`{reason}`" in section(PAGE, "Types") for reason in PASSING)


def test_keys_results_and_limits_are_those_of_the_code() -> None:
    keys = {CODE.findall(row[0])[0] for row in rows(section(PAGE, "Set up"))}
    delivery, backoff, settings = section(PAGE, "Delivery"), Backoff(), Settings()
    [metric] = re.findall(r"`ppojob_notifications_total\{type,result\}` \| .*", Path("docs/metrics.md").read_text())

    assert keys == {AUTHORIZATION_FILE, URL_FILE, CA_FILE}
    assert all(f"`{result}`" in metric for result in RESULTS)
    assert f"At most {MAX_PENDING} events of a job wait" in delivery
    assert f"At most {MAX_QUEUED} are in the operator's memory" in delivery
    assert f"`notifications.timeoutSeconds` ({settings.notification_timeout:g})" in delivery
    assert f"`notifications.giveUpAfterSeconds` ({settings.notification_give_up_after})" in delivery
    assert (backoff.first, backoff.longest, backoff.longest_asked) == (1, 300, 3600)


@contextmanager
def chat(*statuses: int) -> Iterator[tuple[str, list[str]]]:
    """Serve a chat that answers with these statuses, the last one repeated; yield its address and its lines."""
    lines, left = list[str](), list(statuses)

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = left.pop(0) if len(left) > 1 else left[0]
            if status == 200:
                lines.append(said["text"])
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", lines
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def relay(chat_url: str, script: Path) -> Iterator[str]:
    """Run the relay of the page as a process; yield its address."""
    assert "timeout=5)" in RELAY
    # The chat of these tests answers, on a busy machine too.
    script.write_text(RELAY.replace("timeout=5)", "timeout=240)"))
    port = server_port()
    environment = {**os.environ, "CHAT_URL": chat_url, "PORT": str(port)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait(timeout=60)


def wait_for(url: str) -> None:
    """Wait until somebody answers."""
    end = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=2)
        except urllib.error.HTTPError:
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow
def test_the_relay_posts_each_event_once_and_asks_for_another_try_if_the_chat_fails(tmp_path: Path) -> None:
    with chat(500, 200) as (chat_url, lines), relay(chat_url, tmp_path / "relay.py") as url:
        wait_for(url)
        receiver = Receiver(Settings(notification_url=url, notification_timeout=60))

        async def send() -> list[Outcome]:
            return [await receiver.post(event_of_the_page()) for _ in range(3)]

        failed, *sent = asyncio.run(send())

    assert (failed.is_final, "503" in failed.problem) == (False, True)
    assert sent == [Outcome(), Outcome()]
    assert lines == [
        "rl-team/arithmetic failed (attempt 3): BackoffLimitExceeded: the trainer failed: gradients are not finite"
    ]


@pytest.mark.slow
def test_the_relay_escapes_the_tenants_text(tmp_path: Path) -> None:
    data = {**EXAMPLE["data"], "message": "<!channel> <http://evil|here> &"}
    body = cloud_event("c", JobKey("n", "j"), "u", notification(data))
    with chat(200) as (chat_url, lines), relay(chat_url, tmp_path / "relay.py") as url:
        wait_for(url)
        assert asyncio.run(Receiver(Settings(notification_url=url, notification_timeout=60)).post(body)) == Outcome()

    assert lines[0].endswith("&lt;!channel&gt; &lt;http://evil|here&gt; &amp;")
