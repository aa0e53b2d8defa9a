"""Which tokens are learned: assistant turns by markers or by prefixes, completions, plain text; and
what is refused.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from workbench import TEMPLATE

from hfpatch.trainer import chat

# An assistant turn with markers around its content and its end, as TRL's training templates have
# them.
MARKED = (
    "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
# Shortens earlier turns, as templates of reasoning models drop earlier thoughts.
FORGETFUL = TEMPLATE.replace("{{ m.content | trim }}", "{{ m.content if loop.last else '...' }}")
PARTS = TEMPLATE.replace(
    "{{ m.content | trim }}",
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
)


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def learned_text(messages, tokenizer, **options):
    ids, learned = chat.encode_chat(messages, tokenizer, **options)
    assert len(ids) == len(learned)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        messages, tokenize=False, tools=options.get("tools")
    )
    # The learned stretches, one string each.
    stretches, before = [], False
    for token, on in zip(ids, learned):
        if on:
            stretches = (
                stretches + [[token]] if not before else [*stretches[:-1], [*stretches[-1], token]]
            )
        before = on
    return [tokenizer.decode(s) for s in stretches]


def test_every_assistant_turn_and_nothing_else(tokenizer):
    messages = turns(
        ("system", "Be brief."), ("user", "Hi <assistant>"), ("assistant", " Hello! "),
        ("user", "Bye"),
        ("assistant", "Ciao"),
    )  # fmt: skip
    assert learned_text(messages, tokenizer) == ["Hello!</s>", "Ciao</s>"]


def test_tool_messages_are_read_and_tool_calls_learned(tokenizer):
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
    }
    messages = [*turns(("user", "1+1?")), call, *turns(("tool", "2"), ("assistant", "It is 2."))]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert learned_text(messages, tokenizer, tools=tools) == ["[add]</s>", "It is 2.</s>"]


def test_two_assistant_turns_in_a_row(tokenizer):
    assert learned_text(
        turns(("user", "Hi"), ("assistant", "A"), ("assistant", "B")), tokenizer
    ) == ["A</s>", "B</s>"]


def test_conversational_completion_learns_the_completion_alone(tokenizer):
    row = {
        "prompt": turns(("user", "a"), ("assistant", "b"), ("user", "c")),
        "completion": turns(("assistant", "d")),
    }
    ids, learned = chat.encode(row, tokenizer)
    assert tokenizer.decode([t for t, on in zip(ids, learned) if on]) == "d</s>"


def test_sharegpt_names(tokenizer):
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}
    ids, learned = chat.encode(row, tokenizer)
    assert tokenizer.decode([t for t, on in zip(ids, learned) if on]) == "Yo</s>"
    with pytest.raises(chat.BadRow, match="^'conversations' must be a list"):
        chat.encode({"conversations": "Hi"}, tokenizer)


def test_prompt_and_completion(tokenizer):
    ids, learned = chat.encode({"prompt": "2+2=", "completion": "4"}, tokenizer)
    assert tokenizer.decode(ids) == "2+2=4</s>"
    assert learned == [False] * (len(ids) - 2) + [True, True]


def test_text_is_learned_whole_and_ends(tokenizer):
    ids, learned = chat.encode({"text": "import json"}, tokenizer)
    assert tokenizer.decode(ids) == "import json</s>" and all(learned)


@pytest.mark.parametrize(
    "change",
    [
        # drops what the assistant thought in earlier turns, as reasoning models' templates do
        ("{{ m.content | trim }}", "{{ m.content if loop.last else '...' }}"),
        # the same for the assistant's turns alone
        (
            "{{ m.content | trim }}",
            "{{ m.content if loop.last or m.role != 'assistant' else '...' }}",
        ),
        # says how many messages there are, up front
        ("{{ bos_token }}", "{{ messages | length }}"),
    ],
)
def test_template_that_rewrites_its_prefix_is_refused(tokenizer, change):
    stock = tokenizer.chat_template
    try:
        tokenizer.chat_template = stock.replace(*change)
        with pytest.raises(chat.BadRow, match="changes earlier turns at message 1"):
            chat.encode_chat(
                turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
                tokenizer,
            )
    finally:
        tokenizer.chat_template = stock


def test_template_that_refuses_says_so(tokenizer):
    stock = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(chat.BadRow, match="roles must alternate"):
            chat.encode_chat(turns(("user", "a"), ("assistant", "b")), tokenizer)
    finally:
        tokenizer.chat_template = stock


@pytest.mark.parametrize(
    "row, words",
    [
        (
            {"body": "x"},
            "a row needs a column 'text', 'messages', or 'prompt' and 'completion', got 'body'",
        ),
        ({"text": 3}, "'text' must be a string, got int"),
        ({"text": ""}, "'text' is empty"),
        ({"prompt": "a", "completion": None}, "'completion' must be a string, got NoneType"),
        ({"messages": []}, "'messages' must be a list of messages, got none"),
        ({"messages": "hi"}, "'messages' must be a list of messages, got str"),
        ({"messages": ["hi"]}, "message 0 must be an object with 'role' and 'content', got str"),
        ({"messages": [{"content": "hi"}]}, "message 0 has no 'role'"),
        ({"messages": [{"role": "user"}]}, r"message 0 \(user\) has no 'content'"),
    ],
)
def test_bad_rows_say_what_is_wrong(tokenizer, row, words):
    with pytest.raises(chat.BadRow, match=words):
        chat.encode(row, tokenizer)


def learned_by(tokenizer, row, own, monkeypatch):
    """The text that is learned of a row, with `own` as the tokenizer's template, and the template
    chosen.
    """
    monkeypatch.setattr(tokenizer, "chat_template", own)
    template = chat.training_template(tokenizer)
    ids, learned = chat.encode(row, tokenizer, template=template)
    return tokenizer.decode([t for t, on in zip(ids, learned) if on]), template


DIALOGUE = {
    "messages": turns(
        ("user", "ask"), ("assistant", "first"), ("user", "beg"), ("assistant", "second")
    )
}


def test_markers_of_the_tokenizers_own_template_tell_what_is_learned(tokenizer, monkeypatch):
    # Its last turn ends in another way than earlier ones, so that no prefix is kept.
    own = MARKED.replace(
        "{{ m.content }}{{ eos_token }}{% endgen", "{{ m.content }}{{ '!' if loop.last }}{% endgen"
    )
    text, template = learned_by(tokenizer, DIALOGUE, own, monkeypatch)
    assert (text, template) == ("firstsecond!", chat.Template(marked=True))


def test_training_template_of_trl_is_taken_and_the_tokenizers_own_stays(tokenizer, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "trl", SimpleNamespace(get_training_chat_template=lambda tokenizer: MARKED)
    )
    text, template = learned_by(tokenizer, DIALOGUE, FORGETFUL, monkeypatch)
    assert text == "first</s>second</s>" and template == chat.Template(MARKED, marked=True)
    assert tokenizer.chat_template == FORGETFUL, (
        "what is saved with the model is the template to generate with"
    )
    row = {"prompt": DIALOGUE["messages"][:3], "completion": DIALOGUE["messages"][3:]}
    assert learned_by(tokenizer, row, FORGETFUL, monkeypatch)[0] == "second</s>", (
        "earlier turns are the prompt's"
    )


def test_without_trl_prefixes_tell_and_a_refusal_names_it(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "trl" else find_spec(name, *a)
    )
    assert learned_by(tokenizer, DIALOGUE, TEMPLATE, monkeypatch) == (
        "first</s>second</s>",
        chat.OWN,
    )
    with pytest.raises(
        chat.BadRow, match="changes earlier turns at message 1, .*; pip install trl"
    ):
        learned_by(tokenizer, DIALOGUE, FORGETFUL, monkeypatch)


def test_template_that_trl_does_not_know_goes_by_prefixes(tokenizer, monkeypatch):
    pytest.importorskip("trl")
    assert learned_by(tokenizer, DIALOGUE, TEMPLATE, monkeypatch) == (
        "first</s>second</s>",
        chat.OWN,
    )
    with pytest.raises(chat.BadRow, match="changes earlier turns .* cannot be found$"):
        learned_by(tokenizer, DIALOGUE, FORGETFUL, monkeypatch)


def test_template_that_wants_parts_gets_them(tokenizer, monkeypatch):
    """Templates of models with images: Idefics' renders a plain string as nothing, without an
    error.
    """
    text, template = learned_by(tokenizer, DIALOGUE, PARTS, monkeypatch)
    assert (text, template.parts) == ("first</s>second</s>", True)


def test_every_published_template_that_trl_keeps_trains_a_two_turn_dialogue(tokenizer, monkeypatch):
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    published = [
        file for file in sorted(folder.glob("*.jinja")) if not file.stem.endswith("_training")
    ]
    assert len(published) > 30
    for file in published:
        text, _ = learned_by(tokenizer, DIALOGUE, file.read_text(encoding="utf-8"), monkeypatch)
        assert 0 <= text.find("first") < text.find("second"), file.name
        assert "ask" not in text and "beg" not in text, file.name
