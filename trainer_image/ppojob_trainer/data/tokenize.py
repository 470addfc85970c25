"""Turns a prompt into token ids: the chat template, the system prompt, and the treatment of overlong prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from jinja2 import TemplateError

from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import Message, PromptRecord

Overlong = Literal["Fail", "Filter", "Truncate"]

# Arguments of `apply_chat_template` that are set here.
_DECIDED = {"tokenize", "add_generation_prompt", "chat_template", "conversation"}


class Tokenizer(Protocol):
    """The part of a HuggingFace tokenizer that is needed here."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        """Return a mapping with `input_ids`, one list for each text."""
        ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Return the text of a conversation."""
        ...


class PromptTokenizer:
    """Turns records into messages and token ids, all in the same way.

    With a chat template: a string prompt becomes a user message, the system prompt goes before it, and the template
    ends with the assistant's turn. Without one (base models): the contents, one below the other, with the
    tokenizer's own special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_prompt: str = "",
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            template: takes the place of the tokenizer's own chat template.
            template_kwargs: further variables of the template.

        Raises:
            DataError: a variable that is decided here, or variables without a template.
        """
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._has_template = bool(template or tokenizer.chat_template)
        given = dict(template_kwargs or {})
        if taken := sorted(_DECIDED & given.keys()):
            raise DataError(f"data.chatTemplateKwargs: {', '.join(taken)} cannot be set here: remove it")
        if given and not self._has_template:
            raise DataError("data.chatTemplateKwargs: the actor's tokenizer has no chat template: set chatTemplate")
        self._template_kwargs = given | ({"chat_template": template} if template else {})

    def messages(self, record: PromptRecord, where: str) -> list[Message]:
        """Return the chat messages of a record.

        Raises:
            DataError: the prompt has a system message, and there is a system prompt too.
        """
        prompt = record.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not self._system_prompt:
            return messages
        if messages[0]["role"] == "system":
            raise DataError(f"{where}: the prompt has a system message already: leave systemPrompt empty")
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def token_ids(self, conversations: Sequence[list[Message]]) -> list[list[int]]:
        """Return the token ids of each conversation, without padding.

        Raises:
            DataError: the chat template is wrong, or refuses a conversation.
        """
        if not conversations:
            return []
        if self._has_template:
            texts = [self._text(messages) for messages in conversations]
        else:
            texts = ["\n".join(message["content"] for message in messages) for messages in conversations]
        # The template writes the special tokens itself; a second begin-of-sequence token would be a silent error.
        encoded = self._tokenizer(texts, add_special_tokens=not self._has_template)
        return [list(ids) for ids in encoded["input_ids"]]

    def _text(self, messages: list[Message]) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
        except TemplateError as error:
            raise DataError(f"the chat template fails at {messages!r:.200}: {type(error).__name__}: {error}") from error


def truncate(token_ids: list[int], max_length: int) -> list[int]:
    """Keep the last `max_length` tokens: the end holds the question and the assistant's turn."""
    return token_ids[-max_length:]
