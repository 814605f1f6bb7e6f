"""Warmroute's endpoint picker: which replica should serve this LLM request.

Rooms import in one direction only (see `[tool.importlinter]` in pyproject.toml); everything below
`epp.runtime` is deterministic and does no I/O.
"""
