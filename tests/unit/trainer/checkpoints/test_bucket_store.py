"""What only a bucket has: writes on a condition, no renames, a store that can refuse."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore, S3Store

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import (
    BucketError,
    BucketRefusedError,
    BucketUnreachableError,
    CredentialsMissingError,
    FencedOutError,
    ForeignCheckpointError,
    bucket,
    open_store,
)
from ppojob_trainer.checkpoints.address import below, is_address, split
from tests.unit.trainer.checkpoints.places import BucketPlace, claimed, save

SECRET = "hidden-secret"
REFUSAL = (
    '<?xml version="1.0"?><Error><Code>{code}</Code><AWSAccessKeyId>known</AWSAccessKeyId>'
    "<StringToSign>signed</StringToSign></Error>"
)


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize(
    ("address", "bucket_alone", "key"),
    [("s3://bucket", "s3://bucket", ""), ("gs://bucket/a/b", "gs://bucket", "a/b"), ("s3://b/a/", "s3://b", "a")],
)
def test_an_address_is_a_bucket_and_a_key(address: str, bucket_alone: str, key: str) -> None:
    assert is_address(address)
    assert split(address) == (bucket_alone, key)


def test_a_folder_is_no_address() -> None:
    assert not is_address("/data/s3:/bucket")
    assert below("/data/checkpoints/", "step-4") == "/data/checkpoints/step-4"


def test_a_bucket_without_a_prefix_holds_checkpoints_too(memory: MemoryStore) -> None:
    place = BucketPlace(memory, "s3://bucket")
    store = claimed(place.root)

    found = save(place, store, 4)

    assert found.location == "s3://bucket/step-4.attempt-0"
    again = claimed(place.root, attempt=1)
    assert again.resume_point(ResumePolicy.AUTO, None) == found
    assert again.resume_point(ResumePolicy.AUTO, found.location) == found


def test_a_checkpoint_that_was_copied_out_of_the_bucket_is_gone_on_from(in_bucket: BucketPlace, tmp_path: Path) -> None:
    found = save(in_bucket, claimed(in_bucket.root), 4)
    for name in ("manifest.json", "shard-0"):
        (tmp_path / name).write_text(in_bucket.text(f"{found.location}/{name}"))

    for root in ("s3://bucket/another", str(tmp_path / "another")):
        copied = claimed(root, uid="another").resume_point(ResumePolicy.AUTO, str(tmp_path))
        assert copied == replace(found, location=str(tmp_path))
        assert claimed(root, uid="another").resume_point(ResumePolicy.AUTO, found.location) == found


# The fence is the write itself.


def test_an_attempt_that_was_overtaken_between_read_and_write_does_not_move_the_tracker(
    in_bucket: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = claimed(in_bucket.root, attempt=1)
    save(in_bucket, old, 4)
    in_bucket.write(f"{old.begin(8)}/shard-0", "late")
    overwrite = bucket.Bucket.overwrite

    def overtaken(self: bucket.Bucket, name: str, content: bytes) -> None:
        # The look at the tracker is behind it, the write of the tracker comes.
        overwrite(self, name, content)
        monkeypatch.setattr(bucket.Bucket, "overwrite", overwrite)
        claimed(in_bucket.root, attempt=2)

    monkeypatch.setattr(bucket.Bucket, "overwrite", overtaken)
    with pytest.raises(FencedOutError) as caught:
        old.commit(8, state={}, keep=1)

    assert caught.value.newer == 2
    newest = claimed(in_bucket.root, attempt=3).latest()
    assert newest is not None
    assert newest.step == 4


def test_a_second_driver_of_the_same_attempt_fences_the_first_out(in_bucket: BucketPlace) -> None:
    first = claimed(in_bucket.root)
    claimed(in_bucket.root)

    with pytest.raises(FencedOutError):
        first.begin(4)


def test_a_write_whose_answer_was_lost_was_written(in_bucket: BucketPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(in_bucket.root)
    in_bucket.write(f"{store.begin(4)}/shard-0", "weights")
    write = bucket.Bucket.write

    def lost(self: bucket.Bucket, name: str, content: bytes, *, replaces: Any) -> Any:
        write(self, name, content, replaces=replaces)
        # The second try of the same request meets the first one's work.
        return write(self, name, content, replaces=replaces)

    monkeypatch.setattr(bucket.Bucket, "write", lost)
    assert store.commit(4, state={}, keep=1).step == 4
    monkeypatch.setattr(bucket.Bucket, "write", write)
    save(in_bucket, store, 8)


def test_an_upload_of_an_attempt_that_has_just_begun_is_left_alone(in_bucket: BucketPlace) -> None:
    store = claimed(in_bucket.root, attempt=1)
    in_bucket.write(f"{in_bucket.root}/{in_bucket.name(4, attempt=2)}/shard-0", "newer")

    save(in_bucket, store, 4)

    assert in_bucket.name(4, attempt=2) in in_bucket.names(in_bucket.root)


def test_a_checkpoint_of_another_run_under_our_name_is_refused(in_bucket: BucketPlace) -> None:
    theirs = save(in_bucket, claimed("s3://bucket/other", uid="other"), 4)
    store = claimed(in_bucket.root)
    in_bucket.write(
        f"{in_bucket.root}/{in_bucket.name(4)}/manifest.json", in_bucket.text(f"{theirs.location}/manifest.json")
    )

    with pytest.raises(ForeignCheckpointError, match=rf"{in_bucket.name(4)} is a checkpoint of another run"):
        store.begin(4)


# A kill at any moment.


@pytest.mark.parametrize("scenario", ["first", "second"])
def test_after_a_kill_anywhere_a_whole_checkpoint_is_left(monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    steps = []
    for count in range(100):
        place, is_over = _killed_at(monkeypatch, count, scenario)
        store = claimed(place.root, attempt=2)
        found = store.resume_point(ResumePolicy.AUTO, None)
        steps.append(found.step if found else 0)
        if found is not None:
            assert place.text(f"{found.location}/shard-0") == f"weights of step {found.step}"
        save(place, store, 12, keep=1)
        assert place.names(place.root) == [place.name(12, attempt=2), "tracker.json"], count
        if is_over:
            break

    # The exits are in the order of the save: first the older checkpoint counts, from one moment on the newer.
    before = 0 if scenario == "first" else 4
    assert steps == sorted(steps)
    assert {before, 8} == set(steps)
    assert len(steps) >= (4 if scenario == "first" else 6)


def _killed_at(monkeypatch: pytest.MonkeyPatch, count: int, scenario: str) -> tuple[BucketPlace, bool]:
    """Save step 8 in a new bucket, and exit before the given call that changes it; return whether the save ended."""
    memory = MemoryStore()
    with monkeypatch.context() as patched:
        patched.setattr(bucket, "from_url", lambda address, **options: memory)
        place = BucketPlace(memory)
        store = claimed(place.root, attempt=1)
        if scenario == "second":
            save(place, store, 4, keep=1)
        left = [count]

        def armed(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return call(*args, **options)

            return wrapper

        for name in ("put", "delete"):
            patched.setattr(obstore, name, armed(getattr(obstore, name)))
        try:
            save(place, store, 8, keep=1)
        except Killed:
            is_over = False
        else:
            is_over = True
    monkeypatch.setattr(bucket, "from_url", lambda address, **options: memory)
    return place, is_over


# A store that cannot be used.


class _Refusing(http.server.ThreadingHTTPServer):
    """Answers every request with one status and one code, in S3's words."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.code = status, code


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Refusing

    def do_GET(self) -> None:
        body = REFUSAL.format(code=self.server.code).encode()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def refusing(status: int, code: str) -> Iterator[str]:
    server = _Refusing(status, code)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "known",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "eu-central-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bucket, "_MAX_RETRIES", 1)
    monkeypatch.setattr(bucket, "RETRY_LIMIT", timedelta(seconds=2))


