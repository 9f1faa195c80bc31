"""The policy: a character-level recurrent network of 64,462 parameters, small enough to train in a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The policy's response to one prompt.

    Attributes:
        tokens: `(response_tokens,)` int64, including the end token unless the response was cut off.
        logprobs: `(response_tokens,)` float32, the log probability of each sampled token.
    """

    tokens: Tensor
    logprobs: Tensor


class Policy(nn.Module):
    """Embedding, one GRU layer, and a linear layer to the next token's logits."""

    def __init__(self, vocabulary_size: int, *, embedding_size: int = 32, hidden_size: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.recurrent = nn.GRU(embedding_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits `(n, seq, vocabulary)` after each of `tokens` `(n, seq)`, and the last state."""
        hidden, state = self.recurrent(self.embedding(tokens), state)
        return self.head(hidden), state

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Tensor], *, end_token: int, max_tokens: int, generator: torch.Generator
    ) -> list[Response]:
        """Sample one response to each prompt, until the end token or `max_tokens`.

        Args:
            prompts: token tensors of equal length.
            end_token: last token of a response, included in it.
            max_tokens: longest response.
            generator: source of randomness.
        """
        logits, state = self(torch.stack(list(prompts)))
        sampled: list[Tensor] = []
        sampled_logprobs: list[Tensor] = []
        running = torch.ones(len(prompts), dtype=torch.bool)
        lengths = torch.zeros(len(prompts), dtype=torch.int64)
        for _ in range(max_tokens):
            logprobs = logits[:, -1].log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1, generator=generator)
            sampled.append(token)
            sampled_logprobs.append(logprobs.gather(1, token))
            lengths += running
            running &= token.squeeze(1) != end_token
            if not running.any():
                break
            logits, state = self(token, state)
        tokens, chosen = torch.cat(sampled, 1), torch.cat(sampled_logprobs, 1)
        return [
            Response(tokens=tokens[row, :length].clone(), logprobs=chosen[row, :length].clone())
            for row, length in enumerate(lengths.tolist())
        ]

    def response_logprobs(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return log probabilities `(n, longest response)` of the response tokens, and the mask of actual tokens."""
        sequences = [torch.cat([prompt, response]) for prompt, response in zip(prompts, responses, strict=True)]
        padded = pad_sequence(sequences, batch_first=True)
        logits, _ = self(padded[:, :-1])
        logprobs = logits.log_softmax(-1).gather(2, padded[:, 1:].unsqueeze(2)).squeeze(2)
        rows = [
            logprobs[row, len(prompt) - 1 : len(sequence) - 1]
            for row, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True))
        ]
        mask = pad_sequence([torch.ones(len(response), dtype=torch.bool) for response in responses], batch_first=True)
        return pad_sequence(rows, batch_first=True), mask


def flat_weights(module: nn.Module) -> Tensor:
    """Return all parameters as one float32 vector `(parameters,)`."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def load_flat_weights(module: nn.Module, flat: Tensor) -> None:
    """Copy a vector of `flat_weights` back into the parameters.

    Raises:
        ValueError: the vector belongs to another architecture.
    """
    expected = sum(parameter.numel() for parameter in module.parameters())
    if flat.shape != (expected,):
        raise ValueError(f"got weights of shape {tuple(flat.shape)}, expected ({expected},); use the same policy")
    torch.nn.utils.vector_to_parameters(flat, module.parameters())
