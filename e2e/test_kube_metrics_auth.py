"""Who may read a picker's metrics: asked of the real API server, and not more often than is needed."""

import asyncio
import base64
import json
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from e2e.kube import PICKER_RULES, Namespace, pool
from e2e.kube_access import LEAST_TOKEN_S, Access, rule
from e2e.kube_client import Thing, path_of
from e2e.kube_line import LABELS, POOL
from e2e.kube_picker import ClusterPicker, pool_flags, running
from e2e.pages import until
from epp.lab.stack import HOST
from epp.runtime.plugin_state import STATE_PATH
from epp.runtime.tls import self_signed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

REVIEW_RULES: Final = (
    rule("authentication.k8s.io", "tokenreviews", "create"),
    rule("authorization.k8s.io", "subjectaccessreviews", "create"),
)
READER_RULES: Final[tuple[Thing, ...]] = ({"nonResourceURLs": ["/metrics"], "verbs": ["get"]},)
METRIC: Final = "llm_d_epp_info"


class Page(NamedTuple):
    status: int
    challenge: str
    text: str


async def page(
    picker: ClusterPicker, authorization: str = "", path: str = "/metrics", tls: ssl.SSLContext | None = None
) -> Page:
    headers = {"Authorization": authorization} if authorization else {}
    url = f"{'https' if tls else 'http'}://{HOST}:{picker.metrics_port}{path}"
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session,
        session.get(url, headers=headers, timeout=aiohttp.ClientTimeout(20)) as answer,
    ):
        return Page(answer.status, answer.headers.get("WWW-Authenticate", ""), await answer.text())


def bearer(token: str) -> str:
    return f"Bearer {token}"


def reviews(namespace: Namespace) -> Counter[str]:
    """How often the picker asked for each kind, whatever came of it."""
    asked = namespace.plane.audit(f"system:serviceaccount:{namespace.name}:picker")
    resources = ("tokenreviews", "subjectaccessreviews")
    return Counter(each.object_ref.resource for each in asked if each.object_ref.resource in resources)


async def guarded(namespace: Namespace, *flags: str, may_review: bool = True) -> tuple[ClusterPicker, Access]:
    """A picker whose metrics are not for all, and its account."""
    await namespace.create(pool(POOL, LABELS))
    access = await namespace.access(PICKER_RULES, REVIEW_RULES if may_review else ())
    asked = (*pool_flags(POOL, namespace.name), "--metrics-endpoint-auth=true", *flags)
    return ClusterPicker(namespace.folder, access, asked), access


# -- tokens ----------------------------------------------------------------------------------------


