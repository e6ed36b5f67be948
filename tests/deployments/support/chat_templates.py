"""Small chat templates with tools, in the style of the models whose call formats Raydix reads."""

HERMES = r"""
{%- if tools %}{{ '<|im_start|>system\nTools:\n' }}
{%- for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}
{{- 'Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' ~ message.content ~ '</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.reasoning_content %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson ~ '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = r"""
{%- macro head(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n' }}{% endmacro %}
{%- if tools %}{{ head('system') ~ 'Answer as {"name": ..., "parameters": ...} to call one of:\n' }}
{%- for tool in tools %}{{ tool.function | tojson ~ '\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ head('ipython') ~ message.name ~ ' gave ' ~ message.content | tojson }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set called = message.tool_calls[0].function %}
{{- head('assistant') ~ '{"name": "' ~ called.name ~ '", "parameters": ' ~ called.arguments | tojson ~ '}' }}
{%- else %}{{ head(message.role) ~ message.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

_BEGIN = r"'<|im_start|>assistant\n' }}{% endif %}"
THINKING = HERMES.replace(_BEGIN, _BEGIN.replace(r"\n", r"\n<think>\n"))
"""A template that begins the reasoning itself."""

_CALLS = HERMES[HERMES.index("{{- '<tool_call>") : HERMES.index("{%- endfor %}{{ '<|im_end|>")]
_TAUGHT = """Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>."""
CODER = HERMES.replace(_TAUGHT, "Call with <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...").replace(
    _CALLS,
    r"""{{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' ~ key ~ '>\n' ~ (value if value is string else value | tojson) ~ '\n</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}
""",
)

MISTRAL_LIST = r"""
{%- if tools %}{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' ~ message.content | tojson ~ ', "call_id": "' ~ message.tool_call_id ~ '"}' }}
{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif %}
{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
{{- ', "id": "' ~ call.id ~ '"}' ~ ('' if loop.last else ', ') }}
{%- endfor %}{{ ']<|im_end|>' }}
{%- elif message.role == 'assistant' %}{{ message.content ~ '<|im_end|>' }}
{%- else %}{{ '[INST]' ~ message.content ~ '[/INST]' }}{% endif %}{% endfor %}"""
_LIST = MISTRAL_LIST[
    MISTRAL_LIST.index("{{ '[TOOL_CALLS][' }}") : MISTRAL_LIST.index("{%- elif message.role == 'ass")
]
MISTRAL = MISTRAL_LIST.replace(
    _LIST,
    r"""
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ call.function.arguments | tojson }}
{%- endfor %}{{ '<|im_end|>' }}
""",
)
"""The newer form, with the name before the arguments."""

PYTHONIC = r"""
{%- macro head(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n' }}{% endmacro %}
{%- if tools %}{{ head('system') ~ 'Call as [func_name1(params_name1=params_value1, ...), ...]:\n' }}
{%- for tool in tools %}{{ tool.function | tojson ~ '\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ head('ipython') ~ message.content | tojson }}
{%- elif message.tool_calls is defined %}{{ head('assistant') ~ '[' }}
{%- for call in message.tool_calls %}{{ call.function.name ~ '(' }}
{%- for key, value in call.function.arguments | items %}
{{- key ~ '=' ~ value | tojson ~ ('' if loop.last else ', ') }}
{%- endfor %}{{ ')' ~ ('' if loop.last else ', ') }}{% endfor %}{{ ']' }}
{%- else %}{{ head(message.role) ~ message.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""


def _family(taught: str, call: str, opens: str = "", closes: str = "") -> str:
    """Return a template that shows calls as `taught`, and writes each as `call` does, all between two marks."""
    loop = "{%- for call in message.tool_calls or [] %}"
    own = f"{{%- if message.tool_calls %}}{opens}{{%- for call in message.tool_calls %}}{call}"
    ends = "{%- endfor %}{{ '<|im_end|>"
    changed = HERMES.replace(_TAUGHT, taught).replace(loop + "\n" + _CALLS, own)
    return changed.replace(ends, f"{{%- endfor %}}{closes}{{%- endif %}}{{{{ '<|im_end|>")


_JSON = "{{- call.function.arguments | tojson }}"


def _loop(each: str) -> str:
    """Return what writes each argument, `key`, with its `text`."""
    return (
        "{%- for key, value in call.function.arguments | items %}"
        "{%- set text = value if value is string else value | tojson %}" + each + "{%- endfor %}"
    )


def _deepseek(name: str) -> str:
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


_BEGINS, _BEGIN_CALL, _SEP = _deepseek("tool calls begin"), _deepseek("tool call begin"), _deepseek("tool sep")
_END_CALL, _ENDS = _deepseek("tool call end"), _deepseek("tool calls end")

HARMONY = (
    _family(
        "functions. Calls go to the commentary channel",
        "{{- ('' if loop.first else '<|call|><|start|>assistant') ~ '<|channel|>commentary to=functions.' }}"
        "{{- call.function.name ~ ' <|constrain|>json<|message|>' }}" + _JSON,
    )
    .replace("<think>", "<|channel|>analysis<|message|>")
    .replace("</think>", "<|end|><|start|>assistant")
)
_VALUE = r"""
{%- macro show(value) %}
{%- if value is string %}{{ '<|"|>' ~ value ~ '<|"|>' }}
{%- elif value is mapping %}{{ '{' }}{{ members(value) }}{{ '}' }}
{%- elif value is iterable %}{{ '[' }}
{%- for one in value %}{{ show(one) ~ ('' if loop.last else ',') }}{% endfor %}{{ ']' }}
{%- else %}{{ value | tojson }}{% endif %}{% endmacro %}
{%- macro members(values) %}
{%- for key, value in values | items %}{{ key ~ ':' ~ show(value) ~ ('' if loop.last else ',') }}{% endfor %}
{%- endmacro %}"""
GEMMA = _VALUE + _family(
    "the functions above",
    "{{- '<|tool_call>call:' ~ call.function.name ~ '{' ~ members(call.function.arguments) ~ '}<tool_call|>' }}",
).replace("<think>", r"<|channel>thought\n").replace("</think>", r"\n<channel|>")
FAMILIES = {
    "harmony": HARMONY,
    "gemma4": GEMMA,
    "seed_oss": _family(
        r"<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n</seed:tool_call>",
        r"{{- '<seed:tool_call>\n<function=' ~ call.function.name ~ '>\n' }}"
        + _loop(r"{{- '<parameter=' ~ key ~ '>' ~ text ~ '</parameter>\n' }}")
        + r"{{- '</function>\n</seed:tool_call>' ~ ('' if loop.last else '\n') }}",
    ),
    "minimax": _family(
        r'<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>...',
        r"""{{- '<invoke name="' ~ call.function.name ~ '">\n' }}"""
        + _loop(r"""{{- '<parameter name="' ~ key ~ '">' ~ text ~ '</parameter>\n' }}""")
        + r"{{- '</invoke>\n' }}",
        r"{{- '<minimax:tool_call>\n' }}",
        "{{- '</minimax:tool_call>' }}",
    ),
    "glm": _family(
        r"<tool_call>{NAME}\n<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n...\n</tool_call>",
        r"{{- '<tool_call>' ~ call.function.name ~ '\n' }}"
        + _loop(r"{{- '<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' ~ text ~ '</arg_value>\n' }}")
        + r"{{- '</tool_call>' ~ ('' if loop.last else '\n') }}",
    ),
    "glm47": _family(
        "<tool_call>{NAME}<arg_key>{KEY}</arg_key><arg_value>{VALUE}</arg_value>...</tool_call>",
        "{{- '<tool_call>' ~ call.function.name }}"
        + _loop("{{- '<arg_key>' ~ key ~ '</arg_key><arg_value>' ~ text ~ '</arg_value>' }}")
        + "{{- '</tool_call>' }}",
    ),
    "kimi": _family(
        "the functions above",
        f"{{{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}}}{_JSON}"
        "{{- '<|tool_call_end|>' }}",
        "{{- '<|tool_calls_section_begin|>' }}",
        "{{- '<|tool_calls_section_end|>' }}",
    ),
    "deepseek_v3": _family(
        "the functions above",
        f"{{{{- '{_BEGIN_CALL}' ~ call.type ~ '{_SEP}' ~ call.function.name ~ '\\n```json\\n' }}}}{_JSON}"
        f"{{{{- '\\n```{_END_CALL}' ~ ('' if loop.last else '\\n') }}}}",
        f"{{{{- '{_BEGINS}' }}}}",
        f"{{{{- '{_ENDS}' }}}}",
    ),
    "deepseek_v31": _family(
        "the functions above",
        f"{{{{- '{_BEGIN_CALL}' ~ call.function.name ~ '{_SEP}' }}}}{_JSON}{{{{- '{_END_CALL}' }}}}",
        f"{{{{- '{_BEGINS}' }}}}",
        f"{{{{- '{_ENDS}' }}}}",
    ),
    "granite": _family(
        "a call is <|tool_call|> and a list in JSON",
        f"""{{{{- '{{"name": "' ~ call.function.name ~ '", "arguments": ' }}}}{_JSON}"""
        "{{- '}' ~ ('' if loop.last else ', ') }}",
        "{{- '<|tool_call|>[' }}",
        "{{- ']' }}",
    ),
    "phi4": _family(
        'a list formatted as functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]',
        f"""{{{{- '{{"name": "' ~ call.function.name ~ '", "arguments": ' }}}}{_JSON}"""
        "{{- '}' ~ ('' if loop.last else ', ') }}",
        "{{- 'functools[' }}",
        "{{- ']' }}",
    ),
    "qwen3_coder": CODER,
    "olmo3": _family(
        "calls stand within <function_calls></function_calls>",
        "{{- call.function.name ~ '(' }}"
        "{%- for key, value in call.function.arguments | items %}"
        "{{- key ~ '=' ~ value | tojson ~ ('' if loop.last else ', ') }}{%- endfor %}"
        r"{{- ')' ~ ('' if loop.last else '\n') }}",
        "{{- '<function_calls>' }}",
        "{{- '</function_calls>' }}",
    ),
    "mistral": MISTRAL,
    "mistral_list": MISTRAL_LIST,
    "pythonic": PYTHONIC,
}
"""A template for each format that is no JSON in Hermes' or Llama's marks."""
