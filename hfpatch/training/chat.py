"""Tokens of one row and which of them are learned: plain text, prompt and completion, chat messages.

The Llama 3 templates have no `{% generation %}` markers, so what an assistant said is found by prefix differences: the
template is rendered up to each assistant turn (with its generation prompt) and up to the turn's end, and the tokens
between are the turn. That holds only where each rendering begins with the one before, so this is checked on the tokens.
"""

CHAT_FIELDS = ("messages", "conversations")
_SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}


class BadRow(ValueError):
    """A row that cannot be used; the message says why."""


def kind_of(columns, text_field: str = "text") -> str:
    """ "chat", "prompt" or "text", by the columns of a row. Raises BadRow where none fits."""
    if any(name in columns for name in CHAT_FIELDS):
        return "chat"
    if "prompt" in columns and "completion" in columns:
        return "prompt"
    if text_field in columns:
        return "text"
    raise BadRow(
        f"expected a column {text_field!r}, 'messages', or 'prompt' and 'completion'; came "
        f"{', '.join(map(repr, columns)) or 'none'}"
    )


def encode(row: dict, tokenizer, *, kind: str = "auto", text_field: str = "text") -> tuple[list[int], list[bool]]:
    """Token ids of the row and, for each, whether its prediction counts. Raises BadRow."""
    kind = kind_of(row, text_field) if kind == "auto" else kind
    if kind == "chat":
        field = next((name for name in CHAT_FIELDS if name in row), None)
        if field is None:
            raise BadRow(f"expected a column {' or '.join(map(repr, CHAT_FIELDS))}, came {', '.join(map(repr, row))}")
        return encode_chat(_messages(row[field], field), tokenizer, tools=row.get("tools"))
    if kind == "prompt":
        for name in ("prompt", "completion"):
            if name not in row:
                raise BadRow(f"expected a column {name!r}, came {', '.join(map(repr, row))}")
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            turns, said = _messages(prompt, "prompt"), _messages(completion, "completion")
            return encode_chat(turns + said, tokenizer, tools=row.get("tools"), start=len(turns))
        # Tokenized apart: a token that spans the seam would never be what the model is prompted with.
        ids = tokenizer(_string(prompt, "prompt"))["input_ids"]
        ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        said = tokenizer(_string(completion, "completion"), add_special_tokens=False)["input_ids"]
        said = with_end(said, tokenizer)
        return ids + said, [False] * len(ids) + [True] * len(said)
    ids = with_end(tokenizer(text_of(row, text_field))["input_ids"], tokenizer)
    return ids, [True] * len(ids)


def strings(row: dict, *, kind: str = "auto", text_field: str = "text") -> list[str]:
    """What a row says, without template: the text, prompt and completion, or each message's content. Raises BadRow."""
    kind = kind_of(row, text_field) if kind == "auto" else kind
    if kind == "text":
        return [text_of(row, text_field)]
    names = ("prompt", "completion") if kind == "prompt" else CHAT_FIELDS
    said = []
    for name in (name for name in names if name in row):
        if isinstance(row[name], list):
            said += [_string(m["content"], "content") for m in _messages(row[name], name) if m.get("content")]
        else:
            said.append(_string(row[name], name))
    return said


def text_of(row: dict, text_field: str) -> str:
    """The plain text of a row. Raises BadRow where it is missing, empty, or no string."""
    if text_field not in row:
        raise BadRow(f"expected a column {text_field!r}, came {', '.join(map(repr, row)) or 'none'}")
    return _string(row[text_field], text_field)


def with_end(ids: list[int], tokenizer) -> list[int]:
    """The ids with the end-of-text token behind them, where the tokenizer has one and did not add it."""
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def encode_chat(messages: list[dict], tokenizer, *, tools=None, start: int = 0) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and whether each is learned: those of assistant turns from message `start` on.

    A turn is what follows its generation prompt, its end-of-turn token included. Raises BadRow where the template
    refuses the messages, or renders what came before a turn differently once the turn is there.
    """

    def render(turns, prompt):
        try:
            text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            raise BadRow(f"the chat template refuses it: {error or type(error).__name__}") from error
        return tokenizer(_string(text, "rendered"), add_special_tokens=False)["input_ids"]

    ids = render(messages, False)
    learned = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < start:
            continue
        before, after = render(messages[:i], True), render(messages[: i + 1], False)
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise BadRow(
                f"the chat template does not keep its prefix at message {i} (it renders earlier turns differently once "
                "later ones are there), so the assistant's tokens cannot be told apart"
            )
        learned[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, learned


def _string(value, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name!r} must be a string, {type(value).__name__} came")
    if not value:
        raise BadRow(f"{name!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may write half a surrogate pair, which no text can hold
        raise BadRow(f"{name!r} has a lone surrogate at character {error.start}") from error
    return value


def _messages(value, name: str) -> list[dict]:
    """The messages as [{"role", "content", ...}]; ShareGPT's {"from", "value"} is read too."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name!r} must be a list of messages, {type(value).__name__ if value else 'none'} came")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow(f"message {i} must be an object with 'role' and 'content', {type(message).__name__} came")
        # parquet and `datasets` fill the keys that other rows have with None.
        message = {k: v for k, v in message.items() if v is not None}
        if "role" not in message and "from" in message:
            message = {"role": _SPEAKERS.get(message["from"], message["from"]), "content": message.get("value")}
        if not isinstance(message.get("role"), str):
            raise BadRow(f"message {i} has no 'role'")
        if message.get("content") is None and "tool_calls" not in message:
            raise BadRow(f"message {i} ({message['role']}) has no 'content'")
        if "content" in message:
            message["content"] = _content(message["content"], i)
        messages.append(message)
    return messages


def _content(content, i: int) -> str:
    """The text of a message. A template would print anything else as Python does, and the model would learn that."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(_string(part.get("text"), "text") for part in content)
    if not isinstance(content, str):
        raise BadRow(f"message {i} must have text as 'content', {type(content).__name__} came")
    return content