def forged(namespace: Namespace, token: str, **claims: object) -> str:
    """The token with other claims, signed with the cluster's own key."""
    key = load_pem_private_key((namespace.plane.folder / "sa.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    head, body, _ = token.split(".")
    content: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    signed = f"{head}.{_base64(json.dumps(content | claims).encode())}"
    first, second = decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{signed}.{_base64(first.to_bytes(32, 'big') + second.to_bytes(32, 'big'))}"


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


async def token_for(namespace: Namespace, account: str, audience: str) -> str:
    path = path_of("v1", "ServiceAccount", namespace.name, account, "token")
    spec = {"audiences": [audience], "expirationSeconds": LEAST_TOKEN_S}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    token: str = (await namespace.client.call("POST", path, body))["status"]["token"]
    return token


async def test_only_who_has_the_right_reads_metrics(namespace: Namespace) -> None:
    picker, _ = await guarded(namespace)
    reader = await namespace.access((), READER_RULES, name="reader")
    nobody = await namespace.access((), name="nobody")
    now = int(time.time())
    past = {"iat": now - 7200, "nbf": now - 7200, "exp": now - 3600}
    expired = forged(namespace, reader.token, **past)
    lasting = forged(namespace, reader.token, exp=now + 900)
    async with running(picker):
        # Who shows no bearer token costs no review.
        for wrong in ("", "Bearer", "Basic cmVhZGVyOnNlY3JldA=="):
            assert await page(picker, wrong) == (401, "Bearer", "Unauthorized\n")
        assert not reviews(namespace)

        unknown = {
            "garbage": "garbage",
            "expired": expired,
            "for another audience": await token_for(namespace, "reader", "vault"),
            "cut short": reader.token[:-2],
        }
        for what, token in unknown.items():
            assert await page(picker, bearer(token)) == (401, "Bearer", "Unauthorized\n"), what
        assert reviews(namespace) == {"tokenreviews": len(unknown)}

        # Many readers at once with one token share one review, and its answer is kept.
        found = await asyncio.gather(*(page(picker, bearer(reader.token)) for _ in range(8)))
        found += [await page(picker, f"bearer  {reader.token}", path) for path in ("/metrics", STATE_PATH)]
        assert {each.status for each in found} == {200}
        assert METRIC in found[0].text
        assert METRIC in (await page(picker, bearer(lasting))).text
        known = {"tokenreviews": len(unknown) + 2, "subjectaccessreviews": 2}
        assert reviews(namespace) == known

        refused = [
            await page(picker, bearer(nobody.token), path) for path in ("/metrics", STATE_PATH, "/metrics")
        ]
        assert {each.status for each in refused} == {403}
        assert nobody.user in refused[0].text
        assert reviews(namespace) == {kind: count + 1 for kind, count in known.items()}
        text = picker.child.log_path.read_text()
        assert all(
            token not in text for token in (*unknown.values(), reader.token, nobody.token) if len(token) > 9
        )


# -- rights and certificates -----------------------------------------------------------------------


def certificate(folder: Path) -> Path:
    folder.mkdir()
    made = self_signed()
    (folder / "tls.key").write_bytes(made.key)
    (folder / "tls.crt").write_bytes(made.chain)
    return folder


def shows(folder: Path | None) -> ssl.SSLContext:
    """A client that asks whoever answers, and shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


async def test_a_picker_that_may_not_review_says_so_once_and_asks_again(namespace: Namespace) -> None:
    """With client certificates in addition: they come first, and do not take the token's place."""
    known, stranger = certificate(namespace.folder / "known"), certificate(namespace.folder / "stranger")
    flags = (
        f"--metrics-cert-dir={certificate(namespace.folder / 'server')}",
        f"--metrics-client-ca-file={known / 'tls.crt'}",
    )
    picker, account = await guarded(namespace, *flags, may_review=False)
    reader = await namespace.access((), READER_RULES, name="reader")
    mine, token = shows(known), bearer(reader.token)
    async with running(picker):
        for wrong in (None, stranger):
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await page(picker, token, tls=shows(wrong))
        assert not reviews(namespace)
        assert (await page(picker, tls=mine)).status == 401
        for _ in range(3):
            refused = await page(picker, token, tls=mine)
            assert refused.status == 503
            assert "cannot be asked" in refused.text
            await asyncio.sleep(0.6)
        assert reviews(namespace)["tokenreviews"] > 1
        complaint = "with create on tokenreviews of authentication.k8s.io"
        assert sum(complaint in text for text in picker.log_lines()) == 1
        await account.allow(REVIEW_RULES, everywhere=True)
        await until(lambda: reads(picker, token, mine), "the metrics can be read")
        assert sum(complaint in text for text in picker.log_lines()) == 1
        assert sum("can be reviewed again" in text for text in picker.log_lines()) == 1
        assert (await page(picker, bearer("garbage"), tls=mine)).status == 401
        for wrong in (None, stranger):
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await page(picker, token, tls=shows(wrong))


async def reads(picker: ClusterPicker, token: str, tls: ssl.SSLContext) -> bool:
    found = await page(picker, token, tls=tls)
    return found.status == 200 and METRIC in found.text
