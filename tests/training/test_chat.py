"""Which tokens are learned: assistant turns by prefix differences, completions, plain text; and what is refused."""

import pytest

from hfpatch.training import chat


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def learned_text(messages, tokenizer, **options):
    ids, learned = chat.encode_chat(messages, tokenizer, **options)
    assert len(ids) == len(learned)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False, tools=options.get("tools"))
    # The learned stretches, one string each.
    stretches, before = [], False
    for token, on in zip(ids, learned):
        if on:
            stretches = stretches + [[token]] if not before else [*stretches[:-1], [*stretches[-1], token]]
        before = on
    return [tokenizer.decode(s) for s in stretches]


def test_every_assistant_turn_and_nothing_else(tokenizer):
    messages = turns(
        ("system", "Be brief."), ("user", "Hi <assistant>"), ("assistant", " Hello! "), ("user", "Bye"),
        ("assistant", "Ciao"),
    )  # fmt: skip
    assert learned_text(messages, tokenizer) == ["Hello!</s>", "Ciao</s>"]


def test_tool_messages_are_read_and_tool_calls_learned(tokenizer):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    messages = [*turns(("user", "1+1?")), call, *turns(("tool", "2"), ("assistant", "It is 2."))]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert learned_text(messages, tokenizer, tools=tools) == ["[add]</s>", "It is 2.</s>"]


def test_two_assistant_turns_in_a_row(tokenizer):
    assert learned_text(turns(("user", "Hi"), ("assistant", "A"), ("assistant", "B")), tokenizer) == ["A</s>", "B</s>"]


def test_conversational_completion_learns_the_completion_alone(tokenizer):
    row = {"prompt": turns(("user", "a"), ("assistant", "b"), ("user", "c")), "completion": turns(("assistant", "d"))}
    ids, learned = chat.encode(row, tokenizer)
    assert tokenizer.decode([t for t, on in zip(ids, learned) if on]) == "d</s>"


def test_sharegpt_names(tokenizer):
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}
    ids, learned = chat.encode(row, tokenizer)
    assert tokenizer.decode([t for t, on in zip(ids, learned) if on]) == "Yo</s>"


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
        ("{{ m.content | trim }}", "{{ m.content if loop.last or m.role != 'assistant' else '...' }}"),
        # says how many messages there are, up front
        ("{{ bos_token }}", "{{ messages | length }}"),
    ],
)
def test_template_that_rewrites_its_prefix_is_refused(tokenizer, change):
    stock = tokenizer.chat_template
    try:
        tokenizer.chat_template = stock.replace(*change)
        with pytest.raises(chat.BadRow, match="does not keep its prefix at message 1"):
            chat.encode_chat(turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")), tokenizer)
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
        ({"body": "x"}, "expected a column 'text', 'messages', or 'prompt' and 'completion'; came 'body'"),
        ({"text": 3}, "'text' must be a string, int came"),
        ({"text": ""}, "'text' is empty"),
        ({"prompt": "a", "completion": None}, "'completion' must be a string, NoneType came"),
        ({"messages": []}, "'messages' must be a list of messages, none came"),
        ({"messages": "hi"}, "'messages' must be a list of messages, str came"),
        ({"messages": ["hi"]}, "message 0 must be an object with 'role' and 'content', str came"),
        ({"messages": [{"content": "hi"}]}, "message 0 has no 'role'"),
        ({"messages": [{"role": "user"}]}, r"message 0 \(user\) has no 'content'"),
    ],
)
def test_bad_rows_say_what_is_wrong(tokenizer, row, words):
    with pytest.raises(chat.BadRow, match=words):
        chat.encode(row, tokenizer)
