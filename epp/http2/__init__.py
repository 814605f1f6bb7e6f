"""HTTP/2 and gRPC framing without I/O, as much as a gRPC server needs (RFC 9113 and 7541)."""
