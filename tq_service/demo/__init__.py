"""The demo: GRPO training of a tiny policy in seven processes that meet only at the service."""

from __future__ import annotations

from tq_service.demo.command import run_demo

__all__ = ["run_demo"]
