"""The agent: it generates once, or twice with an output for each, like some of verl's agents."""

from __future__ import annotations

from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from compat.trainer.images import text_of
from compat.trainer.prompts import reward

NAME = "compat_agent"
_FAILING_SESSION = 1
_TOOL_TOKEN_COUNT = 2


@register(NAME)
class Agent(AgentLoopBase):
    """An agent whose first session gives two outputs for every third prompt, and which fails on request."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the outputs of one session."""
        uid, session, index = str(kwargs["uid"]), int(kwargs["session_id"]), int(kwargs["index"])
        prompt, images = self._prompt(kwargs["raw_prompt"])
        first = await self._ask(sampling_params, f"{uid}:{session}:0", prompt, images)
        if kwargs["extra_info"]["fate"] == "fails" and session == _FAILING_SESSION:
            raise RuntimeError(f"session {session} of prompt {uid} fails on request")
        if session or index % 3:
            return first
        tools = first.response_ids[:_TOOL_TOKEN_COUNT]
        second = await self._ask(sampling_params, f"{uid}:{session}:1", prompt + first.response_ids + tools, images)
        second.num_turns = 4
        if self.processor is not None:  # verl 0.9.1 cannot score several outputs with positions of images; agents may
            text = self.tokenizer.decode(second.response_ids)
            scored = reward(kwargs["data_source"], text, "", kwargs["extra_info"])
            second.reward_score, second.extra_fields["reward_extra_info"] = scored["score"], scored
        return [first, second]

    def _prompt(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[Any] | None]:
        content = messages[-1]["content"]
        if isinstance(content, str):
            return self.tokenizer.encode(content), None
        images = [part["image"] for part in content if part["type"] == "image"]
        text = " ".join(text_of(part["image"]) if part["type"] == "image" else part["text"] for part in content)
        return self.tokenizer.encode(text), images or None

    async def _ask(
        self, sampling_params: dict[str, Any], request_id: str, prompt: list[int], images: list[Any] | None
    ) -> AgentLoopOutput:
        given = await self.server_manager.generate(
            request_id=request_id, prompt_ids=prompt, sampling_params=sampling_params, image_data=images
        )
        experts = None if given.routed_experts is None else np.asarray(given.routed_experts)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=given.token_ids,
            response_mask=[1] * len(given.token_ids),
            response_logprobs=given.log_probs,
            routed_experts=experts,
            multi_modal_data={} if images is None else {"images": images},
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={**given.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
