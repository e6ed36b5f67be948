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
