"""Who may read the metrics: reviews of tokens, how long they count, and what the port answers."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge

from epp.lab.stack import free_ports
from epp.runtime.kube import reviews as module
from epp.runtime.kube.api import KubeError
from epp.runtime.kube.reviews import ACCESS_REVIEWS, TOKEN_REVIEWS, Allowed, Reviews, authorize_on_loop
from epp.runtime.metrics_server import Authorize, Refusal, bearer_token, serve_metrics

DEADLINE_S = 20.0
SCRAPER = "system:serviceaccount:monitoring:prometheus"
SECRET = "eyJhbGciOi.secret.token"
STATE = "/debug/plugins/state"
UNAVAILABLE = "The API server cannot be asked who may read this\n"


class Api:
    """Knows users by their tokens; `readers` may read the metrics."""

    def __init__(self) -> None:
        self.users: dict[str, str] = {SECRET: SCRAPER, "other": "system:serviceaccount:default:other"}
        self.readers = {SCRAPER}
        self.calls: list[tuple[str, str, Any]] = []
        self.refuses: Callable[[str], KubeError | bytes | None] = lambda path: None
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.hangs: Callable[[dict[str, Any]], bool] = lambda spec: False
        self.under_way = 0
        self.most_under_way = 0

    async def send(self, method: str, path: str, body: object) -> bytes:
        sent = msgspec.json.decode(msgspec.json.encode(body))
        self.calls.append((method, path, sent))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            await self.go_on.wait()
            if self.hangs(sent["spec"]):
                await asyncio.Event().wait()
        finally:
            self.under_way -= 1
        refused = self.refuses(path)
        if isinstance(refused, KubeError):
            raise refused
        return refused or msgspec.json.encode({**sent, "status": self._status(path, sent["spec"])})

    def _status(self, path: str, spec: dict[str, Any]) -> dict[str, Any]:
        if path == ACCESS_REVIEWS:
            allowed = spec["user"] in self.readers
            return {"allowed": allowed, **({} if allowed else {"reason": "no rule matched"})}
        user = self.users.get(spec["token"])
        if user is None:
            return {"error": "[invalid bearer token, token lookup failed]", "user": {}}
        extra = {"authentication.kubernetes.io/credential-id": ["JTI=1"]}
        told = {"username": user, "uid": "u-1", "groups": ["system:serviceaccounts"], "extra": extra}
        return {"authenticated": True, "user": told, "audiences": ["https://kubernetes.default.svc"]}

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.calls]


class Reviewing:
    def __init__(self) -> None:
        self.api = Api()
        self.said: list[str] = []
        self.now = 0.0
        self.reviews = Reviews(
            self.api,  # type: ignore[arg-type]
            self.said.append,
            clock=lambda: self.now,
        )


@pytest.fixture
async def reviewing() -> Reviewing:
    return Reviewing()


# -- reviews ----------------------------------------------------------------------------------------


async def test_a_token_is_reviewed_and_then_its_users_access(reviewing: Reviewing) -> None:
    assert await reviewing.reviews.allowed(SECRET) == Allowed("ok", SCRAPER)
    assert reviewing.api.calls == [
        (
            "POST",
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": SECRET}},
        ),
        (
            "POST",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": SCRAPER,
                    "uid": "u-1",
                    "groups": ["system:serviceaccounts"],
                    "extra": {"authentication.kubernetes.io/credential-id": ["JTI=1"]},
                    "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
                },
            },
        ),
    ]
    assert reviewing.said == []


async def test_who_is_not_let_in(reviewing: Reviewing) -> None:
    reviews = reviewing.reviews
    unknown = "[invalid bearer token, token lookup failed]"
    assert await reviews.allowed("wrong") == Allowed("unauthenticated", "", unknown)
    assert reviewing.api.paths() == [TOKEN_REVIEWS]
    other = Allowed("forbidden", "system:serviceaccount:default:other", "no rule matched")
    assert await reviews.allowed("other") == other
    assert (await reviews.allowed("")).outcome == "unauthenticated"
    assert len(reviewing.api.calls) == 3, "nothing is asked without a token"


@pytest.mark.parametrize(
    ("token", "kept_s", "reviews"), [(SECRET, 60.0, 2), ("other", 10.0, 2), ("wrong", 10.0, 1)]
)
async def test_answers_are_kept_for_a_while(
    reviewing: Reviewing, token: str, kept_s: float, reviews: int
) -> None:
    first = await reviewing.reviews.allowed(token)
    reviewing.now = kept_s - 0.001
    assert await reviewing.reviews.allowed(token) == first
    assert len(reviewing.api.calls) == reviews
    reviewing.now = kept_s
    reviewing.api.users = dict.fromkeys([SECRET, "other", "wrong"], "somebody")
    assert (await reviewing.reviews.allowed(token)).user == "somebody"


async def test_calls_for_one_token_share_a_review(reviewing: Reviewing) -> None:
    api = reviewing.api
    api.go_on.clear()
    calls = [asyncio.create_task(reviewing.reviews.allowed(SECRET)) for _ in range(50)]
    other = asyncio.create_task(reviewing.reviews.allowed("other"))
    await asyncio.sleep(0.01)
    calls[0].cancel()  # its reader has gone, the others wait on
    await asyncio.sleep(0.01)
    api.go_on.set()
    assert {one.outcome for one in await asyncio.gather(*calls[1:])} == {"ok"}
    assert (await other).outcome == "forbidden"
    asked = [body["spec"].get("token") for _, path, body in api.calls if path == TOKEN_REVIEWS]
    assert asked.count(SECRET) == 2, "the one that was given up, and one for all that waited"
    assert asked.count("other") == 1


async def test_a_failure_is_shared_too(reviewing: Reviewing) -> None:
    reviewing.api.refuses = lambda path: KubeError("POST", path, "storage is gone", status=500)
    found = await asyncio.gather(*(reviewing.reviews.allowed(SECRET) for _ in range(50)))
    assert {one.outcome for one in found} == {"unknown"}
    assert len(reviewing.api.calls) == 1
    reviewing.api.refuses = lambda path: None
    reviewing.now += 1.0
    assert (await reviewing.reviews.allowed(SECRET)).outcome == "ok"


@pytest.mark.parametrize(
    "status", [{}, {"user": {"username": SCRAPER}}, {"authenticated": False, "user": {"username": SCRAPER}}]
)
async def test_only_who_is_said_to_be_authenticated_is(reviewing: Reviewing, status: dict[str, Any]) -> None:
    """Nothing else counts for it: neither a user's name nor that no error is told."""
    reviewing.api.refuses = lambda path: msgspec.json.encode({"status": status})
    assert (await reviewing.reviews.allowed(SECRET)).outcome == "unauthenticated"
    assert reviewing.api.paths() == [TOKEN_REVIEWS]


