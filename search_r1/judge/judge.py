"""The judge: an answer and its references in, a score in [0, 1] out."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from search_r1.config import JudgeConfig
from search_r1.judge.endpoint import ChatEndpoint, JudgeError
from search_r1.judge.prompts import JUDGE_PROMPTS


class Judge:
    """Scores answers of the model; a missing answer is 0 without being asked about."""

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises ConfigError, ResourceError as ``ChatEndpoint``."""
        self._config = config
        self._prompt = JUDGE_PROMPTS[config.prompt]
        self._endpoint = ChatEndpoint(config, transport)

    async def score(
        self, history: Sequence[str], question: str, references: Sequence[str], answer: str | None
    ) -> float:
        """Return the score; raises JudgeError when the endpoint gives no reply, or one without a grade."""
        if answer is None:
            return 0.0
        reply = await self._endpoint.ask(self._prompt.messages(history, question, references, answer))
        grade = self._prompt.read(reply.text)
        if grade is None:
            self._endpoint.usage.failures += 1
            raise JudgeError(
                f"judge.model {self._config.model}: a reply without a grade of prompt {self._config.prompt}: "
                f"{' '.join(reply.text.split())[-120:]!r}"
            )
        return grade

    def totals(self) -> dict[str, float]:
        """Return what was asked and what it cost so far, as growing totals."""
        return self._endpoint.usage.totals(self._config)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()
