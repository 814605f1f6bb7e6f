"""The control plane that gateways run on."""

from tools.control_plane import ControlPlane


class SlicedPlane(ControlPlane):
    """With EndpointSlices, by which gateways find pods of Services. They take no address of 127.0.0.0/8."""

    def _controller_manager(self) -> list[str]:
        return [
            f"{each},endpointslice-controller" if each.startswith("--controllers=") else each
            for each in super()._controller_manager()
        ]
