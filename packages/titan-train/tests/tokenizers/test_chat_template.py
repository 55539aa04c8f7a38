"""Conversations as text: as transformers renders them, what the assistant wrote, and templates that are refused."""

import json
from datetime import datetime

import pytest
from titan_train.tokenizers import ByteTokenizer, ChatTemplate
from titan_train.tokenizers.chat_template import BUILT_IN, answer_stops

CHATML = BUILT_IN["chatml"]
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
)
FORGETS = (  # drops reasoning from all turns but the last, as several published templates do
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi\nthere é"},
    {"role": "assistant", "content": "Hello 👋"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def answers(template, messages):
    rendered = template.render_spans(messages)
    return [rendered.text[a:b] for a, b in rendered.spans], rendered.text


def test_marks_and_turn_by_turn_rendering_find_the_same_answers():
    marked, text = answers(ChatTemplate(CHATML, VARIABLES), TALK)
    turned, same = answers(ChatTemplate(UNMARKED, VARIABLES, ["<|im_start|>", "<|im_end|>"]), TALK)
    assert marked == turned == ["Hello 👋<|im_end|>", "2<|im_end|>"]
    assert text == same
    assert "\ufdd0" not in text


def test_a_template_without_a_generation_prompt_gives_the_answers_too():
    found, text = answers(ChatTemplate(LLAMA2, VARIABLES), TALK[1:])
    assert found == [" Hello 👋</s>", " 2</s>"]
    assert text.startswith("<s>[INST] Hi")


def test_a_conversation_that_begins_with_the_assistant_keeps_its_first_answer():
    found, _ = answers(ChatTemplate(CHATML, VARIABLES), TALK[2:])
    assert found == ["Hello 👋<|im_end|>", "2<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_and_its_marks_accepted():
    talk = [*TALK[:2], {"role": "assistant", "content": "<think>x</think>Hello"}, *TALK[3:]]
    with pytest.raises(ValueError, match=r"writes the turns before message 3 differently.*generation"):
        ChatTemplate(FORGETS, VARIABLES).render_spans(talk)
    marked = FORGETS.replace(
        "{% if m.role == 'assistant' and", "{% generation %}{% if m.role == 'assistant' and"
    ).replace("<|im_end|>\n{% endfor", "<|im_end|>\n{% endgeneration %}{% endfor")
    assert ChatTemplate(marked, VARIABLES).render_spans(talk).spans


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ 1 / 0 }}", "refuses"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{% include '/etc/passwd' %}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses"),
    ],
)
def test_a_template_reaches_nothing_outside(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, {}).render(TALK)


def test_what_is_no_template_or_no_conversation_is_refused():
    with pytest.raises(ValueError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ValueError, match="nothing to learn"):
        ChatTemplate(CHATML, {}).render_spans(TALK[:2])


def test_the_date_is_given_only_when_asked_for():
    source = "{{ strftime_now('%Y') if strftime_now is defined else 'no date' }}"
    assert ChatTemplate(source, {}).render([]) == "no date"
    assert ChatTemplate(source, {}).render([], now=datetime(2031, 5, 1)) == "2031"


def test_a_template_that_cannot_do_without_a_date_gets_the_same_one_on_every_day():
    template = ChatTemplate("{{ strftime_now('%d.%m.%Y') }}: " + UNMARKED, VARIABLES)
    rendered = template.render_spans(TALK[:3])
    assert rendered.text == "26.07.2024: " + ChatTemplate(UNMARKED, VARIABLES).render(TALK[:3])
    assert template.answer_end() == "<|im_end|>"
    assert template.render([], now=datetime(2031, 5, 1)) == "01.05.2031: "
    with pytest.raises(ValueError, match="'strftime_now' is undefined"):
        ChatTemplate("{{ raise_exception(\"'strftime_now' is undefined\") }}", {}).render(TALK)


def test_a_built_in_template_serves_a_tokenizer_without_one():
    template = ChatTemplate.of(ByteTokenizer(), BUILT_IN["plain"])
    assert ChatTemplate.of(ByteTokenizer()) is None
    assert template is not None
    assert template.render(TALK[1:2], add_generation_prompt=True) == "User: Hi\nthere é\nAssistant: "
    assert answers(template, TALK)[0] == ["Hello 👋<eos>", "2<eos>"]


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (CHATML, "<|im_end|>"),
        (UNMARKED, "<|im_end|>"),
        (FORGETS, "<|im_end|>"),
        (BUILT_IN["plain"], "</s>"),
        (LLAMA2, "</s>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}", ""),
        ("{% for m in messages %}{{ raise_exception('a system turn is missing') }}{% endfor %}", ""),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", ""),
    ],
)
def test_what_ends_an_answer_is_what_the_template_writes_behind_it(source, end):
    assert ChatTemplate(source, VARIABLES).answer_end() == end


