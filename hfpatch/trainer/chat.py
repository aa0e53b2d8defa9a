"""Token ids of one row and a learned flag for each: plain text, prompt and completion, chat.

Only assistant turns of a chat are learned. Two rules find them:
1. Markers. A template with `{% generation %}` blocks marks the turns. Few published templates have
   them, so TRL's training template of the same family is taken where TRL is installed and has one.
2. Prefixes. Any other template is rendered up to each assistant turn (with its generation prompt)
   and up to the turn's end; the tokens between are the turn. This holds only if each rendering
   begins with the one before (Qwen3's and gpt-oss's own templates break it), so it is checked.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

CHAT_FIELDS = ("messages", "conversations")
_MARKER = re.compile(r"\{%-?\s*generation\b")
_PROBE = "hfpatch-probe"
_SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}


class BadRow(ValueError):
    """A row that cannot be used; the message says why."""


@dataclass(frozen=True)
class Template:
    """How chat messages become tokens.

    text: the jinja source; None for the tokenizer's own template.
    marked: assistant turns are found by `{% generation %}` markers, else by prefixes.
    parts: message content is passed as [{"type": "text", "text": ...}], as templates of models
        with images want it; some of them drop a plain string without an error.
    """

    text: str | None = None
    marked: bool = False
    parts: bool = False


OWN = Template()


def training_template(tokenizer) -> Template:
    """The tokenizer's own template if it has markers, else TRL's for it, else its own."""
    text = None if _MARKER.search(str(tokenizer.chat_template)) else _trl_template(tokenizer)
    marked = bool(_MARKER.search(str(text or tokenizer.chat_template))) and tokenizer.is_fast
    return Template(text, marked, _wants_parts(tokenizer, text))


def _trl_template(tokenizer) -> str | None:
    """TRL's training template for this tokenizer's template; None if TRL is missing or has none."""
    try:
        from trl import get_training_chat_template

        return get_training_chat_template(tokenizer)
    except (ImportError, RuntimeError, ValueError):  # RuntimeError: TRL's own import failed
        return None


def _wants_parts(tokenizer, text: str | None) -> bool:
    """Whether the template drops or refuses a plain string that it renders as a list of parts."""

    def shows(content) -> bool:
        turns = [{"role": "user", "content": content}]
        try:
            return _PROBE in tokenizer.apply_chat_template(
                turns, chat_template=text, tokenize=False
            )
        except Exception:  # a template is somebody else's program and may raise anything
            return False

    return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def kind_of(columns, text_field: str = "text") -> str:
    """ "chat", "prompt" or "text", by the columns of a row. Raises BadRow where none fits."""
    if any(name in columns for name in CHAT_FIELDS):
        return "chat"
    if "prompt" in columns and "completion" in columns:
        return "prompt"
    if text_field in columns:
        return "text"
    if "chosen" in columns and "rejected" in columns:
        raise ValueError(
            "hfpatch: preference data (chosen, rejected) are for TRL's DPOTrainer. Run: hfpatch "
            "run trl dpo --model_name_or_path MODEL --dataset_name DATA."
        )
    alpaca = "; rename Alpaca's 'instruction' to 'prompt' and 'output' to 'completion'"
    raise BadRow(
        f"a row needs a column {text_field!r}, 'messages', or 'prompt' and 'completion', got "
        f"{', '.join(map(repr, columns)) or 'none'}{alpaca if 'instruction' in columns else ''}"
    )


def is_chat(row: dict, kind: str = "auto") -> bool:
    """Whether a template renders this row: messages, or a prompt that is a list of messages."""
    if kind in ("text", "chat"):
        return kind == "chat"
    has_messages = kind == "auto" and any(name in row for name in CHAT_FIELDS)
    return has_messages or isinstance(row.get("prompt"), list)


def encode(
    row: dict, tokenizer, *, kind: str = "auto", text_field: str = "text", template: Template = OWN
) -> tuple[list[int], list[bool]]:
    """Token ids of the row and, for each, whether its prediction counts. Raises BadRow."""
    kind = kind_of(row, text_field) if kind == "auto" else kind
    options = {"tools": row.get("tools"), "template": template}
    if kind == "text":
        ids = with_end(tokenizer(text_of(row, text_field))["input_ids"], tokenizer)
        return ids, [True] * len(ids)
    if kind == "chat":
        field = next((name for name in CHAT_FIELDS if name in row), "messages")
        return encode_chat(_messages(_column(row, *CHAT_FIELDS), field), tokenizer, **options)
    prompt = _column(row, "prompt")
    completion = _column(row, "completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = _messages(prompt, "prompt")
        said = _messages(completion, "completion")
        return encode_chat(turns + said, tokenizer, start=len(turns), **options)
    # Tokenized one by one: no prompt ever ends inside a token that spans the seam.
    ids = tokenizer(_string(prompt, "prompt"))["input_ids"]
    ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
    said = tokenizer(_string(completion, "completion"), add_special_tokens=False)["input_ids"]
    said = with_end(said, tokenizer)
    return ids + said, [False] * len(ids) + [True] * len(said)


def _column(row: dict, *names: str):
    """The value of the first column of these names. Raises BadRow without one."""
    for name in names:
        if name in row:
            return row[name]
    raise BadRow(
        f"a row needs a column {' or '.join(map(repr, names))}, got "
        f"{', '.join(map(repr, row)) or 'none'}"
    )


def strings(value) -> Iterator[str]:
    """Every text in a row, at any depth, without lone surrogates."""
    if isinstance(value, str):
        yield value.encode(errors="ignore").decode()
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def text_of(row: dict, text_field: str) -> str:
    """The plain text of a row. Raises BadRow where it is missing, empty, or no string."""
    return _string(_column(row, text_field), text_field)


def with_end(ids: list[int], tokenizer) -> list[int]:
    """The ids with the end-of-text token behind them, unless they have it or there is none."""
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def encode_chat(
    messages: list[dict], tokenizer, *, tools=None, start: int = 0, template: Template = OWN
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and whether each is learned: assistant turns from `start` on.

    A turn includes its end-of-turn token. Raises BadRow if the template refuses the messages, or
    if it renders what came before a turn differently once the turn is there.
    """
    # [Step 1] Prepare the messages and the call of the template.
    if template.parts:
        messages = [_as_parts(message) for message in messages]

    def render(turns, prompt=False, **options):
        options |= {"tools": tools, "chat_template": template.text, "return_dict": True}
        try:
            return tokenizer.apply_chat_template(turns, add_generation_prompt=prompt, **options)
        except Exception as error:  # a template is somebody else's program and may raise anything
            reason = error or type(error).__name__
            raise BadRow(f"the chat template refuses it: {reason}") from error

    # [Step 2] A template with markers says itself which tokens are the assistant's.
    if template.marked:
        made = render(messages, return_assistant_tokens_mask=True)
        ids = made["input_ids"]
        learned = [bool(on) for on in made["assistant_masks"]]
        if start:
            before = render(messages[:start], prompt=True)["input_ids"]
            if ids[: len(before)] != before:
                raise BadRow(_moved(start))
            learned[: len(before)] = [False] * len(before)
        return ids, learned
    # [Step 3] Without markers, the tokens of a turn are those that its rendering adds to the
    # generation prompt before it.
    ids = render(messages)["input_ids"]
    learned = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < start:
            continue
        before = render(messages[:i], prompt=True)["input_ids"]
        after = render(messages[: i + 1])["input_ids"]
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise BadRow(_moved(i))
        learned[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, learned


def _moved(message: int) -> str:
    missing = importlib.util.find_spec("trl") is None
    return (
        f"the chat template changes earlier turns at message {message}, so the assistant's tokens "
        "cannot be found"
        + ("; pip install trl, which has training templates of many models" if missing else "")
    )


def _as_parts(message: dict) -> dict:
    content = message.get("content")
    parts = [{"type": "text", "text": content}]
    return message | {"content": parts} if isinstance(content, str) else message


def _string(value, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name!r} must be a string, got {type(value).__name__}")
    if not value:
        raise BadRow(f"{name!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON may write half a surrogate pair, which no text can hold.
        raise BadRow(f"{name!r} has a lone surrogate at character {error.start}") from error
    return value


def _messages(value, name: str) -> list[dict]:
    """The messages as [{"role", "content", ...}]; ShareGPT's {"from", "value"} is read too."""
    if not isinstance(value, list) or not value:
        raise BadRow(
            f"{name!r} must be a list of messages, got {type(value).__name__ if value else 'none'}"
        )
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow(
                f"message {i} must be an object with 'role' and 'content', got "
                f"{type(message).__name__}"
            )
        # parquet and `datasets` fill the keys that other rows have with None.
        message = {k: v for k, v in message.items() if v is not None}
        if "role" not in message and "from" in message:
            message = {
                "role": _SPEAKERS.get(message["from"], message["from"]),
                "content": message.get("value"),
            }
        if not isinstance(message.get("role"), str):
            raise BadRow(f"message {i} has no 'role'")
        if message.get("content") is None and "tool_calls" not in message:
            raise BadRow(f"message {i} ({message['role']}) has no 'content'")
        if "content" in message:
            message["content"] = _content(message["content"], i)
        messages.append(message)
    return messages


def _content(content, i: int) -> str:
    """The text of a message. A template prints another type as Python does; it would be learned."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(_string(part.get("text"), "text") for part in content)
    if not isinstance(content, str):
        raise BadRow(f"message {i} must have text as 'content', got {type(content).__name__}")
    return content and _string(content, "content")