async def test_many_tokens_are_no_burden_to_the_server_or_to_memory(reviewing: Reviewing) -> None:
    await asyncio.gather(*(reviewing.reviews.allowed(f"wrong {number}") for number in range(1500)))
    assert reviewing.api.most_under_way <= 4
    assert len(reviewing.reviews._refused) == 1024
    asked = len(reviewing.api.calls)
    await reviewing.reviews.allowed("wrong 1499")
    assert len(reviewing.api.calls) == asked, "the newest are kept"
    await reviewing.reviews.allowed("wrong 0")
    assert len(reviewing.api.calls) == asked + 1
    assert len(reviewing.reviews._under_way) == 0


async def test_no_token_is_kept(reviewing: Reviewing) -> None:
    await reviewing.reviews.allowed(SECRET)
    assert SECRET not in repr(vars(reviewing.reviews))
    assert SECRET.encode() not in b"".join(reviewing.reviews._granted)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_flood_of_new_tokens_costs_a_good_one_nothing(reviewing: Reviewing, ended: bool) -> None:
    """Its review is kept as long as ever, and when that has ended, it waits for none of the others."""
    assert (await reviewing.reviews.allowed(SECRET)).outcome == "ok"
    await asyncio.gather(*(reviewing.reviews.allowed(f"wrong {number}") for number in range(1500)))
    asked = reviewing.api.paths().count(ACCESS_REVIEWS)
    reviewing.now = 60.0 if ended else 59.0
    reviewing.api.hangs = lambda spec: "late" in spec.get("token", "")
    flood = [asyncio.create_task(reviewing.reviews.allowed(f"late {number}")) for number in range(50)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(DEADLINE_S):
        assert (await reviewing.reviews.allowed(SECRET)).outcome == "ok"
    assert reviewing.api.paths().count(ACCESS_REVIEWS) == asked + ended
    assert reviewing.api.most_under_way <= 5
    for task in flood:
        task.cancel()
    await asyncio.wait(flood)


async def test_who_was_let_in_keeps_that_while_the_server_is_away_and_loses_it_with_the_right(
    reviewing: Reviewing,
) -> None:
    reviews, api = reviewing.reviews, reviewing.api
    assert (await reviews.allowed(SECRET)).outcome == "ok"
    for refuses, outcome in (
        (lambda path: KubeError("POST", path, "connection refused"), "unknown"),
        (lambda path: None, "ok"),
    ):
        reviewing.now += 61.0
        api.refuses = refuses
        assert (await reviews.allowed(SECRET)).outcome == outcome
        assert len(reviews._granted) == 1
    reviewing.now += 61.0
    api.readers.clear()
    assert (await reviews.allowed(SECRET)).outcome == "forbidden"
    assert (await reviews.allowed(SECRET)).outcome == "forbidden"
    assert (len(reviews._granted), len(reviews._refused)) == (0, 1)
    reviewing.now += 11.0
    api.readers.add(SCRAPER)
    assert (await reviews.allowed(SECRET)).outcome == "ok"
    assert (len(reviews._granted), len(reviews._refused)) == (1, 0)


NO_ROLE = (
    "a ClusterRole for this service account is missing, with create on tokenreviews of authentication.k8s.io "
    "and on subjectaccessreviews of authorization.k8s.io"
)
QUOTES = f'TokenReview cannot be handled: error found near |"token":"{SECRET}"|'


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            KubeError("POST", TOKEN_REVIEWS, QUOTES, status=403, reason="Forbidden"),
            f"metrics: tokens cannot be reviewed: POST {TOKEN_REVIEWS}: 403 Forbidden; {NO_ROLE}",
        ),
        (
            KubeError("POST", TOKEN_REVIEWS, QUOTES, status=400, reason="BadRequest"),
            f"metrics: tokens cannot be reviewed: POST {TOKEN_REVIEWS}: 400 BadRequest",
        ),
        (
            KubeError("POST", TOKEN_REVIEWS, "connection refused"),
            f"metrics: tokens cannot be reviewed: POST {TOKEN_REVIEWS}: connection refused",
        ),
        (b"<html>", "metrics: tokens cannot be reviewed: an answer that is no review"),
        (
            b'{"status": {"authenticated": "yes"}}',
            "metrics: tokens cannot be reviewed: an answer that is no review",
        ),
    ],
)
async def test_a_server_that_cannot_be_asked_is_said_once(
    reviewing: Reviewing, refused: KubeError | bytes, said: str
) -> None:
    reviewing.api.refuses = lambda path: refused
    for _ in range(3):
        assert (await reviewing.reviews.allowed(SECRET)).outcome == "unknown"
        reviewing.now += 5.0
    assert len(reviewing.api.calls) == 3
    assert reviewing.said == [said]
    reviewing.api.refuses = lambda path: None
    assert (await reviewing.reviews.allowed(SECRET)).outcome == "ok"
    assert reviewing.said == [said, "metrics: tokens can be reviewed again"]