def test_an_answer_ends_at_a_special_token_or_at_text():
    tokenizer = ByteTokenizer()
    assert answer_stops(tokenizer, ChatTemplate.of(tokenizer, CHATML)) == ((), ("<|im_end|>",))
    assert answer_stops(tokenizer, ChatTemplate.of(tokenizer, BUILT_IN["plain"])) == ((tokenizer.eos_id,), ())
    padded = ChatTemplate.of(tokenizer, LLAMA2.replace("+ eos_token", "+ ' ' + pad_token + eos_token"))
    assert answer_stops(tokenizer, padded) == ((tokenizer.pad_id,), ())
    assert answer_stops(tokenizer, None) == ((), ())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_template_writes_the_text_of_parts_and_refuses_what_it_would_leave_out(name):
    template = ChatTemplate.of(ByteTokenizer(), BUILT_IN[name])
    assert template is not None
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "👋"}]
    in_parts = [*TALK[:2], {"role": "assistant", "content": parts}]
    assert answers(template, in_parts) == answers(template, TALK[:3])
    call = {"function": {"name": "f", "arguments": "{}"}}
    for said in (
        {"content": None, "tool_calls": [call]}, {"content": "I look", "tool_calls": [call]}, {"content": []},
        {"content": "", "function_call": call["function"]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"message 3 holds more than text, or none"):
            template.render_spans([*TALK[:2], {"role": "assistant", **said}])
    with pytest.raises(ValueError, match="message 1 holds more"):
        template.render([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
    marked = ChatTemplate(
        CHATML.replace("message.content", "(message.content or message.tool_calls | tojson)"), VARIABLES
    )
    assert marked.render([{"role": "user", "content": None, "tool_calls": [call]}])


TRIMS = (  # as Llama 3's and Gemma 2's do
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def test_parts_of_text_are_joined_where_a_template_knows_no_parts():
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "👋"}]
    in_parts = [*TALK[:2], {"role": "assistant", "content": parts}]
    assert answers(ChatTemplate(TRIMS, {}), in_parts) == answers(ChatTemplate(TRIMS, {}), TALK[:3])
    own = TRIMS.replace(
        "m['content'] | trim", "m.content if m.content is string else m.content | map(attribute='text') | join('+')"
    )
    assert answers(ChatTemplate(own, {}), in_parts)[0] == ["Hello +👋<|end|>"]
    with pytest.raises(ValueError, match="message 1 holds more than text"):
        ChatTemplate(TRIMS, {}).render([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])


EMPTIES = TRIMS.replace("m['content'] | trim", "m.content if m.content is string else ''")  # as Qwen3's does
ADDS = TRIMS.replace("m['content'] | trim", "'' + m.content")  # as Qwen2.5's does, and raises
ENCODES = TRIMS.replace("m['content'] | trim", "m.content if m.content is string else m.content | tojson")  # Jamba's


@pytest.mark.parametrize("source", [TRIMS, EMPTIES, ADDS, ENCODES])
def test_parts_are_neither_lost_nor_refused_by_a_template_that_knows_none(source):
    template = ChatTemplate(source, {})
    said = [("user", ["Say ", "it"]), ("assistant", ["it"]), ("user", ["more"]), ("assistant", ["Say", " more"])]
    texts = [{"role": role, "content": "".join(parts)} for role, parts in said]
    in_parts = [{"role": role, "content": [{"type": "text", "text": text} for text in parts]} for role, parts in said]
    assert answers(template, in_parts) == answers(template, texts)
    assert answers(template, [*texts[:3], in_parts[3]]) == answers(template, texts)
    assert template.render(in_parts[:3], add_generation_prompt=True) == template.render(
        texts[:3], add_generation_prompt=True
    )
    content = [*in_parts[0]["content"], {"type": "image", "image": "a.png"}]
    with pytest.raises(ValueError, match=r"message 1 holds more than text|can only concatenate str"):
        template.render([{"role": "user", "content": content}])


def test_a_template_keeps_the_roles_and_parts_that_it_reads():
    reads = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
        "[{{ p.text | trim if p.type == 'text' else p.type }}]{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "image"}, {"type": "text", "text": "a "}]
    system = {"role": "system", "content": [{"type": "text", "text": "b"}, "c"]}
    assert ChatTemplate(reads, {}).render([system, {"role": "user", "content": parts}]) == "bc[image][a]"
    assert ChatTemplate(reads, {}).render([{"role": "user", "content": parts[:1]}]) == "[image]"
    found = [{"text": "a", "score": 1}, {"output": 2}]  # what a function gave
    assert ChatTemplate(ENCODES, {}).render([{"role": "tool", "content": found}]).count(json.dumps(found)) == 1
    refuses = ChatTemplate(ADDS.replace("m['role']", "(m.role if loop.index < 3 else raise_exception('too long'))"), {})
    with pytest.raises(ValueError, match="can only concatenate str"):
        refuses.render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "writes", ["call.arguments | tojson", "call.arguments | items | list | string", "call.arguments.items() | list"]
)
def test_arguments_that_are_json_text_are_read_as_an_object_wherever_else_they_stand(writes):
    source = TRIMS.replace("| trim }}", "| trim }}{%% for call in m.tool_calls %%}f{{ %s }}{%% endfor %%}" % writes)  # noqa: UP031
    for asked, call in (('{"a": "é"}', {"a": "é"}), ("{}", {}), ("f", {"a": {"b": [1]}})):
        as_text, as_object = (
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]},
                {"role": "tool", "content": json.dumps(call, ensure_ascii=False)},
                {"role": "assistant", "content": [{"type": "text", "text": "Done"}]},
            ]
            for arguments in (json.dumps(call, ensure_ascii=False), call)
        )
        assert answers(ChatTemplate(source, {}), as_text) == answers(ChatTemplate(source, {}), as_object)


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ("call.function.arguments | tojson", '{"city": "Köln"}'),
        ("call | tojson", '{"function": {"name": "f", "arguments": {"city": "Köln"}}}'),
        ("call.function.arguments", '{"city": "Köln"}'),
        ("call.function.arguments if call.function.arguments is string else call | tojson", '{"city": "Köln"}'),
    ],
)
def test_arguments_that_are_json_text_are_not_encoded_twice(writes, expected):
    template = ChatTemplate(
        f"{{% for m in messages %}}{{% for call in m.tool_calls %}}{{{{ {writes} }}}}{{% endfor %}}{{% endfor %}}", {}
    )
    for arguments in ('{"city": "Köln"}', {"city": "Köln"}):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        if isinstance(arguments, str) or writes.startswith(("call |", "call.function.arguments |")):
            assert template.render([message]) == expected
    message["tool_calls"][0]["function"]["arguments"] = "no JSON"
    assert "no JSON" in template.render([message])


