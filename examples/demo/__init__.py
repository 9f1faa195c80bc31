"""The demo: GRPO training of a tiny policy in seven processes that communicate through the service only."""
