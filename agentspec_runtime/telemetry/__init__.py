"""Spans and metrics of both sides, and the tools to look at them; see `docs/tracing.md`."""
