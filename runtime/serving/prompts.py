"""What a person may give to be continued: texts, token ids, conversations. `LLM` and the server read them here.

A message's content is a text, or a list of parts that are texts; an assistant that called tools, or refused, may have
said nothing. Templates see one text, and whatever else a message holds.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mgraph.runtime.chat import ChatTemplate, Message
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.parameters import RequestError, is_token

Prompt = str | Sequence[int]
"""A text, or token ids."""

Role = Literal["system", "developer", "user", "assistant", "tool"]

SAID_INSTEAD: Mapping[str, Any] = {"tool_calls": list, "function_call": Mapping, "refusal": str}
"""What an assistant's message may have in place of content, if there is anything in it."""

_EXAMPLE = 'as in [{"role": "user", "content": "Hello"}]'


@dataclass(frozen=True)
class Input:
    """A prompt as a text, where it was one or a conversation, and its tokens; `field` is what the person calls it."""

    text: str | None
    ids: Sequence[int]
    field: str = "prompt"


def separate(prompts: Any) -> list[Prompt]:
    """One prompt, or several, as a list; what is in it is not looked at. Raises RequestError for anything else."""
    prompts = _plain_list(prompts)
    if isinstance(prompts, str) or (_listed(prompts) and len(prompts) > 0 and all(map(is_token, prompts))):
        return [prompts]
    if not _listed(prompts):
        raise RequestError(f"a prompt must be a text, token ids, or a list of either, not {_shown(prompts)}", "prompt")
    return list(prompts)


def read_prompt(engine: Engine, prompt: Any) -> Input:
    """One prompt; a text begins with what the tokenizer puts before each. Raises RequestError for what is none."""
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise RequestError("there is no tokenizer for a text", "prompt", "give token ids")
        return Input(prompt, [*engine.tokenizer.prefix, *_encode(engine, prompt, "prompt")])
    prompt = _plain_list(prompt)
    if not _listed(prompt):
        raise RequestError(f"a prompt must be a text or a list of token ids, not {_shown(prompt)}", "prompt")
    wrong = [token for token in prompt if not is_token(token)]
    if wrong:
        raise RequestError(f"a prompt of token ids has {_shown(wrong[0])}, which is no integer", "prompt")
    return Input(None, [int(token) for token in prompt])


def read_chat(
    engine: Engine, template: ChatTemplate | None, messages: Any, tools: Any = None, variables: Any = None
) -> Input:
    """A conversation up to where the assistant's answer begins; `variables` are more of the template's. Raises
    RequestError for what is none, DataError where the template refuses it."""
    if engine.tokenizer is None:
        raise RequestError("there is no tokenizer for a text", "messages", "give token ids as a prompt")
    if template is None:
        raise RequestError(
            "the tokenizer has no chat template, so there is no way to write a conversation",
            "messages",
            "give --chat-template FILE (chat_template in Python), or a prompt instead of messages",
        )
    if tools is not None and not _listed(tools):
        raise RequestError(f"tools must be a list, not {_shown(tools)}", "tools")
    text = template.prompt(plain_messages(messages), tools, _variables(template, variables))
    return Input(text, _encode(engine, text, "messages"), "messages")


def _variables(template: ChatTemplate, given: Any) -> Mapping[str, Any]:
    """What is given besides, none of which may stand for what the template is given anyway."""
    field = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"{field} must map names to values, not {_shown(given)}", field)
    taken = next((name for name in given if name in template.reserved), None)
    if taken is not None:
        raise RequestError(f"{field} has '{taken}', which the chat template is given anyway", field, "leave it out")
    return given


def plain_messages(messages: Any) -> list[Message]:
    """Messages whose contents are texts. Raises RequestError with the place of what is wrong."""
    if not _listed(messages):
        raise RequestError(f"a conversation must be a list of messages, not {_shown(messages)}", "messages", _EXAMPLE)
    if not len(messages):
        raise RequestError("the conversation has no messages", "messages", _EXAMPLE)
    return [_plain(message, f"messages.{at}") for at, message in enumerate(messages)]


def _plain(given: Any, place: str) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"a message must have a role and content, not be {_shown(given)}", place, _EXAMPLE)
    message: Message = given
    role, content, roles = message.get("role"), message.get("content"), get_args(Role)
    if role not in roles:
        raise RequestError(f"{place}.role is {_shown(role)}: must be one of {', '.join(roles)}", f"{place}.role")
    instead = (isinstance(message.get(name), kind) and message[name] for name, kind in SAID_INSTEAD.items())
    if content is None and not (role == "assistant" and any(instead)):
        raise RequestError(
            f"the field '{place}.content' is missing",
            f"{place}.content",
            "give the text; only an assistant that called tools may have none",
        )
    if isinstance(message.get("tool_calls"), list):
        message = {**message, "tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
    if isinstance(content, str):
        return message
    parts = [] if content is None else content
    if not _listed(parts) or not all(map(_is_text, parts)):
        problem = f"{place}.content must be a text, or a list of parts of text, not {_shown(content)}"
        raise RequestError(problem, f"{place}.content", '[{"type": "text", "text": "Hello"}]')
    return {**message, "content": "".join(part["text"] for part in parts)}


def _with_arguments(call: Any) -> Any:
    """A tool's call whose arguments are an object, as templates take them: OpenAI's form has that object's JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # as a model may have written it
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain_list(value: Any) -> Any:
    """Arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(value: Any) -> bool:
    """Whether these are things in an order."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping | Set)


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _encode(engine: Engine, text: str, param: str) -> list[int]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    least = -(-len(text) // tokenizer.longest_token) if tokenizer.longest_token is not None else 0
    if least >= engine.longest:  # told at once: making its tokens could take minutes
        raise RequestError(
            f"the text has {len(text)} characters, which is {least} tokens or more, and this model's maximum context "
            f"length is {engine.longest} with at least one generated token",
            param,
            "shorten it",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has half of a surrogate pair, {text[error.start]!r}, as character {error.start}",
            param,
            "join it with its other half, or leave it out",
        ) from error
    return [int(token) for token in tokenizer.encode(text).tolist()]
