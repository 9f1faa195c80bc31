"""The data service for RL post-training of language models."""
