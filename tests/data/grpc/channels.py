"""Options of gRPC channels."""

from typing import Final

ALONE: Final = (("grpc.use_local_subchannel_pool", 1),)
"""A channel shares no connections with others of its process.

Else one to a port that refused somebody a moment ago, before another server opened it, is refused once more
without being tried.
"""
