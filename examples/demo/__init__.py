"""The demo: GRPO training of a tiny policy in seven processes that meet only at the service."""
