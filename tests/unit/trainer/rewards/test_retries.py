"""Calls of a service are repeated where that may help."""

import httpx
import pytest

from ppojob_trainer.rewards.retries import with_retries

REQUEST = httpx.Request("POST", "http://judge")


def status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(code))


class Service:
    """Raises these errors one after the other, then answers 1."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def ask(self) -> float:
        if self.errors:
            raise self.errors.pop(0)
        return 1.0


@pytest.mark.parametrize(
    "error", [status(429), status(503), httpx.ConnectError("no"), httpx.ReadTimeout("late"), ConnectionResetError()]
)
async def test_a_transient_failure_is_repeated(error: Exception) -> None:
    repeated = with_retries(attempts=3, first_wait_seconds=0.001)
    service = Service(error, error)
    assert repeated(service.ask)() == 1.0

    service = Service(error, error)

    async def ask() -> float:
        return service.ask()

    assert await repeated(ask)() == 1.0


@pytest.mark.parametrize("error", [status(400), status(404), KeyError("answer")])
def test_any_other_failure_is_raised_at_once(error: Exception) -> None:
    service = Service(error)

    with pytest.raises(type(error)):
        with_retries(attempts=3, first_wait_seconds=0.001)(service.ask)()

    assert service.errors == []


def test_the_last_failure_is_raised_as_it_is() -> None:
    service = Service(*[status(503)] * 3)

    with pytest.raises(httpx.HTTPStatusError):
        with_retries(attempts=2, first_wait_seconds=0.001)(service.ask)()

    assert len(service.errors) == 1
    with pytest.raises(ValueError, match="attempts is 0"):
        with_retries(attempts=0)