@pytest.mark.parametrize(
    "source", [CHATML, UNMARKED, LLAMA2, "{{ tools | tojson }}{{ messages[0] | tojson(indent=2) }}"]
)
def test_text_equals_that_of_transformers(source, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models

    (tmp_path / "tokenizer.json").write_text(
        tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[])).to_str()
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(VARIABLES | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source})
    )
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for prompt in (False, True):
        for tools in (None, [{"type": "function", "function": {"name": "f<", "description": "é"}}]):
            expected = theirs.apply_chat_template(TALK[1:], tools=tools, tokenize=False, add_generation_prompt=prompt)
            ours = ChatTemplate(source, VARIABLES).render(TALK[1:], tools=tools, add_generation_prompt=prompt)
            assert ours == expected


THOUGHT = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}: {{ m.content }}.{% endfor %}"


def test_reasoning_by_any_of_its_names_reaches_the_template():
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert ChatTemplate(THOUGHT, {}).render([{"role": "assistant", "content": "b", name: "a"}]) == "a/a: b."
    both = {"role": "assistant", "content": "b", "thinking": "a", "reasoning_content": "c"}
    assert ChatTemplate(THOUGHT, {}).render([both]) == "c/a: b."


def test_conversations_with_tools_take_the_template_for_tools():
    template = ChatTemplate(CHATML, VARIABLES, tool_use="{{ tools | tojson }}" + UNMARKED)
    tools = [{"name": "f"}]
    assert template.render(TALK[:3]) == ChatTemplate(CHATML, VARIABLES).render(TALK[:3])
    with_tools = template.render_spans(TALK[:3], tools=tools)
    assert with_tools.text == template.render(TALK[:3], tools=tools)
    assert with_tools.text.startswith('[{"name": "f"}]')
    ((start, end),) = with_tools.spans  # found turn by turn, as that template has no marks
    assert with_tools.text[start:end] == "Hello 👋<|im_end|>\n"