async def test_an_access_review_that_fails_lets_nobody_in(reviewing: Reviewing) -> None:
    down = KubeError("POST", ACCESS_REVIEWS, "no", status=503)
    reviewing.api.refuses = lambda path: down if path == ACCESS_REVIEWS else None
    assert (await reviewing.reviews.allowed(SECRET)).outcome == "unknown"


async def test_the_log_names_the_user_and_never_the_token(
    reviewing: Reviewing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await reviewing.reviews.allowed("other")
    await reviewing.reviews.allowed("other")
    reviewing.api.users["other"] = SCRAPER
    await reviewing.reviews.allowed("no such token")
    (record,) = [record for record in caplog.records if record.name == module.__name__]
    assert (record.levelname, record.user) == ("INFO", "system:serviceaccount:default:other")  # type: ignore[attr-defined]
    assert "no such token" not in repr([vars(record) for record in caplog.records])


# -- on the port ------------------------------------------------------------------------------------


@contextmanager
def serving(authorize: Authorize | None) -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("something", "that is measured", registry=registry).set(1)
    port = free_ports(1)[0]
    pages = {STATE: lambda: b'{"plugins": {}}'}
    close = serve_metrics(registry, "127.0.0.1", port, pages=pages, authorize=authorize)
    try:
        yield port
    finally:
        close()


def ask(
    port: int, path: str, authorization: str | None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(
            method, path, headers={} if authorization is None else {"Authorization": authorization}
        )
        answer = connection.getresponse()
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read().decode(),
        )
    finally:
        connection.close()


async def test_every_path_of_the_port_asks(reviewing: Reviewing) -> None:
    with serving(authorize_on_loop(reviewing.reviews, asyncio.get_running_loop())) as port:
        for path in ("/metrics", "/", "/metrics?name[]=something", STATE, "/favicon.ico"):
            for authorization in (
                None,
                "",
                "Bearer",
                "Bearer ",
                "Basic dXNlcjpwYXNz",
                SECRET,
                "Bearer wrong",
            ):
                status, headers, body = await asyncio.to_thread(ask, port, path, authorization)
                assert (status, body) == (401, "Unauthorized\n"), authorization
                assert headers["www-authenticate"] == "Bearer"
            status, headers, body = await asyncio.to_thread(ask, port, path, "Bearer other")
            assert status == 403
            assert body == "Authorization denied for user system:serviceaccount:default:other\n"
            assert headers["content-type"] == "text/plain; charset=utf-8"
            status, _, body = await asyncio.to_thread(ask, port, path, f"Bearer {SECRET}")
            assert status == 200
            assert ("something 1.0" in body) == ("metrics" in path or path == "/")
    tokens = [body["spec"]["token"] for _, asked, body in reviewing.api.calls if asked == TOKEN_REVIEWS]
    assert tokens == ["wrong", "other", SECRET], "nobody is asked about a request without a token"


async def test_the_port_says_when_the_server_cannot_be_asked(reviewing: Reviewing) -> None:
    reviewing.api.refuses = lambda path: KubeError("POST", path, "connection refused")
    with serving(authorize_on_loop(reviewing.reviews, asyncio.get_running_loop())) as port:
        status, headers, body = await asyncio.to_thread(ask, port, "/metrics", f"Bearer {SECRET}")
        assert (status, headers["retry-after"], body) == (503, "1", UNAVAILABLE)
        assert (await asyncio.to_thread(ask, port, "/metrics", None))[0] == 401
        reviewing.api.refuses = lambda path: None
        reviewing.now += 1.0
        assert (await asyncio.to_thread(ask, port, "/metrics", f"Bearer {SECRET}"))[0] == 200


async def test_a_review_that_takes_too_long_is_given_up(
    reviewing: Reviewing, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewing.api.go_on.clear()
    with serving(authorize_on_loop(reviewing.reviews, asyncio.get_running_loop())) as port:
        with monkeypatch.context() as impatient:
            impatient.setattr(module, "_PATIENCE_S", 0.05)
            status, _, body = await asyncio.to_thread(ask, port, "/metrics", f"Bearer {SECRET}")
        assert (status, body) == (503, UNAVAILABLE)
        async with asyncio.timeout(DEADLINE_S):
            while reviewing.api.under_way:  # noqa: ASYNC110 - the given up call ends on its own
                await asyncio.sleep(0.005)
        reviewing.api.go_on.set()
        assert (await asyncio.to_thread(ask, port, "/metrics", f"Bearer {SECRET}"))[0] == 200


async def test_a_review_that_is_cut_short_by_the_end_of_the_picker(reviewing: Reviewing) -> None:
    reviewing.api.go_on.clear()
    authorize = authorize_on_loop(reviewing.reviews, asyncio.get_running_loop())
    before = asyncio.all_tasks()
    asked = asyncio.create_task(asyncio.to_thread(authorize, SECRET))
    async with asyncio.timeout(DEADLINE_S):
        while not reviewing.api.under_way:  # noqa: ASYNC110 - a thread has to come this far
            await asyncio.sleep(0.005)
    for task in asyncio.all_tasks() - before - {asked}:
        task.cancel()
    refusal = await asked
    assert refusal is not None
    assert refusal.status.startswith("503")


def test_without_the_hook_all_may_read() -> None:
    with serving(None) as port:
        assert ask(port, "/metrics", None)[0] == 200
        assert ask(port, STATE, None)[2] == '{"plugins": {}}'


def test_a_hook_that_fails_lets_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    def broken(token: str | None) -> Refusal | None:
        raise RuntimeError("a fault")

    with serving(broken) as port:
        status, _, body = ask(port, "/metrics", f"Bearer {SECRET}")
    assert (status, body) == (500, "Authorization failed\n")
    assert SECRET not in caplog.text


def test_the_name_of_a_user_may_be_of_any_script() -> None:
    with serving(lambda token: Refusal("403 Forbidden", "Authorization denied for user oidc:Zoë 沙")) as port:
        assert ask(port, "/metrics", "Bearer x")[2] == "Authorization denied for user oidc:Zoë 沙\n"


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc.def", "abc.def"),
        ("bearer abc", "abc"),
        ("BEARER   abc  ", "abc"),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearerabc", None),
        ("Basic abc", None),
        ("abc", None),
        ("", None),
    ],
)
def test_where_the_token_stands(header: str, token: str | None) -> None:
    assert bearer_token(header) == token