def _claim_fails(kind: type[BucketError]) -> str:
    with pytest.raises(BucketError) as caught:
        open_store("s3://bucket/job", uid="u", attempt=0).claim()
    assert type(caught.value) is kind, caught.value
    said = str(caught.value)
    assert said.startswith("checkpoint.path s3://bucket/job cannot be used: "), said
    for secret in (SECRET, "AWSAccessKeyId>", "StringToSign", "Debug source"):
        assert secret not in said
    return said


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", BucketRefusedError, "allowed to list, read, write and delete there; give credentials"),
        (401, "InvalidToken", BucketRefusedError, "the store refuses"),
        (404, "NoSuchBucket", BucketRefusedError, "there is no such bucket"),
        (503, "SlowDown", BucketUnreachableError, "check the store"),
    ],
)
def test_a_refusal_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, kind: type[BucketError], words: str
) -> None:
    with refusing(status, code) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        said = _claim_fails(kind)

    assert words in said
    assert f"({code})" in said


@pytest.mark.usefixtures("_environment")
def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:password@127.0.0.1:9")

    said = _claim_fails(BucketUnreachableError)

    assert "127.0.0.1:9" in said
    assert "password" not in said


@pytest.mark.usefixtures("_environment")
def test_missing_credentials_are_named_with_the_fields_that_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with refusing(404, "NotFound") as url:
        # The machine's own metadata service, which has none to give.
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        with pytest.raises(BucketError) as caught:
            bucket.connect("s3://bucket/job").check("0")
    assert isinstance(caught.value, CredentialsMissingError), caught.value
    assert "spec.env or spec.envFrom from a Secret" in str(caught.value)


def test_a_key_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nowhere/key.json")

    with pytest.raises(CredentialsMissingError, match=r"gs://bucket/job cannot be used: .*/nowhere/key\.json"):
        open_store("gs://bucket/job", uid="u", attempt=0)


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_store_without_conditional_writes_is_refused(
    in_bucket: BucketPlace, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    put = obstore.put

    def careless(store: Any, path: str, content: bytes, *, mode: Any = None) -> Any:
        ignored = "create" if condition == "If-None-Match" else None
        is_ignored = mode == ignored or (ignored is None and isinstance(mode, dict))
        return put(store, path, content, mode="overwrite" if is_ignored else mode)

    monkeypatch.setattr(obstore, "put", careless)
    with pytest.raises(BucketRefusedError, match=f"does not honour {condition} when it writes"):
        claimed(in_bucket.root)


def test_a_check_leaves_nothing_behind(in_bucket: BucketPlace) -> None:
    claimed(in_bucket.root)

    assert in_bucket.names(in_bucket.root) == ["tracker.json"]


def test_the_connection_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "known")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    connection = bucket.connect("s3://bucket/job")

    assert isinstance(connection.store, S3Store)
    assert SECRET not in repr(connection)
