"""Where the pool's members are told: by flags, by a file, or by Kubernetes."""

from collections.abc import Callable, Sequence

from epp.config.spec import FileDiscoverySpec
from epp.errors import ConfigError, Problem
from epp.pool.records import Endpoint
from epp.runtime.discovery import FileDiscovery, endpoints_from_flags
from epp.runtime.options import Options


def in_kubernetes(options: Options, spec: FileDiscoverySpec | None) -> bool:
    """Whether Kubernetes tells them. Else --pool-name is a name and no more."""
    elsewhere = spec is not None or options.endpoint
    return not elsewhere and bool(options.pool_name or options.endpoint_selector)


def find_members(
    options: Options,
    spec: FileDiscoverySpec | None,
    apply: Callable[[Sequence[Endpoint]], None],
    on_error: Callable[[str], None],
) -> FileDiscovery | None:
    """Tell those of flags or a file now; returns what follows the file.

    Raises:
        ConfigError: nobody tells any, or two do; or what is told cannot be used.
    """
    if spec is not None and options.endpoint:
        raise ConfigError("--endpoint", Problem("", "give endpoints as flags or by file-discovery, not both"))
    if in_kubernetes(options, spec):
        return None
    if options.ha_enable_leader_election:
        alone = "replicas elect a leader in Kubernetes, and this one's endpoints come from elsewhere"
        raise ConfigError("--ha-enable-leader-election", Problem("", alone))
    if spec is not None:
        discovery = FileDiscovery(spec.path, spec.watch, apply, on_error)
        apply(discovery.load())
        return discovery
    if not options.endpoint:
        right = (
            "name the InferencePool with --pool-name, its pods with --endpoint-selector, "
            "or endpoints with --endpoint or a file-discovery plugin"
        )
        raise ConfigError(options.config_file or "command line", Problem("", f"no endpoints: {right}"))
    apply(endpoints_from_flags(options.endpoint))
    return None
