"""TLS of the picker as a client: whom it believes, and the certificate it shows."""

import asyncio
import ssl

from epp.config.spec import HttpSourceSpec
from epp.errors import ConfigError, Problem
from epp.runtime.watch import Signature, signature


class ClientTls:
    """The context for new connections to a data source; it follows the files as they change."""

    def __init__(self, spec: HttpSourceSpec) -> None:
        """Raises ConfigError when a file cannot be used."""
        self._spec = spec
        given = (spec.ca_cert_path, spec.client_cert_path, spec.client_key_path)
        self._paths = tuple(path for path in given if path) if spec.scheme == "https" else ()
        # Taken before the files are read: what changes in between is read again.
        self._seen = self._signatures()
        self.context: ssl.SSLContext | bool = self._made() if spec.scheme == "https" else True

    async def follow(self) -> str | None:
        """Read the files again if they changed. What is wrong with them, while the old context stays.

        On a thread: a bundle of all public authorities takes 35 ms.
        """
        seen = self._signatures()
        if seen == self._seen:
            return None
        try:
            self.context = await asyncio.to_thread(self._made)
        except ConfigError as error:
            return str(error)
        self._seen = seen
        return None

    def _signatures(self) -> tuple[Signature, ...]:
        return tuple(map(signature, self._paths))

    def _made(self) -> ssl.SSLContext:
        spec = self._spec
        authorities = None if spec.insecure_skip_verify else spec.ca_cert_path
        try:
            context = ssl.create_default_context(cafile=authorities)
        except (OSError, ValueError) as error:
            raise _unusable(spec, "caCertPath", spec.ca_cert_path, error) from None
        # Authorities of clusters often lack extensions that newer Pythons insist on.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if spec.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if spec.client_cert_path:
            try:
                context.load_cert_chain(spec.client_cert_path, spec.client_key_path)
            except (OSError, ValueError) as error:
                paths = f"{spec.client_cert_path} with {spec.client_key_path}"
                raise _unusable(spec, "clientCertPath", paths, error) from None
        return context


def _unusable(spec: HttpSourceSpec, field: str, path: str | None, error: Exception) -> ConfigError:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return ConfigError(spec.type, Problem(field, f"{path} cannot be used: {reason}"))
